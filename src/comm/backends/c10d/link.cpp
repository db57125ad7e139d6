#include "comm/backends/c10d/link.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <type_traits>
#include <utility>

#include "trireme/base/format.h"
#include "trireme/base/log.h"

namespace trireme::comm {

/// A message before the data of a call, or instead of it. All ranks run the same build.
struct Link::Message {
  static constexpr int64_t kCall = 0x5472697265;  // not what a stray message begins with
  static constexpr int64_t kFailure = kCall + 1;
  int64_t kind = kCall;
  int64_t code = 0;  ///< ErrorCode of a failure
  Call call;
  std::array<char, 512 - 2 * sizeof(int64_t) - sizeof(Call)> cause{};
};

namespace {

template <class Message>
PeerBytes bytes_of(int peer, const std::shared_ptr<std::vector<Message>>& messages, size_t index) {
  static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) == 512);
  return {peer, reinterpret_cast<std::byte*>(&(*messages)[index]), sizeof(Message), messages};
}

constexpr char kWhyLate[] =
    "It may be stopped, stuck or slow, or not make this call, as all ranks must; the limit is the timeout given at "
    "init, or TRIREME_TIMEOUT_S.";

std::string format_seconds(std::chrono::steady_clock::duration duration) {
  return formatted("{:.1f} s", std::chrono::duration<double>(duration).count());
}

}  // namespace

void Link::check(const Message& message, const Call& own, int peer) {
  if (message.kind == Message::kFailure) {
    const std::string cause(message.cause.data());
    throw PeerError(
        static_cast<ErrorCode>(message.code),
        str(title(peer), " failed while ", own_title(), " was in ", describe(own), " of group '", name(), "': ", cause),
        peer, cause);
  }
  if (message.kind != Message::kCall)
    throw PeerError(
        ErrorCode::kDiverged,
        str(title(peer), " sent something else than a call to ", own_title(), " in ", describe(own), " of group '",
            name(), "'; the process group's tags from 16384 to 32767 are Trireme's, and all ranks need one build"),
        peer);
  {
    std::lock_guard lock(mutex_);
    last_calls_[static_cast<size_t>(peer)] = message.call;
  }
  const bool is_message = own.kind == CallKind::kRecv;
  const Call& other = message.call;
  const bool fits =
      is_message ? other.numel == own.numel && other.dtype == own.dtype && other.seq == own.seq : other.same_as(own);
  if (!fits) throw PeerError(ErrorCode::kDiverged, describe_mismatch(info(), {place().rank, own}, {peer, other}), peer);
}

void Link::meet(const Call& call) {
  const auto size = static_cast<size_t>(place().size);
  const auto messages = std::make_shared<std::vector<Message>>(size);
  (*messages)[static_cast<size_t>(place().rank)].call = call;
  Wire::Flight outgoing(wire_);
  std::vector<std::unique_ptr<Wire::Flight>> incoming(size);
  try {
    for (int peer = 0; peer < place().size; ++peer) {
      if (peer == place().rank) continue;
      const auto index = static_cast<size_t>(peer);
      incoming[index] = std::make_unique<Wire::Flight>(wire_);
      incoming[index]->receive(Channel::kCalls, bytes_of(peer, messages, index));
      outgoing.send(Channel::kCalls, bytes_of(peer, messages, static_cast<size_t>(place().rank)));
    }
    for (int peer = 0; peer < place().size; ++peer) {
      if (peer == place().rank) continue;
      awaited_in_meeting_ = peer;
      incoming[static_cast<size_t>(peer)]->land();
      awaited_in_meeting_ = -1;
      check((*messages)[static_cast<size_t>(peer)], call, peer);
    }
    outgoing.land();
  } catch (const WireError& error) {
    rethrow(error, call);
  }
}

void Link::announce(const Call& call) {
  const auto message = std::make_shared<std::vector<Message>>(1);
  message->front().call = call;
  try {
    Wire::Flight flight(wire_);
    flight.send(Channel::kMessageCalls, bytes_of(call.root, message, 0));
    flight.land();
  } catch (const WireError& error) {
    rethrow(error, call);
  }
}

void Link::expect(const Call& call) {
  const auto message = std::make_shared<std::vector<Message>>(1);
  try {
    Wire::Flight flight(wire_);
    flight.receive(Channel::kMessageCalls, bytes_of(call.root, message, 0));
    flight.land();
  } catch (const WireError& error) {
    rethrow(error, call);
  }
  try {
    check(message->front(), call, call.root);
  } catch (const CommError&) {
    const Call& sent = message->front().call;
    if (message->front().kind == Message::kCall) {
      const int64_t bytes = sent.numel * static_cast<int64_t>(c10::elementSize(sent.dtype));
      const auto unwanted = std::make_shared<std::vector<std::byte>>(static_cast<size_t>(bytes));
      move(call, Channel::kMessages, {.receives = {{call.root, unwanted->data(), bytes, unwanted}}, .sends = {}});
    }
    throw;
  }
}

void Link::move(const Call& call, Channel channel, const Traffic& traffic) {
  try {
    Wire::Flight flight(wire_);
    for (const PeerBytes& data : traffic.receives) flight.receive(channel, data);
    for (const PeerBytes& data : traffic.sends) flight.send(channel, data);
    flight.land();
  } catch (const WireError& error) {
    rethrow(error, call);
  }
}

std::string Link::last_seen(int peer) const {
  std::lock_guard lock(mutex_);
  const auto& call = last_calls_[static_cast<size_t>(peer)];
  return str(title(peer), call ? " was last in " + describe(*call) : " was not heard of yet");
}

int Link::awaited_by(const Call& call) const {
  const bool is_message = call.kind == CallKind::kSend || call.kind == CallKind::kRecv;
  return is_message ? call.root : awaited_in_meeting_.load();
}

bool Link::warn_of_late(const Call& call, std::chrono::steady_clock::duration waited) const {
  const int peer = awaited_by(call);
  if (peer < 0) return false;
  log(LogLevel::kWarning, str("comm: ", own_title(), " waits for ", title(peer), " in ", describe(call), " of group '",
                              name(), "' after ", format_seconds(waited), "; ", last_seen(peer), ". ", kWhyLate));
  return true;
}

void Link::rethrow(const WireError& error, const Call& call) {
  if (error.kind() == WireError::Kind::kCancelled) {
    throw_if_failed();
    throw StateError(str("group '", name(), "' was destroyed while ", describe(call), " was under way"));
  }
  const bool late = error.kind() == WireError::Kind::kTimeout;
  throw PeerError(late ? ErrorCode::kTimeout : ErrorCode::kPeerLost,
                  str(title(error.peer()), late ? " did not arrive" : " was lost", " while ", own_title(),
                      " waited for it in ", describe(call), " of group '", name(), "' after ",
                      format_seconds(error.waited()), "; ", last_seen(error.peer()),
                      "; the process group says: ", error.what(), late ? str(". ", kWhyLate) : advice_on_method(call)),
                  error.peer());
}

void Link::tell_peers(ErrorCode code, const std::string& cause) noexcept {
  const auto message = std::make_shared<std::vector<Message>>(1);
  message->front().kind = Message::kFailure;
  message->front().code = static_cast<int64_t>(code);
  std::snprintf(message->front().cause.data(), message->front().cause.size(), "%s", cause.c_str());
  for (int peer = 0; peer < place().size; ++peer) {
    if (peer == place().rank) continue;
    Wire::Flight notice(wire_);
    try {
      notice.send(Channel::kCalls, bytes_of(peer, message, 0));
      notice.send(Channel::kMessageCalls, bytes_of(peer, message, 0));
    } catch (const std::exception&) {
      // A peer that is gone needs none.
    }
    notice.leave();
  }
  wire_.cancel();
}

}  // namespace trireme::comm
