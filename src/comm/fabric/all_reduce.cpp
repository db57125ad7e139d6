// Short tensors: everybody posts everything and folds everything, one step. Long ones: in even steps each rank folds
// its part of a block, in odd steps the results are gathered. Both fold in rank order, so the bits do not depend on the
// way.
#include <algorithm>
#include <vector>

#include "comm/fabric/algorithm.h"
#include "comm/fabric/fold.h"
#include "comm/fabric/parts.h"

namespace trireme::comm {
namespace {

// Above this, folding everything on every rank costs more than a second round of flags.
constexpr int64_t kDirectBytes = 32 << 10;

class DirectAllReduce final : public Algorithm {
 public:
  DirectAllReduce(const Place& place, const Request& request, const Mover& mover)
      : Algorithm(mover),
        place_(place),
        numel_(request.call.numel),
        itemsize_(request.itemsize()),
        fold_{request.call.dtype, request.call.dtype, request.call.op},
        data_(request.out()),
        sources_(static_cast<size_t>(place.size)) {}

  int64_t steps() const override { return 1; }
  bool reads(int) const override { return true; }
  void post(int64_t, std::byte* slot) override { mover_.copy(slot, data_, numel_ * itemsize_); }
  void read(int64_t, Slots slots) override {
    for (size_t rank = 0; rank < sources_.size(); ++rank)
      sources_[rank] = static_cast<int>(rank) == place_.rank ? data_ : slots[rank];
    mover_.fold(fold_, data_, sources_, numel_);
  }

 private:
  const Place place_;
  const int64_t numel_;
  const int64_t itemsize_;
  const FoldKind fold_;
  std::byte* const data_;
  std::vector<const std::byte*> sources_;
};

class AllReduce final : public Algorithm {
 public:
  AllReduce(const Place& place, const Request& request, const Mover& mover)
      : Algorithm(mover),
        place_(place),
        numel_(request.call.numel),
        parts_({shard_range(numel_, place.size, 0).numel(), request.itemsize(), place.size - 1}, mover.slot_bytes()),
        fold_{request.call.dtype, request.call.dtype, request.call.op},
        data_(request.out()),
        sources_(static_cast<size_t>(place.size)) {}

  int64_t steps() const override { return 2 * parts_.steps(); }
  bool reads(int) const override { return true; }

  void post(int64_t step, std::byte* slot) override {
    if (step % 2 == 1) {
      const ShardRange chunk = parts_.chunk(part(place_.rank), step / 2);
      mover_.copy(slot, data_ + parts_.offset(chunk), parts_.bytes(chunk));
      return;
    }
    for (int peer = 0; peer < place_.size; ++peer) {
      if (peer == place_.rank) continue;
      const ShardRange chunk = parts_.chunk(part(peer), step / 2);
      mover_.copy(slot + lane(place_.rank, peer) * parts_.lane_bytes(), data_ + parts_.offset(chunk),
                  parts_.bytes(chunk));
    }
  }

  void read(int64_t step, Slots slots) override {
    if (step % 2 == 0) return fold_own_part(step / 2, slots);
    for (int rank = 0; rank < place_.size; ++rank) {
      if (rank == place_.rank) continue;
      const ShardRange chunk = parts_.chunk(part(rank), step / 2);
      mover_.copy(data_ + parts_.offset(chunk), slots[static_cast<size_t>(rank)], parts_.bytes(chunk));
    }
  }

 private:
  ShardRange part(int rank) const { return shard_range(numel_, place_.size, rank); }

  void fold_own_part(int64_t block, Slots slots) {
    const ShardRange chunk = parts_.chunk(part(place_.rank), block);
    std::byte* target = data_ + parts_.offset(chunk);
    for (int rank = 0; rank < place_.size; ++rank)
      sources_[static_cast<size_t>(rank)] =
          rank == place_.rank ? target
                              : slots[static_cast<size_t>(rank)] + lane(rank, place_.rank) * parts_.lane_bytes();
    mover_.fold(fold_, target, sources_, chunk.numel());
  }

  const Place place_;
  const int64_t numel_;
  const Parts parts_;
  const FoldKind fold_;
  std::byte* const data_;
  std::vector<const std::byte*> sources_;
};

}  // namespace

std::unique_ptr<Algorithm> make_all_reduce(const Place& place, const Request& request, const Mover& mover) {
  const int64_t bytes = request.call.numel * request.itemsize();
  if (bytes <= std::min(kDirectBytes, mover.slot_bytes()))
    return std::make_unique<DirectAllReduce>(place, request, mover);
  return std::make_unique<AllReduce>(place, request, mover);
}

}  // namespace trireme::comm
