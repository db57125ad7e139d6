// The numbers that tell the groups over one process group apart: each has tags of its own by its number.
#pragma once

#include <bitset>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace trireme::comm {

/// The numbers that one rank's groups have. Ranks agree on a number that is free on all of them. A number that was
/// given back comes last again.
class GroupNumbers : public std::enable_shared_from_this<GroupNumbers> {
 public:
  static constexpr int kCount = 512;

  /// One rank's view: plain bytes, which travel through a collective.
  struct View {
    int64_t next = 0;  ///< where the search begins, modulo kCount
    std::bitset<kCount> taken;
  };
  View view() const;
  /// The first number that is free in all `views`, the same on every rank; none where all are taken. The next search
  /// begins behind it.
  std::optional<int> agree(const std::vector<View>& views);

  /// A group's number, until the group is gone.
  class Lease {
   public:
    Lease(std::shared_ptr<GroupNumbers> numbers, int number) : numbers_(std::move(numbers)), number_(number) {}
    Lease(Lease&&) = default;
    Lease& operator=(Lease&&) = delete;
    ~Lease() {
      if (numbers_) numbers_->give_back(number_);
    }
    int number() const { return number_; }
    /// Peers may still send under the number when the group is gone: no other group ever gets it.
    void keep() noexcept { numbers_.reset(); }

   private:
    std::shared_ptr<GroupNumbers> numbers_;  // shared by the groups of this rank
    const int number_;
  };
  Lease take(int number);

 private:
  void give_back(int number) noexcept;

  mutable std::mutex mutex_;
  View view_;  // guarded by mutex_
};

}  // namespace trireme::comm
