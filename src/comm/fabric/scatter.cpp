// The root posts one block per peer; everybody copies its own.

#include "comm/fabric/algorithm.h"
#include "comm/fabric/parts.h"

namespace trireme::comm {
namespace {

class Scatter final : public Algorithm {
 public:
  Scatter(const Place& place, const Request& request, const Mover& mover)
      : Algorithm(mover),
        place_(place),
        root_(request.call.root),
        block_numel_(request.call.numel / place.size),
        parts_({block_numel_, request.itemsize(), place.size - 1}, mover.slot_bytes()),
        output_(request.out()),
        input_(request.in()) {}

  int64_t steps() const override { return parts_.steps(); }
  bool reads(int peer) const override { return place_.rank != root_ && peer == root_; }

  void post(int64_t step, std::byte* slot) override {
    if (place_.rank != root_) return;
    const ShardRange chunk = parts_.chunk({0, block_numel_}, step);
    for (int peer = 0; peer < place_.size; ++peer)
      if (peer != root_)
        mover_.copy(slot + lane(root_, peer) * parts_.lane_bytes(), block(peer) + parts_.offset(chunk),
                    parts_.bytes(chunk));
  }

  void read(int64_t step, Slots slots) override {
    const ShardRange chunk = parts_.chunk({0, block_numel_}, step);
    const std::byte* from = place_.rank == root_
                                ? block(root_) + parts_.offset(chunk)
                                : slots[static_cast<size_t>(root_)] + lane(root_, place_.rank) * parts_.lane_bytes();
    mover_.copy(output_ + parts_.offset(chunk), from, parts_.bytes(chunk));
  }

 private:
  const std::byte* block(int rank) const { return input_ + rank * parts_.bytes({0, block_numel_}); }

  const Place place_;
  const int root_;
  const int64_t block_numel_;
  const Parts parts_;
  std::byte* const output_;
  const std::byte* const input_;
};

}  // namespace

std::unique_ptr<Algorithm> make_scatter(const Place& place, const Request& request, const Mover& mover) {
  return std::make_unique<Scatter>(place, request, mover);
}

}  // namespace trireme::comm
