#include "comm/fabric/fabric_backend.h"

#include <algorithm>
#include <array>
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
  std::array<char, 1016> problem = {};  ///< its words, which every rank says: the rank that failed may be ended first
};

}  // namespace

FabricBackend::FabricBackend(std::shared_ptr<MemoryProvider> provider, std::shared_ptr<Segment> segment,
                             GroupInfo group, Fabric::LastSeen last_seen_in_parent)
    : FabricBackend(std::move(provider), std::make_shared<FabricState>(std::move(segment), std::move(group),
                                                                       std::move(last_seen_in_parent))) {}

FabricBackend::FabricBackend(std::shared_ptr<MemoryProvider> provider, std::shared_ptr<FabricState> fabric_state)
    : Backend(fabric_state),
      provider_(std::move(provider)),
      fabric_state_(std::move(fabric_state)),
      collectives_(std::make_shared<CollectiveQueue>(fabric_state_)),
      messages_(std::make_shared<MessageQueue>(fabric_state_)) {}

FabricBackend::~FabricBackend() {
  if (fabric_state_->is_forked()) {
    abandon(collectives_, messages_);
    return;
  }
  if (std::uncaught_exceptions() > 0) fabric_state_->abort("it was destroyed while an exception was thrown");
  fabric_state_->fabric().cancel();
  collectives_->shutdown();
  messages_->shutdown();
  fabric_state_->fabric().leave();
}

Pending<void> FabricBackend::submit(Request request) {
  const CallKind kind = request.call.kind;
  if (kind == CallKind::kSend || kind == CallKind::kRecv) return Pending<void>(messages_->submit(std::move(request)));
  auto algorithm = make_algorithm(fabric_state_->place(), request, host_mover());
  return Pending<void>(collectives_->submit(std::move(request), std::move(algorithm)));
}

template <class Record>
void FabricBackend::exchange(const Call& call, std::vector<Record>& records) {
  static_assert(std::is_trivially_copyable_v<Record>);
  auto algorithm = make_exchange(fabric_state_->place(), reinterpret_cast<std::byte*>(records.data()), sizeof(Record));
  collectives_->submit({.call = call, .output = {}, .input = {}}, std::move(algorithm))->wait();
}

std::vector<std::shared_ptr<Segment>> FabricBackend::exchange_segments(const Call& call, size_t own_bytes,
                                                                       const std::function<bool(int rank)>& opens) {
  const auto size = static_cast<size_t>(fabric_state_->place().size);
  const auto self = static_cast<size_t>(fabric_state_->place().rank);
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
  const bool all_made =
      std::none_of(offers.begin(), offers.end(), [](const Offer& offer) { return offer.failed != 0; });
  try {
    for (size_t peer = 0; all_made && peer < size; ++peer)
      if (peer != self && offers[peer].ticket.pid != 0 && opens(static_cast<int>(peer)))
        segments[peer] = provider_->open(offers[peer].ticket);
  } catch (const Error& error) {
    problem = error.what();
  }
  outcomes[self].failed = problem.empty() ? 0 : 1;
  problem.copy(outcomes[self].problem.data(), outcomes[self].problem.size() - 1);
  exchange(call, outcomes);
  if (segments[self]) segments[self]->withdraw();
  for (size_t peer = 0; peer < size; ++peer)
    if (outcomes[peer].failed != 0)
      throw IoError(str(name_of(call.kind), " of group '", fabric_state_->name(), "' failed on ",
                        fabric_state_->title(static_cast<int>(peer)), ": ", outcomes[peer].problem.data()));
  return segments;
}

std::shared_ptr<SharedMemory> FabricBackend::share(size_t bytes, Share mode) {
  const Call call{.kind = CallKind::kShare, .root = mode == Share::kOne ? 0 : -1, .numel = static_cast<int64_t>(bytes)};
  const size_t own_bytes = mode == Share::kEach || fabric_state_->place().rank == 0 ? std::max<size_t>(bytes, 1) : 0;
  auto segments = exchange_segments(call, own_bytes, [](int) { return true; });
  fabric_state_->count(1, 0);
  return std::make_shared<SharedSegments>(std::move(segments), bytes);
}

std::unique_ptr<Backend> FabricBackend::split(const Split& split) {
  const int leader = split.takes_part() ? split.members.front() : -1;
  const size_t own_bytes = leader == fabric_state_->place().rank ? FabricLayout(split.info.place.size).bytes() : 0;
  auto segments = exchange_segments(split.call, own_bytes, [leader](int rank) { return rank == leader; });
  if (!split.takes_part()) return nullptr;
  auto last_seen = [parent = fabric_state_, members = split.members](int member) {
    const int rank = members[static_cast<size_t>(member)];
    return str("in group '", parent->name(), "' ", parent->fabric().last_seen(rank));
  };
  return std::make_unique<FabricBackend>(provider_, segments[static_cast<size_t>(leader)], split.info,
                                         std::move(last_seen));
}

void FabricBackend::wait_slowly(const std::function<bool()>& ready, const WaitReason& reason) {
  fabric_state_->throw_if_failed();
  const Call call;  // of the method that waits
  const std::function<std::string()> what = [&reason] {
    std::string text(reason.operation);
    if (reason.seq > 0) text += str(" #", reason.seq);
    const std::string detail = reason.detail ? reason.detail() : "";
    return detail.empty() ? text : str(text, " (", detail, ")");
  };
  try {
    fabric_state_->fabric().wait(ready, {reason.peer, Patience::kCaller, what, &call});
  } catch (...) {
    fabric_state_->fail(std::current_exception());
    throw;
  }
}

}  // namespace trireme::comm
