#include "trireme/base/notices.h"

#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace trireme {
namespace {

class Heard final : public NoticeListener {
 public:
  void hear(const Notice& notice) noexcept override {
    const std::lock_guard lock(mutex_);
    names_.emplace_back(notice.name);
  }
  std::vector<std::string> names() const {
    const std::lock_guard lock(mutex_);
    return names_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> names_;
};

using Names = std::vector<std::string>;

TEST(Notices, AreHeardFromTheBeginningOfAListeningToItsEnd) {
  const auto heard = std::make_shared<Heard>();
  EXPECT_FALSE(has_listeners());
  { const NoticeScope before(Notice::Kind::kCall, "before"); }
  {
    const NoticeScope begun_before(Notice::Kind::kCall, "begun before");
    const Listening listening(0, heard);
    EXPECT_TRUE(has_listeners());
    { const NoticeScope within(Notice::Kind::kCall, "within"); }
  }
  EXPECT_FALSE(has_listeners());
  { const NoticeScope after(Notice::Kind::kCall, "after"); }
  EXPECT_EQ(heard->names(), Names{"within"});
}

TEST(Notices, TellSinceWhenNoMethodRuns) {
  const auto before = Notice::Clock::now();
  {
    const NoticeScope outer(Notice::Kind::kCall, "step");
    { const NoticeScope inner(Notice::Kind::kCall, "forward"); }
    EXPECT_FALSE(outside_since());
  }
  ASSERT_TRUE(outside_since());
  EXPECT_GE(*outside_since(), before);
  { const NoticeScope no_method(Notice::Kind::kStage, "forward of 3"); }
  const auto since = *outside_since();
  EXPECT_LE(since, Notice::Clock::now());
  EXPECT_EQ(*outside_since(), since);
}

TEST(Notices, OfARankAreForItsListeners) {
  const auto first = std::make_shared<Heard>();
  const auto second = std::make_shared<Heard>();
  const Listening hears_first(0, first);
  const Listening hears_second(1, second);
  tell({.name = "of 1", .rank = 1});
  tell({.name = "of 0", .rank = 0});
  EXPECT_EQ(first->names(), Names{"of 0"});
  EXPECT_EQ(second->names(), Names{"of 1"});
}

TEST(Notices, WithoutARankAreTheThreadsWhereRanksAreThreads) {
  const auto first = std::make_shared<Heard>();
  const auto second = std::make_shared<Heard>();
  const Listening hears_first(0, first);
  std::thread([&] {
    const Listening hears_second(1, second);
    tell({.name = "second"});
  }).join();
  tell({.name = "first"});
  EXPECT_EQ(first->names(), Names{"first"});
  EXPECT_EQ(second->names(), Names{"second"});
}

TEST(Notices, OfAnyThreadAreThoseOfTheProcesssOneRank) {
  const auto heard = std::make_shared<Heard>();
  const Listening listening(3, heard);
  std::thread([] { tell({.name = "elsewhere"}); }).join();
  EXPECT_EQ(heard->names(), Names{"elsewhere"});
}

}  // namespace
}  // namespace trireme
