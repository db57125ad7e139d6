#include "comm/fabric/algorithm.h"

#include "comm/fabric/parts.h"
#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

class HostMover final : public Mover {
 public:
  int64_t slot_bytes() const override { return kSlotBytes; }
  void copy(std::byte* to, const std::byte* from, int64_t bytes) const override { copy_bytes(to, from, bytes); }
  void fold(const FoldKind& kind, std::byte* output, Slots sources, int64_t numel) const override {
    comm::fold(kind, output, sources, numel);
  }
};

}  // namespace

const Mover& host_mover() {
  static const HostMover mover;
  return mover;
}

std::unique_ptr<Algorithm> make_algorithm(const Place& place, const Request& request, const Mover& mover) {
  switch (request.call.kind) {
    case CallKind::kAllReduce:
      return make_all_reduce(place, request, mover);
    case CallKind::kReduceScatter:
      return make_reduce_scatter(place, request, mover);
    case CallKind::kAllGather:
      return make_all_gather(place, request, mover);
    case CallKind::kBroadcast:
      return make_broadcast(place, request, mover);
    case CallKind::kAllToAll:
      return make_all_to_all(place, request, mover);
    case CallKind::kGather:
      return make_gather(place, request, mover);
    case CallKind::kScatter:
      return make_scatter(place, request, mover);
    case CallKind::kBarrier:
      return make_barrier();
    default:
      TRIREME_CHECK(false, name_of(request.call.kind), " is no collective that moves data");
  }
}

}  // namespace trireme::comm
