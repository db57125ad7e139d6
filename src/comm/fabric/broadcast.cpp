// The root posts, everybody else copies.

#include "comm/fabric/algorithm.h"
#include "comm/fabric/parts.h"

namespace trireme::comm {
namespace {

class Broadcast final : public Algorithm {
 public:
  Broadcast(const Place& place, const Request& request, const Mover& mover)
      : Algorithm(mover),
        root_(request.call.root),
        is_root_(place.rank == request.call.root),
        posts_(is_root_ && place.size > 1),
        whole_{0, request.call.numel},
        parts_({request.call.numel, request.itemsize(), 1}, mover.slot_bytes()),
        data_(request.out()) {}

  int64_t steps() const override { return parts_.steps(); }
  bool reads(int peer) const override { return !is_root_ && peer == root_; }
  void post(int64_t step, std::byte* slot) override {
    const ShardRange chunk = parts_.chunk(whole_, step);
    if (posts_) mover_.copy(slot, data_ + parts_.offset(chunk), parts_.bytes(chunk));
  }
  void read(int64_t step, Slots slots) override {
    const ShardRange chunk = parts_.chunk(whole_, step);
    if (is_root_) return;
    mover_.copy(data_ + parts_.offset(chunk), slots[static_cast<size_t>(root_)], parts_.bytes(chunk));
  }

 private:
  const int root_;
  const bool is_root_;
  const bool posts_;
  const ShardRange whole_;
  const Parts parts_;
  std::byte* const data_;
};

class Barrier final : public Algorithm {
 public:
  Barrier() : Algorithm(host_mover()) {}
  int64_t steps() const override { return 1; }
  bool reads(int) const override { return false; }  // the first step of every collective meets all peers
  void post(int64_t, std::byte*) override {}
  void read(int64_t, Slots) override {}
};

}  // namespace

std::unique_ptr<Algorithm> make_broadcast(const Place& place, const Request& request, const Mover& mover) {
  return std::make_unique<Broadcast>(place, request, mover);
}

std::unique_ptr<Algorithm> make_barrier() { return std::make_unique<Barrier>(); }

}  // namespace trireme::comm
