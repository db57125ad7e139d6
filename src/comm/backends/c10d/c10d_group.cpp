#include "comm/backends/c10d/c10d_group.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

#include "comm/backends/c10d/collectives.h"
#include "comm/first_line.h"
#include "trireme/comm/c10d.h"

namespace trireme {
namespace comm {

C10dGroup::C10dGroup(std::shared_ptr<Link> link, std::shared_ptr<std::atomic<int>> next_number)
    : link_(std::move(link)),
      next_number_(std::move(next_number)),
      collectives_(std::make_shared<CallQueue>(link_)),
      message_lanes_(2 * static_cast<size_t>(link_->place().size)) {}

C10dGroup::~C10dGroup() {
  if (link_->is_forked()) {
    abandon(link_, collectives_, message_lanes_);
    return;
  }
  if (std::uncaught_exceptions() > 0) link_->abort("it was destroyed while an exception was thrown");
  link_->wire().cancel();
  collectives_->shutdown();
  for (const auto& lane : message_lanes_)
    if (lane) lane->shutdown();
}

Pending<void> C10dGroup::submit(Request request, CallQueue::Body body) {
  return Pending<void>(collectives_->submit(on_host_only(std::move(request)), std::move(body)));
}

Pending<void> C10dGroup::submit_message(Request request, CallQueue::Body body) {
  const int direction = request.call.kind == CallKind::kSend ? 0 : size();
  auto& lane = message_lanes_[static_cast<size_t>(request.call.root + direction)];
  if (!lane) lane = std::make_shared<CallQueue>(link_);
  return Pending<void>(lane->submit(on_host_only(std::move(request)), std::move(body)));
}

Pending<void> C10dGroup::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  return submit(all_reduce_request(tensor, op), run_all_reduce);
}

Pending<void> C10dGroup::reduce_scatter(const at::Tensor& output, const at::Tensor& input, ReduceOp op) {
  return submit(reduce_scatter_request(link_->place(), output, input, op), run_reduce_scatter);
}

Pending<void> C10dGroup::all_gather(const at::Tensor& output, const at::Tensor& input) {
  return submit(all_gather_request(link_->place(), output, input), run_all_gather);
}

Pending<void> C10dGroup::broadcast(const at::Tensor& tensor, int root) {
  return submit(broadcast_request(link_->place(), tensor, root), run_broadcast);
}

Pending<void> C10dGroup::all_to_all(const at::Tensor& output, const at::Tensor& input) {
  return submit(all_to_all_request(link_->place(), output, input), run_all_to_all);
}

Pending<void> C10dGroup::gather(const at::Tensor& output, const at::Tensor& input, int root) {
  return submit(gather_request(link_->place(), output, input, root), run_gather);
}

Pending<void> C10dGroup::scatter(const at::Tensor& output, const at::Tensor& input, int root) {
  return submit(scatter_request(link_->place(), output, input, root), run_scatter);
}

Pending<void> C10dGroup::send(const at::Tensor& tensor, int peer) {
  return submit_message(send_request(link_->place(), tensor, peer), run_send);
}

Pending<void> C10dGroup::recv(const at::Tensor& tensor, int peer) {
  return submit_message(recv_request(link_->place(), tensor, peer), run_recv);
}

void C10dGroup::barrier() {
  submit({.call = {.kind = CallKind::kBarrier}, .output = {}, .input = {}}, run_barrier).wait();
}

std::unique_ptr<Group> C10dGroup::split(const std::vector<int>& members, const std::string& name) {
  // A rank may have seen splits that its peers have not: the new group takes the first number that is new to all of
  // them.
  int64_t number = 0;
  const auto agree = [this, &number](Link& link, const Request& request) {
    number = run_agreement(link, request, next_number_->load());
  };
  submit({.call = split_call(link_->place(), members), .output = {}, .input = {}}, agree).wait();
  next_number_->store(static_cast<int>(number) + 1);

  const auto self = std::find(members.begin(), members.end(), rank());
  if (self == members.end()) return nullptr;
  const Wire::Address& own = link_->wire().address();
  Wire::Address address{.members = {}, .family = own.family, .number = static_cast<int>(number)};
  for (const int member : members) address.members.push_back(own.members[static_cast<size_t>(member)]);
  const Place place{static_cast<int>(self - members.begin()), static_cast<int>(members.size())};
  auto link = std::make_shared<Link>(place, name, link_->wire().process_group(), std::move(address), timeout());
  return std::make_unique<C10dGroup>(std::move(link), next_number_);
}

std::shared_ptr<SharedMemory> C10dGroup::share(size_t, Share) {
  throw StateError(str("share: group '", name(),
                       "' goes over a process group of torch.distributed, whose ranks share no "
                       "memory; ask shares_memory() first"));
}

void C10dGroup::wait_slowly(const std::function<bool()>&, const WaitReason& reason) {
  link_->throw_if_failed();
  throw StateError(
      str("wait_until: the ranks of group '", name(), "' share no memory, so no peer can complete ", reason.operation));
}

namespace {

/// How many groups this rank has made over `process_group` before: the same number on every rank, since to make one is
/// collective. A process group without a store has one family only.
int family_of_next_group(c10d::ProcessGroup& process_group) {
  const auto store = process_group.getStore();
  if (!store) return 0;
  try {
    return static_cast<int>(store->add(str("trireme/groups/", process_group.getRank()), 1) - 1);
  } catch (const std::exception& error) {
    throw IoError(
        str("rank ", process_group.getRank(), " cannot use the store of its process group: ", first_line(error)));
  }
}

}  // namespace
}  // namespace comm

std::unique_ptr<Group> make_c10d_group(const c10::intrusive_ptr<c10d::ProcessGroup>& process_group,
                                       const C10dGroupOptions& options) {
  if (!process_group) throw ConfigError("make_c10d_group: expected a process group, got none");
  const comm::Place place{process_group->getRank(), process_group->getSize()};
  comm::Wire::Address address{.members = std::vector<int>(static_cast<size_t>(place.size)), .family = 0, .number = 0};
  std::iota(address.members.begin(), address.members.end(), 0);
  address.family = comm::family_of_next_group(*process_group);
  auto link = std::make_shared<comm::Link>(place, options.name, process_group, std::move(address), options.timeout);
  return std::make_unique<comm::C10dGroup>(std::move(link), std::make_shared<std::atomic<int>>(1));
}

}  // namespace trireme
