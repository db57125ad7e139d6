// Every rank posts, for each peer, the chunk of that peer's part; each folds its own part in rank order.
#include <vector>

#include "comm/fabric/algorithm.h"
#include "comm/fabric/fold.h"
#include "comm/fabric/parts.h"

namespace trireme::comm {
namespace {

class ReduceScatter final : public Algorithm {
 public:
  ReduceScatter(const Place& place, const Request& request, const Mover& mover)
      : Algorithm(mover),
        place_(place),
        numel_(request.call.numel),
        parts_({shard_range(numel_, place.size, 0).numel(), request.itemsize(), place.size - 1}, mover.slot_bytes()),
        fold_{request.call.dtype, request.output.scalar_type(), request.call.op},
        output_(request.out()),
        output_itemsize_(static_cast<int64_t>(c10::elementSize(request.output.scalar_type()))),
        input_(request.in()),
        sources_(static_cast<size_t>(place.size)) {}

  int64_t steps() const override { return parts_.steps(); }
  bool reads(int) const override { return true; }

  void post(int64_t step, std::byte* slot) override {
    for (int peer = 0; peer < place_.size; ++peer) {
      if (peer == place_.rank) continue;
      const ShardRange chunk = parts_.chunk(part(peer), step);
      mover_.copy(slot + lane(place_.rank, peer) * parts_.lane_bytes(), input_ + parts_.offset(chunk),
                  parts_.bytes(chunk));
    }
  }

  void read(int64_t step, Slots slots) override {
    const ShardRange own = part(place_.rank);
    const ShardRange chunk = parts_.chunk(own, step);
    for (int rank = 0; rank < place_.size; ++rank)
      sources_[static_cast<size_t>(rank)] =
          rank == place_.rank ? input_ + parts_.offset(chunk)
                              : slots[static_cast<size_t>(rank)] + lane(rank, place_.rank) * parts_.lane_bytes();
    mover_.fold(fold_, output_ + (chunk.begin - own.begin) * output_itemsize_, sources_, chunk.numel());
  }

 private:
  ShardRange part(int rank) const { return shard_range(numel_, place_.size, rank); }

  const Place place_;
  const int64_t numel_;
  const Parts parts_;
  const FoldKind fold_;
  std::byte* const output_;
  const int64_t output_itemsize_;
  const std::byte* const input_;
  std::vector<const std::byte*> sources_;
};

}  // namespace

std::unique_ptr<Algorithm> make_reduce_scatter(const Place& place, const Request& request, const Mover& mover) {
  return std::make_unique<ReduceScatter>(place, request, mover);
}

}  // namespace trireme::comm
