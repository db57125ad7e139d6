// Every rank posts its shard, everybody copies the others' to their place.

#include "comm/fabric/algorithm.h"
#include "comm/fabric/parts.h"

namespace trireme::comm {
namespace {

class AllGather final : public Algorithm {
 public:
  AllGather(const Place& place, const Request& request, const Mover& mover)
      : AllGather(place, {request.out(), request.in(), request.call.numel, request.itemsize()}, mover) {}
  struct Bytes {
    std::byte* output;
    const std::byte* input;
    int64_t numel;
    int64_t itemsize;
  };
  AllGather(const Place& place, const Bytes& bytes, const Mover& mover)
      : Algorithm(mover),
        place_(place),
        numel_(bytes.numel),
        parts_({shard_range(numel_, place.size, 0).numel(), bytes.itemsize, 1}, mover.slot_bytes()),
        output_(bytes.output),
        input_(bytes.input) {}

  int64_t steps() const override { return parts_.steps(); }
  bool reads(int) const override { return true; }

  void post(int64_t step, std::byte* slot) override {
    const ShardRange chunk = parts_.chunk(part(place_.rank), step);
    if (place_.size > 1) mover_.copy(slot, source(chunk), parts_.bytes(chunk));
  }

  void read(int64_t step, Slots slots) override {
    for (int rank = 0; rank < place_.size; ++rank) {
      const ShardRange chunk = parts_.chunk(part(rank), step);
      std::byte* target = output_ + parts_.offset(chunk);
      const std::byte* from = rank == place_.rank ? source(chunk) : slots[static_cast<size_t>(rank)];
      mover_.copy(target, from, parts_.bytes(chunk));
    }
  }

 private:
  ShardRange part(int rank) const { return shard_range(numel_, place_.size, rank); }
  const std::byte* source(ShardRange chunk) const {
    return input_ + parts_.offset(chunk) - parts_.offset(part(place_.rank));
  }

  const Place place_;
  const int64_t numel_;
  const Parts parts_;
  std::byte* const output_;
  const std::byte* const input_;
};

}  // namespace

std::unique_ptr<Algorithm> make_all_gather(const Place& place, const Request& request, const Mover& mover) {
  return std::make_unique<AllGather>(place, request, mover);
}

std::unique_ptr<Algorithm> make_exchange(const Place& place, std::byte* records, int64_t bytes) {
  const AllGather::Bytes all{records, records + place.rank * bytes, bytes * place.size, 1};
  return std::make_unique<AllGather>(place, all, host_mover());
}

}  // namespace trireme::comm
