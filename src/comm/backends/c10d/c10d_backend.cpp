#include "comm/backends/c10d/c10d_backend.h"

#include <exception>
#include <numeric>
#include <optional>
#include <type_traits>
#include <utility>

#include "comm/backends/c10d/collectives.h"
#include "comm/first_line.h"
#include "trireme/comm/c10d.h"

namespace trireme {
namespace comm {

C10dBackend::C10dBackend(std::shared_ptr<Link> link, std::shared_ptr<GroupNumbers> numbers, GroupNumbers::Lease number)
    : Backend(link),
      link_(std::move(link)),
      numbers_(std::move(numbers)),
      number_(std::move(number)),
      collectives_(std::make_shared<CallQueue>(link_)),
      message_lanes_(2 * static_cast<size_t>(link_->place().size)) {}

C10dBackend::~C10dBackend() {
  if (link_->is_forked()) {
    number_.keep();
    abandon(link_, collectives_, message_lanes_);
    return;
  }
  if (std::uncaught_exceptions() > 0) link_->abort("it was destroyed while an exception was thrown");
  bool is_idle = collectives_->is_idle();
  for (const auto& lane : message_lanes_) is_idle = is_idle && (!lane || lane->is_idle());
  link_->wire().cancel();
  collectives_->shutdown();
  for (const auto& lane : message_lanes_)
    if (lane) lane->shutdown();
  if (!is_idle || link_->has_failed()) number_.keep();
}

CallQueue& C10dBackend::lane_of(const Call& message) {
  const int direction = message.kind == CallKind::kSend ? 0 : link_->place().size;
  auto& lane = message_lanes_[static_cast<size_t>(message.root + direction)];
  if (!lane) lane = std::make_shared<CallQueue>(link_);
  return *lane;
}

Pending<void> C10dBackend::submit(Request request) {
  const CallKind kind = request.call.kind;
  const bool is_message = kind == CallKind::kSend || kind == CallKind::kRecv;
  CallQueue& queue = is_message ? lane_of(request.call) : *collectives_;
  return Pending<void>(queue.submit(std::move(request), run_call));
}

std::unique_ptr<Backend> C10dBackend::split(const Split& split) {
  const auto size = static_cast<size_t>(link_->place().size);
  // Shared with transfers that a failure may leave under way.
  const auto views = std::make_shared<std::vector<GroupNumbers::View>>(size, numbers_->view());
  const auto exchange = [views](Link& link, const Request& request) {
    static_assert(std::is_trivially_copyable_v<GroupNumbers::View>);
    run_exchange(link, request, {reinterpret_cast<std::byte*>(views->data()), sizeof(GroupNumbers::View), views});
  };
  Pending<void>(collectives_->submit({.call = split.call, .output = {}, .input = {}}, exchange)).wait();
  const std::optional<int> number = numbers_->agree(*views);
  if (!number)
    throw StateError(str("split of group '", link_->name(), "': the ranks have ", GroupNumbers::kCount,
                         " groups that were split from one over a process group of torch.distributed, and there are no "
                         "tags for more; destroy groups that are not used any more"));
  if (!split.takes_part()) return nullptr;
  const Wire::Address& own = link_->wire().address();
  Wire::Address address{.members = {}, .family = own.family, .number = *number};
  for (const int member : split.members) address.members.push_back(own.members[static_cast<size_t>(member)]);
  auto link = std::make_shared<Link>(split.info, link_->wire().process_group(), std::move(address));
  return std::make_unique<C10dBackend>(std::move(link), numbers_, numbers_->take(*number));
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
  comm::GroupInfo info{.name = options.name,
                       .place = {process_group->getRank(), process_group->getSize()},
                       .timeout = options.timeout,
                       .warn_after = options.warn_after};
  comm::Wire::Address address{
      .members = std::vector<int>(static_cast<size_t>(info.place.size)), .family = 0, .number = 0};
  std::iota(address.members.begin(), address.members.end(), 0);
  address.family = comm::family_of_next_group(*process_group);
  auto link = std::make_shared<comm::Link>(std::move(info), process_group, std::move(address));
  auto numbers = std::make_shared<comm::GroupNumbers>();
  const int number = *numbers->agree({numbers->view()});
  auto lease = numbers->take(number);
  return std::make_unique<Group>(
      std::make_unique<comm::C10dBackend>(std::move(link), std::move(numbers), std::move(lease)));
}

}  // namespace trireme
