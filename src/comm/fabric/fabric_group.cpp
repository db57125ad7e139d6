#include "comm/fabric/fabric_group.h"

#include <algorithm>
#include <exception>
#include <type_traits>
#include <utility>

namespace trireme::comm {
namespace {

class SharedSegments final : public SharedMemory {
 public:
  SharedSegments(std::vector<std::shared_ptr<Segment>> segments, size_t bytes)
      : segments_(std::move(segments)), bytes_(bytes) {}
  std::byte* of(int rank) const override {
    const Segment* segment = segments_.at(static_cast<size_t>(rank)).get();
    return segment ? segment->data() : segments_.front()->data();
  }
  size_t bytes() const override { return bytes_; }

 private:
  const std::vector<std::shared_ptr<Segment>> segments_;
  const size_t bytes_;
};

struct Offer {
  SegmentTicket ticket;  ///< pid 0: none
  int64_t failed = 0;
};

struct Outcome {
  int64_t failed = 0;
};

std::vector<int> everybody(int size) {
  std::vector<int> ranks(static_cast<size_t>(size));
  for (int rank = 0; rank < size; ++rank) ranks[static_cast<size_t>(rank)] = rank;
  return ranks;
}

}  // namespace

FabricGroup::FabricGroup(std::shared_ptr<MemoryProvider> provider, std::shared_ptr<Segment> segment,
                         const FabricOptions& options)
    : provider_(std::move(provider)),
      engine_(std::make_shared<Engine>(std::move(segment), options)),
      collectives_(std::make_shared<CollectiveQueue>(engine_)),
      messages_(std::make_shared<MessageQueue>(engine_)) {}

FabricGroup::~FabricGroup() {
  if (engine_->is_forked()) {
    abandon(collectives_, messages_);
    return;
  }
  if (std::uncaught_exceptions() > 0) engine_->abort("it was destroyed while an exception was thrown");
  engine_->fabric().cancel();
  collectives_->shutdown();
  messages_->shutdown();
  engine_->fabric().leave();
}

Pending<void> FabricGroup::submit(Request request) {
  engine_->throw_if_failed();
  request = on_host_only(std::move(request));
  auto algorithm = make_algorithm(engine_->place(), request, host_mover());
  return Pending<void>(collectives_->submit(std::move(request), std::move(algorithm)));
}

Pending<void> FabricGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  return submit(all_reduce_request(tensor, op));
}

Pending<void> FabricGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  return submit(reduce_scatter_request(engine_->place(), output, input, op));
}

Pending<void> FabricGroup::all_gather(const at::Tensor& output, const at::Tensor& input) {
  return submit(all_gather_request(engine_->place(), output, input));
}

Pending<void> FabricGroup::broadcast(const at::Tensor& tensor, int root) {
  return submit(broadcast_request(engine_->place(), tensor, root));
}

Pending<void> FabricGroup::all_to_all(const at::Tensor& output, const at::Tensor& input) {
  return submit(all_to_all_request(engine_->place(), output, input));
}

Pending<void> FabricGroup::gather(const at::Tensor& output, const at::Tensor& input, int root) {
  return submit(gather_request(engine_->place(), output, input, root));
}

Pending<void> FabricGroup::scatter(const at::Tensor& output, const at::Tensor& input, int root) {
  return submit(scatter_request(engine_->place(), output, input, root));
}

Pending<void> FabricGroup::send(const at::Tensor& tensor, int peer) {
  return Pending<void>(messages_->submit(on_host_only(send_request(engine_->place(), tensor, peer))));
}

Pending<void> FabricGroup::recv(const at::Tensor& tensor, int peer) {
  return Pending<void>(messages_->submit(on_host_only(recv_request(engine_->place(), tensor, peer))));
}

void FabricGroup::barrier() {
  collectives_->submit({.call = {.kind = CallKind::kBarrier}, .output = {}, .input = {}}, make_barrier())->wait();
}

template <class Record>
void FabricGroup::exchange(const Call& call, std::vector<Record>& records) {
  static_assert(std::is_trivially_copyable_v<Record>);
  auto algorithm = make_exchange(engine_->place(), reinterpret_cast<std::byte*>(records.data()), sizeof(Record));
  collectives_->submit({.call = call, .output = {}, .input = {}}, std::move(algorithm))->wait();
}

std::vector<std::shared_ptr<Segment>> FabricGroup::exchange_segments(const Call& call, size_t own_bytes,
                                                                     const std::vector<int>& readers) {
  const size_t size = static_cast<size_t>(this->size());
  const size_t self = static_cast<size_t>(rank());
  std::vector<std::shared_ptr<Segment>> segments(size);
  std::vector<Offer> offers(size);
  std::vector<Outcome> outcomes(size);
  std::string problem;
  // A rank that fails must still meet its peers, or they would wait for it in vain.
  try {
    if (own_bytes > 0) {
      segments[self] = provider_->create(own_bytes);
      offers[self].ticket = segments[self]->ticket();
    }
  } catch (const Error& error) {
    problem = error.what();
    offers[self].failed = 1;
  }
  exchange(call, offers);
  const bool reads = std::find(readers.begin(), readers.end(), rank()) != readers.end();
  const bool all_made =
      std::none_of(offers.begin(), offers.end(), [](const Offer& offer) { return offer.failed != 0; });
  try {
    for (size_t peer = 0; all_made && reads && peer < size; ++peer)
      if (peer != self && offers[peer].ticket.pid != 0) segments[peer] = provider_->open(offers[peer].ticket);
  } catch (const Error& error) {
    problem = error.what();
  }
  outcomes[self].failed = problem.empty() ? 0 : 1;
  exchange(call, outcomes);
  if (segments[self]) segments[self]->withdraw();
  for (size_t peer = 0; peer < size; ++peer)
    if (outcomes[peer].failed != 0)
      throw IoError(str(name_of(call.kind), " of group '", name(), "' failed on rank ", peer, ": ",
                        peer == self ? problem : "see the error of that rank"));
  return segments;
}

std::shared_ptr<SharedMemory> FabricGroup::share(size_t bytes, Share mode) {
  const Call call{.kind = CallKind::kShare, .root = mode == Share::kOne ? 0 : -1, .numel = static_cast<int64_t>(bytes)};
  const size_t own_bytes = mode == Share::kEach || rank() == 0 ? std::max<size_t>(bytes, 1) : 0;
  return std::make_shared<SharedSegments>(exchange_segments(call, own_bytes, everybody(size())), bytes);
}

std::unique_ptr<Group> FabricGroup::split(const std::vector<int>& members, const std::string& name) {
  const Call call = split_call(engine_->place(), members);
  const int leader = members.front();
  const int new_size = static_cast<int>(members.size());
  const size_t own_bytes = rank() == leader ? FabricLayout(new_size).bytes() : 0;
  auto segments = exchange_segments(call, own_bytes, members);
  const auto self = std::find(members.begin(), members.end(), rank());
  if (self == members.end()) return nullptr;
  const Place place{static_cast<int>(self - members.begin()), new_size};
  auto last_seen = [parent = engine_, members](int member) {
    const int rank = members[static_cast<size_t>(member)];
    return str("in group '", parent->fabric().name(), "' ", parent->fabric().last_seen(rank));
  };
  std::vector<int> ranks_in_world;
  for (const int member : members) ranks_in_world.push_back(engine_->rank_in_world(member));
  return std::make_unique<FabricGroup>(provider_, segments[static_cast<size_t>(leader)],
                                       FabricOptions{.name = name,
                                                     .place = place,
                                                     .timeout = timeout(),
                                                     .last_seen_in_parent = std::move(last_seen),
                                                     .ranks_in_world = std::move(ranks_in_world)});
}

void FabricGroup::wait_slowly(const std::function<bool()>& ready, const WaitReason& reason) {
  engine_->throw_if_failed();
  const Call call;  // of the method that waits
  const std::function<std::string()> what = [&reason] {
    std::string text(reason.operation);
    if (reason.seq > 0) text += str(" #", reason.seq);
    const std::string detail = reason.detail ? reason.detail() : "";
    return detail.empty() ? text : str(text, " (", detail, ")");
  };
  try {
    engine_->fabric().wait(ready, {reason.peer, Patience::kCaller, what, &call});
  } catch (...) {
    engine_->fail(std::current_exception());
    throw;
  }
}

}  // namespace trireme::comm
