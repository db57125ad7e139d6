// Everybody but the root posts its block; the root copies them to their places.

#include "comm/fabric/algorithm.h"
#include "comm/fabric/parts.h"

namespace trireme::comm {
namespace {

class Gather final : public Algorithm {
 public:
  Gather(const Place& place, const Request& request, const Mover& mover)
      : Algorithm(mover),
        place_(place),
        root_(request.call.root),
        block_numel_(request.call.numel / place.size),
        parts_({block_numel_, request.itemsize(), 1}, mover.slot_bytes()),
        output_(request.out()),
        input_(request.in()) {}

  int64_t steps() const override { return parts_.steps(); }
  bool reads(int) const override { return place_.rank == root_; }

  void post(int64_t step, std::byte* slot) override {
    const ShardRange chunk = parts_.chunk({0, block_numel_}, step);
    if (place_.rank != root_) mover_.copy(slot, input_ + parts_.offset(chunk), parts_.bytes(chunk));
  }

  void read(int64_t step, Slots slots) override {
    const ShardRange chunk = parts_.chunk({0, block_numel_}, step);
    if (place_.rank != root_) return;
    for (int rank = 0; rank < place_.size; ++rank) {
      std::byte* target = output_ + rank * parts_.bytes({0, block_numel_}) + parts_.offset(chunk);
      const std::byte* from = rank == root_ ? input_ + parts_.offset(chunk) : slots[static_cast<size_t>(rank)];
      mover_.copy(target, from, parts_.bytes(chunk));
    }
  }

 private:
  const Place place_;
  const int root_;
  const int64_t block_numel_;
  const Parts parts_;
  std::byte* const output_;
  const std::byte* const input_;
};

}  // namespace

std::unique_ptr<Algorithm> make_gather(const Place& place, const Request& request, const Mover& mover) {
  return std::make_unique<Gather>(place, request, mover);
}

}  // namespace trireme::comm
