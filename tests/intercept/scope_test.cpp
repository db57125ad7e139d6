// Which operators are seen, and what is known of them.
#include <ATen/ThreadLocalState.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/add.h>
#include <ATen/ops/atleast_2d.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/split.h>
#include <ATen/ops/zeros.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/counting_storage.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

using testing::CountingStorage;
using Watch = InterceptScope::Watch;
using Names = std::vector<std::string>;

/// Writes down what passes.
class Recorder final : public Pass {
 public:
  explicit Recorder(PassOrder order = PassOrder::kTouch) : order_(order) {}
  PassOrder order() const override { return order_; }
  void run(OperatorCall& call, Next next) override {
    names.push_back(call.op.schema().name());
    depths.push_back(call.depth);
    serials.push_back(RankContext::current()->serial() - first);
    traits.insert_or_assign(names.back(), call.traits);
    next(call);
    finished.push_back(call.op.schema().name());
  }
  Names names;
  Names finished;
  std::vector<int> depths;
  uint64_t first = 0;
  std::vector<uint64_t> serials;  // from `first` on
  std::map<std::string, OperatorTraits> traits;

 private:
  const PassOrder order_;
};

TEST(InterceptScope, SeesOperatorsOfItsThreadWhileItLives) {
  Recorder recorder;
  const at::Tensor x = at::ones({2});
  {
    InterceptScope scope(Watch::kWrites, &recorder);
    x.add(1);
  }
  x.mul(2);
  EXPECT_EQ(recorder.finished.back(), "aten::add");
  EXPECT_FALSE(c10::impl::tls_is_dispatch_key_included(kInterceptKey));
}

TEST(InterceptScope, SeesACompositeOnceAndNothingInside) {
  Recorder recorder;
  const at::Tensor x = at::ones({2, 3}), weight = at::ones({4, 3});
  InterceptScope scope(Watch::kWrites, &recorder);
  recorder.names.clear();
  const uint64_t serial = RankContext::current()->serial();
  at::linear(x, weight);
  EXPECT_EQ(recorder.names, Names{"aten::linear"});
  EXPECT_EQ(RankContext::current()->serial(), serial + 1);
}

TEST(InterceptScope, SeesInsideOfACompositeThatAPassOpens) {
  class Opener final : public Pass {
   public:
    PassOrder order() const override { return PassOrder::kRecompute; }
    void run(OperatorCall& call, Next next) override { call.traits.composite ? next.open(call) : next(call); }
  };
  Opener opener;
  Recorder recorder;
  const at::Tensor x = at::ones({2, 3});
  InterceptScope opening(Watch::kWrites, &opener), recording(Watch::kWrites, &recorder);
  recorder.names.clear();
  recorder.finished.clear();
  recorder.depths.clear();
  recorder.serials.clear();
  recorder.first = RankContext::current()->serial();
  at::silu(at::atleast_2d(x.flatten()));
  EXPECT_EQ(recorder.names,
            (Names{"aten::flatten", "aten::view", "aten::atleast_2d", "aten::unsqueeze", "aten::silu"}));
  EXPECT_EQ(recorder.finished,
            (Names{"aten::view", "aten::flatten", "aten::unsqueeze", "aten::atleast_2d", "aten::silu"}));
  EXPECT_FALSE(recorder.traits.at("aten::silu").composite);
  EXPECT_EQ(recorder.depths, (std::vector{0, 1, 0, 1, 0}));
  EXPECT_EQ(recorder.serials, (std::vector<uint64_t>{1, 1, 2, 2, 3}));
  EXPECT_THROW(at::rms_norm(x, {4}), c10::Error);
  recorder.names.clear();
  x.add(1);
  EXPECT_EQ(recorder.names, Names{"aten::add"});
}

TEST(InterceptScope, SeesTheOperatorsOfBackward) {
  Recorder recorder;
  const at::Tensor x = at::ones({2, 3}).requires_grad_();
  InterceptScope scope(Watch::kWrites, &recorder);
  const at::Tensor loss = x.mul(x).sum();
  recorder.names.clear();
  loss.backward();
  EXPECT_EQ(std::count(recorder.names.begin(), recorder.names.end(), "aten::mul"), 2);
}

TEST(InterceptScope, Nests) {
  Recorder outer, inner;
  const at::Tensor x = at::ones({2});
  InterceptScope first(Watch::kWrites, &outer);
  {
    InterceptScope second(Watch::kAll, &inner);
    outer.names.clear();
    inner.names.clear();
    x.add(1);
    EXPECT_EQ(outer.names.size(), 1u);
    EXPECT_EQ(inner.names.size(), 1u);
  }
  x.add(1);
  EXPECT_EQ(outer.names.size(), 2u);
  EXPECT_EQ(inner.names.size(), 1u);
}

TEST(InterceptScope, WithOnePassTwiceRunsItTwiceUntilOneEnds) {
  Recorder recorder;
  const at::Tensor x = at::ones({2});
  InterceptScope first(Watch::kWrites, &recorder);
  {
    InterceptScope second(Watch::kWrites, &recorder);
    recorder.names.clear();
    x.add(1);
    EXPECT_EQ(recorder.names.size(), 2u);
  }
  x.add(1);
  EXPECT_EQ(recorder.names.size(), 3u);
}

TEST(InterceptScope, MayEndBeforeOneThatBeganLater) {
  Recorder first_recorder, second_recorder;
  const at::Tensor x = at::ones({2});
  std::optional<InterceptScope> first(std::in_place, Watch::kAll, &first_recorder);
  std::optional<InterceptScope> second(std::in_place, Watch::kWrites, &second_recorder);
  first.reset();
  first_recorder.names.clear();
  second_recorder.names.clear();
  x.add(1);
  EXPECT_EQ(second_recorder.names, Names{"aten::add"});
  EXPECT_TRUE(first_recorder.names.empty());
  second.reset();
  x.add(1);
  EXPECT_EQ(second_recorder.names.size(), 1u);
}

TEST(InterceptScope, StaysRightWhenAnOperatorThrows) {
  Recorder recorder;
  const at::Tensor x = at::ones({2}), y = at::ones({3});
  InterceptScope scope(Watch::kAll, &recorder);
  EXPECT_THROW(x.add(y), c10::Error);
  EXPECT_EQ(recorder.names.back(), "aten::add");
  recorder.names.clear();
  x.mul(2);
  EXPECT_EQ(recorder.names, Names{"aten::mul"});
  EXPECT_EQ(recorder.finished.back(), "aten::mul");
}

TEST(InterceptScope, OfOneThreadIsNotSeenByAnother) {
  Recorder recorders[2];
  std::atomic<int> arrived{0};
  const auto body = [&](int id) {
    InterceptScope scope(Watch::kAll, &recorders[id]);
    recorders[id].names.clear();
    ++arrived;
    while (arrived < 2) std::this_thread::yield();
    const at::Tensor x = at::ones({2});
    for (int i = 0; i < 200; ++i) id == 0 ? x.add(1) : x.mul(2);
  };
  std::thread first(body, 0), second(body, 1);
  first.join();
  second.join();
  for (int id = 0; id < 2; ++id) {
    EXPECT_EQ(recorders[id].names.size(), 201u);
    EXPECT_EQ(recorders[id].names.back(), id == 0 ? "aten::add" : "aten::mul");
  }
}

/// Whether a thread that works for this one, as autograd's helpers do, finds this rank.
bool is_known_to_helpers() {
  RankContext* found = nullptr;
  std::thread([&, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    found = RankContext::current();
  }).join();
  return found != nullptr && found == RankContext::current();
}

TEST(InterceptScope, IsThatOfTheThreadsThatWorkForItsOwn) {
  EXPECT_FALSE(is_known_to_helpers());
  {
    InterceptScope scope(Watch::kWrites);
    EXPECT_TRUE(is_known_to_helpers());
  }
  EXPECT_FALSE(is_known_to_helpers());
}

TEST(InterceptScope, AndAProfilerBeginAndEndInAnyOrder) {
  using namespace torch::profiler::impl;
  const ProfilerConfig config(ProfilerState::KINETO);
  const std::set<ActivityType> activities = {ActivityType::CPU};
  const auto profile = [&] {
    torch::autograd::profiler::prepareProfiler(config, activities);
    torch::autograd::profiler::enableProfiler(config, activities);
  };
  const auto is_in = [](const char* name, const auto& profiled) {
    const auto& events = profiled->events();
    return std::any_of(events.begin(), events.end(), [&](const auto& event) { return event.name() == name; });
  };
  const at::Tensor x = at::ones({2});
  Recorder recorder;
  profile();
  auto scope = std::make_optional<InterceptScope>(Watch::kWrites, &recorder);
  x.add(1);
  EXPECT_TRUE(is_in("aten::add", torch::autograd::profiler::disableProfiler()));
  EXPECT_TRUE(is_known_to_helpers());
  profile();
  x.mul(2);
  scope.reset();
  EXPECT_TRUE(is_in("aten::mul", torch::autograd::profiler::disableProfiler()));
  EXPECT_FALSE(is_known_to_helpers());
  EXPECT_EQ(recorder.finished.back(), "aten::mul");
}

TEST(OperatorTraits, TellWhichArgumentsAreWritten) {
  Recorder recorder;
  const at::Tensor x = at::ones({2, 3});
  at::Tensor out = at::empty({2, 3});
  InterceptScope scope(Watch::kWrites, &recorder);
  x.add(1);
  EXPECT_EQ(recorder.traits.at("aten::add").written, 0u);
  x.add_(1);
  EXPECT_EQ(recorder.traits.at("aten::add_").written, 0b1u);
  EXPECT_FALSE(recorder.traits.at("aten::add_").overwrites);
  at::add_out(out, x, x);
  EXPECT_EQ(recorder.traits.at("aten::add").written, 0b1000u);  // self, other, alpha, out
  at::_foreach_add_({x, out}, 1);
  EXPECT_EQ(recorder.traits.at("aten::_foreach_add_").written, 0b1u);
  x.zero_();
  EXPECT_TRUE(recorder.traits.at("aten::zero_").overwrites);
  x.fill_(1);
  EXPECT_TRUE(recorder.traits.at("aten::fill_").overwrites);
  x.fill_(x.select(0, 0).select(0, 0));
  EXPECT_FALSE(recorder.traits.at("aten::fill_").overwrites);  // the value may be a part of x
  x.t();
  EXPECT_EQ(recorder.traits.at("aten::t").written, 0u);  // an alias, but not a write
}

TEST(OperatorTraits, TellWhichOperatorsDrawRandomNumbers) {
  Recorder recorder;
  InterceptScope scope(Watch::kWrites, &recorder);
  const at::Tensor x = at::randn({4});
  at::dropout(x, 0.5, true);
  x.normal_();
  x.add(1);
  EXPECT_TRUE(recorder.traits.at("aten::randn").random);
  EXPECT_TRUE(recorder.traits.at("aten::dropout").random);
  EXPECT_TRUE(recorder.traits.at("aten::normal_").random);
  EXPECT_FALSE(recorder.traits.at("aten::add").random);
}

class Managed : public ::testing::Test {
 protected:
  using Accesses = std::vector<Access>;
  /// The accesses that `act` makes to `tensor`.
  Accesses accesses_of(const std::function<void()>& act) {
    owner->accesses.clear();
    owner->writes = 0;
    act();
    return owner->accesses;
  }
  at::Tensor tensor = at::ones({2, 3});
  std::shared_ptr<CountingStorage> owner = CountingStorage::manage(tensor);
};

TEST_F(Managed, IsToldOfReadsThroughViewsListsAndOptionals) {
  const at::Tensor view = tensor.t();
  const at::Tensor index = at::zeros({1}, at::kLong);
  InterceptScope scope(Watch::kAll);
  EXPECT_EQ(accesses_of([&] { tensor.add(1); }), Accesses{Access::kRead});
  EXPECT_EQ(accesses_of([&] { view.mul(2); }), Accesses{Access::kRead});
  EXPECT_EQ(accesses_of([&] { at::cat({view, view}); }), (Accesses{Access::kRead, Access::kRead}));
  EXPECT_EQ(accesses_of([&] { at::linear(at::ones({1, 3}), tensor, at::ones({2})); }), Accesses{Access::kRead});
  EXPECT_EQ(accesses_of([&] { at::index(tensor, {std::optional<at::Tensor>(), index}); }), Accesses{Access::kRead});
  EXPECT_EQ(accesses_of([&] { tensor.split(1); }), Accesses{Access::kRead});
  EXPECT_EQ(accesses_of([&] { at::ones({2}); }), Accesses{});
}

TEST_F(Managed, StandingInAnOptionalTensorListIsSeen) {
  const at::Tensor places = at::zeros({2}, at::kLong);
  const auto place_owner = CountingStorage::manage(places);
  const at::Tensor data = at::ones({4});
  InterceptScope scope(Watch::kAll);
  at::index(data, {places});
  EXPECT_EQ(place_owner->accesses, Accesses{Access::kRead});
}

TEST_F(Managed, IsToldOfWritesAndOfWhatIsOnlyOverwritten) {
  InterceptScope scope(Watch::kAll);
  EXPECT_EQ(accesses_of([&] { tensor.add_(1); }), Accesses{Access::kWrite});
  EXPECT_EQ(owner->writes, 1);
  EXPECT_EQ(accesses_of([&] { tensor.zero_(); }), Accesses{Access::kOverwrite});
  EXPECT_EQ(accesses_of([&] { tensor.t().fill_(3); }),
            (Accesses{Access::kRead, Access::kOverwrite}));  // t() reads, then all is filled
  EXPECT_EQ(accesses_of([&] { tensor.select(0, 0).zero_(); }), (Accesses{Access::kRead, Access::kWrite}));
  EXPECT_EQ(accesses_of([&] { tensor.fill_(tensor.select(0, 0).select(0, 0)); }).back(), Access::kRead);
  EXPECT_EQ(owner->accesses[owner->accesses.size() - 2], Access::kWrite);
  EXPECT_EQ(accesses_of([&] { at::_foreach_add_({tensor}, 1); }), Accesses{Access::kWrite});
  EXPECT_EQ(accesses_of([&] { at::add_out(tensor, at::ones({2, 3}), 1); }), Accesses{Access::kWrite});
}

TEST_F(Managed, IsToldOfWritesAloneWhereReadsAreNotWatched) {
  InterceptScope scope(Watch::kWrites);
  EXPECT_EQ(accesses_of([&] { tensor.add(1); }), Accesses{});
  EXPECT_EQ(accesses_of([&] { tensor.add_(tensor); }), Accesses{Access::kWrite});
}

TEST_F(Managed, IsToldAfterAWriteThatThrew) {
  InterceptScope scope(Watch::kWrites);
  EXPECT_EQ(accesses_of([&] { EXPECT_ANY_THROW(tensor.add_(at::ones({7}))); }), Accesses{Access::kWrite});
  EXPECT_EQ(owner->writes, 1);
}

TEST_F(Managed, ThatFailsStopsTheOperator) {
  InterceptScope scope(Watch::kAll);
  owner->fails = true;
  EXPECT_THROW(tensor.add_(1), std::runtime_error);
  owner->fails = false;
  EXPECT_EQ(owner->writes, 0);
  EXPECT_EQ(tensor.sum().item<float>(), 6);
}

TEST_F(Managed, IsNoLongerOnceItIsGivenMemory) {
  std::weak_ptr<CountingStorage> alive = owner;
  StorageHandle::give(*tensor.storage().unsafeGetStorageImpl(), c10::GetCPUAllocator()->allocate(24), 24);
  EXPECT_EQ(StorageHandle::owner_of(*tensor.storage().unsafeGetStorageImpl()), nullptr);
  EXPECT_EQ(StorageHandle::share_owner_of(*tensor.storage().unsafeGetStorageImpl()), nullptr);
  owner.reset();
  EXPECT_TRUE(alive.expired());
}

TEST_F(Managed, ThatIsReleasedThrowsItsMessageUntilItIsBack) {
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  StorageHandle::release(storage, owner, "the bytes are elsewhere");
  EXPECT_EQ(StorageHandle::owner_of(storage), owner.get());
  EXPECT_EQ(tensor.sizes(), (std::vector<int64_t>{2, 3}));
  for (const auto& read : std::vector<std::function<void()>>{
           [&] { tensor.data_ptr(); }, [&] { tensor.const_data_ptr(); }, [&] { tensor.mutable_data_ptr(); },
           [&] { storage.data(); }, [&] { storage.mutable_data(); }, [&] { tensor.add(1); },
           [&] { tensor.sum().item<float>(); }}) {
    try {
      read();
      ADD_FAILURE() << "not refused";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("the bytes are elsewhere"), std::string::npos) << error.what();
    }
  }
  std::vector<float> bytes(6, 2);
  StorageHandle::point(storage, bytes.data(), 24, owner);
  EXPECT_EQ(tensor.sum().item<float>(), 12);
  EXPECT_EQ(tensor.data_ptr(), bytes.data());
}

}  // namespace
}  // namespace trireme
