// Every rank posts one block per peer; nothing is summed.

#include "comm/fabric/algorithm.h"
#include "comm/fabric/parts.h"

namespace trireme::comm {
namespace {

class AllToAll final : public Algorithm {
 public:
  AllToAll(const Place& place, const Request& request, const Mover& mover)
      : Algorithm(mover),
        place_(place),
        block_numel_(request.call.numel / place.size),
        parts_({block_numel_, request.itemsize(), place.size - 1}, mover.slot_bytes()),
        output_(request.out()),
        input_(request.in()) {}

  int64_t steps() const override { return parts_.steps(); }
  bool reads(int) const override { return true; }

  void post(int64_t step, std::byte* slot) override {
    for (int peer = 0; peer < place_.size; ++peer) {
      if (peer == place_.rank) continue;
      const ShardRange chunk = parts_.chunk(block(peer), step);
      mover_.copy(slot + lane(place_.rank, peer) * parts_.lane_bytes(), input_ + parts_.offset(chunk),
                  parts_.bytes(chunk));
    }
  }

  void read(int64_t step, Slots slots) override {
    for (int rank = 0; rank < place_.size; ++rank) {
      const ShardRange chunk = parts_.chunk(block(rank), step);
      const std::byte* from = rank == place_.rank
                                  ? input_ + parts_.offset(chunk)
                                  : slots[static_cast<size_t>(rank)] + lane(rank, place_.rank) * parts_.lane_bytes();
      mover_.copy(output_ + parts_.offset(chunk), from, parts_.bytes(chunk));
    }
  }

 private:
  ShardRange block(int rank) const { return {rank * block_numel_, (rank + 1) * block_numel_}; }

  const Place place_;
  const int64_t block_numel_;
  const Parts parts_;
  std::byte* const output_;
  const std::byte* const input_;
};

}  // namespace

std::unique_ptr<Algorithm> make_all_to_all(const Place& place, const Request& request, const Mover& mover) {
  return std::make_unique<AllToAll>(place, request, mover);
}

}  // namespace trireme::comm
