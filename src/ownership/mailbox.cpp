#include "ownership/mailbox.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <xxhash.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <thread>
#include <type_traits>

#include "trireme/base/wait_hook.h"
#include "trireme/intercept.h"

namespace trireme::ownership {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kBetweenPolls = 20ms;  // of the embedding program's hook
constexpr auto kPatience = 100ms;     // before a stage says that it waits
constexpr auto kForTrace = 2s;        // until the other one, which may compute, has sent the operators that it ran
constexpr auto kForLeaving = 500ms;   // until what was sent has left, before the group ends
constexpr char kAdvice[] =
    "; every stage has to run the same operators: look for what differs by rank, as a branch, an option or Python's "
    "random numbers do";

/// Of what errors say of a tensor: "Float [2, 3]".
std::string shape_text(const at::Tensor& tensor) {
  return tensor.defined() ? str(tensor.scalar_type(), " ", tensor.sizes()) : "nothing";
}

template <size_t kRoom>
void put(char (&place)[kRoom], const std::string& text) {
  text.copy(place, kRoom - 1);
}

/// `elements` as Group takes them of any dtype.
at::Tensor as_bytes(const at::Tensor& elements) {
  if (!elements.defined()) return {};
  TRIREME_CHECK(elements.is_contiguous() && !elements.is_conj() && !elements.is_neg(), "a message is contiguous");
  return elements.detach().view(-1).view(at::kByte);
}

at::Tensor bytes_of(const std::string& text) {
  const at::Tensor bytes = at::empty({static_cast<int64_t>(text.size())}, at::kByte);
  if (!text.empty()) std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string text_in(const at::Tensor& bytes) {
  if (bytes.numel() == 0) return "";
  return {static_cast<const char*>(bytes.const_data_ptr()), static_cast<size_t>(bytes.numel())};
}

/// An operator of a trace, as it was sent.
struct Ran {
  std::string op;
  uint64_t digest;
};

std::string written(const OperatorTrace& trace) {
  std::string text;
  for (const auto& [op, digest] : trace) {
    text.append(reinterpret_cast<const char*>(&digest), sizeof(digest));
    text.append(*op);
    text += '\0';
  }
  return text;
}

std::vector<Ran> trace_in(const std::string& text) {
  std::vector<Ran> trace;
  for (size_t at = 0; at + sizeof(uint64_t) <= text.size();) {
    Ran& ran = trace.emplace_back();
    std::memcpy(&ran.digest, text.data() + at, sizeof(ran.digest));
    const size_t end = std::min(text.find('\0', at + sizeof(uint64_t)), text.size());
    ran.op = text.substr(at + sizeof(uint64_t), end - at - sizeof(uint64_t));
    at = end + 1;
  }
  return trace;
}

bool is_forward(MessageKind kind) {
  return kind == MessageKind::kValue || kind == MessageKind::kScalar || kind == MessageKind::kTold ||
         kind == MessageKind::kEnd;
}

/// "a value for", of an operator.
const char* described(MessageKind kind) {
  switch (kind) {
    case MessageKind::kValue:
      return "a value for";
    case MessageKind::kScalar:
      return "the number of";
    case MessageKind::kTold:
      return "the sizes of";
    case MessageKind::kEnd:
      return "the end of";
    case MessageKind::kOutput:
      return "an output of";
    case MessageKind::kGradient:
    case MessageKind::kNoGradient:
      return "a gradient of";
    case MessageKind::kTrace:
      return "the operators of";
    case MessageKind::kFinished:
      return "that it is done with";
    case MessageKind::kWaiting:
      return "what it waits for in";
  }
  return "something of";
}

}  // namespace

/// What goes before the elements. Unused bytes are 0.
struct Mailbox::Header {
  uint64_t mark = kMark;
  int64_t micro_batch = 0, number = 0, position = 0;
  int64_t bytes = 0;    ///< of the elements
  uint64_t digest = 0;  ///< of an end
  MessageKind kind = MessageKind::kValue;
  MessageKind awaited = MessageKind::kValue;  ///< by kWaiting
  uint8_t is_on_device = 0;
  uint8_t unused[5] = {};
  char op[96] = {};
  char shape[96] = {};  ///< shape_text() of the elements
  uint64_t checksum = 0;

  static constexpr uint64_t kMark = 0x3178656c69616d74;  // "tmailex1"
  uint64_t own_checksum() const { return XXH3_64bits(this, offsetof(Header, checksum)); }
  MessageName name() const { return {micro_batch, number, kind, position, op}; }
};

/// What has come and is not taken yet.
struct Mailbox::Letter {
  Header header;
  at::Tensor elements;  ///< bytes
};

/// What came from another stage, and went there.
struct Mailbox::Lane {
  int stage;
  at::Tensor header = {};  ///< that is received next
  std::optional<Pending<void>> arrives = {};
  std::deque<Letter> forward = {};
  std::map<Key, Letter> aside = {};             ///< in any order
  int64_t compared = -1;                        ///< the last micro-batch whose end has come and was compared
  int64_t finished = 0;                         ///< steps
  std::optional<Header> waiting = {};           ///< what it waits for, as far as is known
  std::pair<int64_t, int64_t> sent = {-1, -1};  ///< the last forward message's micro-batch and number
};

/// A message that is received where it belongs if it comes now.
struct Mailbox::Wanted {
  int stage;
  Key key;
  at::Tensor buffer;
  std::optional<Header> came = {};
};

/// A micro-batch that this stage has ended.
struct Mailbox::Record {
  uint64_t digest;
  OperatorTrace trace;
};

Mailbox::Mailbox(Group& stages, c10::Device device) : stages_(stages), device_(device), rank_(stages.rank()) {
  static_assert(sizeof(Header) == 256 && std::is_trivially_copyable_v<Header>);
  for (int stage = 0; stage < stages.size(); ++stage) lanes_.push_back({.stage = stage});
}

Mailbox::~Mailbox() = default;

Mailbox::Lane& Mailbox::lane(int stage) {
  TRIREME_CHECK(stage >= 0 && stage < stages_.size() && stage != rank_, "stage ", stage);
  return lanes_[static_cast<size_t>(stage)];
}

void Mailbox::begin() {
  if (!std::exchange(is_open_, true)) ++steps_;
}

// --- sending -------------------------------------------------------------------------------------------------------

void Mailbox::post(int stage, const Header& said, const at::Tensor& elements) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  Header header = said;
  const at::Tensor bytes = as_bytes(elements);
  header.bytes = bytes.defined() ? bytes.numel() : 0;
  header.is_on_device = bytes.defined() && !bytes.device().is_cpu();
  put(header.shape, shape_text(elements));
  header.checksum = header.own_checksum();
  const at::Tensor name = at::empty({sizeof(Header)}, at::kByte);
  std::memcpy(name.mutable_data_ptr(), &header, sizeof(Header));
  const auto start = [&](const at::Tensor& tensor) { leaving_.emplace_back(stages_.send(tensor, stage), tensor); };
  start(name);
  if (header.bytes > 0) start(bytes);
  (void)has_left();
  if (header.kind >= MessageKind::kTrace) return;
  ++messages_;
  bytes_ += header.bytes;
}

void Mailbox::send_named(int stage, const MessageName& name, const at::Tensor& elements, uint64_t digest) {
  Lane& to = lane(stage);
  begin();
  if (is_forward(name.kind)) to.sent = {name.micro_batch, name.number};
  Header header{.micro_batch = name.micro_batch,
                .number = name.number,
                .position = name.position,
                .digest = digest,
                .kind = name.kind};
  put(header.op, name.op);
  post(stage, header, elements);
}

void Mailbox::send(int stage, const MessageName& name, const at::Tensor& elements) {
  send_named(stage, name, elements, 0);
}

void Mailbox::send_bytes(int stage, const MessageName& name, const std::string& bytes) {
  send_named(stage, name, bytes_of(bytes), 0);
}

void Mailbox::send_gradient(int stage, int64_t micro_batch, int64_t number, const at::Tensor& gradient) {
  const MessageKind kind = gradient.defined() ? MessageKind::kGradient : MessageKind::kNoGradient;
  send_named(stage, {micro_batch, number, kind, 0, ""}, gradient, 0);
}

void Mailbox::send_output(int stage, int64_t micro_batch, int64_t number, const at::Tensor& output) {
  send_named(stage, {micro_batch, number, MessageKind::kOutput, 0, ""}, output, 0);
}

void Mailbox::send_end(int stage, int64_t micro_batch, uint64_t digest, const OperatorTrace& trace) {
  if (micro_batch > ended_) {
    ended_ = micro_batch;
    records_.emplace(micro_batch, Record{digest, trace});
  }
  const auto operators = static_cast<int64_t>(trace.size());
  send_named(stage, {micro_batch, INT64_MAX, MessageKind::kEnd, operators, ""}, {}, digest);
  Lane& other = lane(stage);
  // What came before this stage had ended the micro-batch, too.
  while (!other.forward.empty() && other.forward.front().header.micro_batch <= micro_batch) {
    const Letter letter = std::move(other.forward.front());
    other.forward.pop_front();
    meet_end(other, letter.header);
  }
}

bool Mailbox::has_left() {
  while (!leaving_.empty() && leaving_.front().first.done()) {
    leaving_.front().first.wait();
    leaving_.pop_front();
  }
  return leaving_.empty();
}

// Other stages are heard meanwhile: one that has failed takes nothing any more.
void Mailbox::flush() {
  const WithoutInterception own_operators;
  (void)wait_until(-1, [&] { return has_left(); });
}

void Mailbox::finish() {
  if (!is_open_) return;
  const auto await_all = [&](MessageKind kind, const auto& is_there) {
    for (Lane& other : lanes_)
      if (other.stage != rank_) await(other.stage, {ended_, 0, kind, 0, ""}, [&] { return is_there(other); });
  };
  await_all(MessageKind::kEnd, [&](const Lane& other) { return other.compared >= ended_; });
  for (const Lane& other : lanes_)
    if (other.stage != rank_)
      post(other.stage, {.micro_batch = ended_, .number = steps_, .kind = MessageKind::kFinished}, {});
  await_all(MessageKind::kFinished, [&](const Lane& other) { return other.finished >= steps_; });
  for (const Lane& other : lanes_)
    if (!other.aside.empty())
      refuse(str("stage ", other.stage, " has sent ", described(std::get<0>(other.aside.begin()->first)), " ",
                 text_of(other.aside.begin()->second.header.name()), " to stage ", rank_, ", which does not take it",
                 kAdvice));
  flush();
  is_open_ = false;
}

void Mailbox::abort(const std::string& text) noexcept {
  try {
    // A stage that is receiving elements may not hear of an abort that comes before them.
    const auto begun = Clock::now();
    while (!has_left() && Clock::now() - begun < kForLeaving) std::this_thread::sleep_for(1ms);
  } catch (const std::exception&) {
    // The group has failed already.
  }
  stages_.abort(text);
}

void Mailbox::clear() {
  for (Lane& other : lanes_) {
    other.forward.clear();
    other.aside.clear();
    other.waiting.reset();
  }
  records_.clear();
}

// --- receiving -----------------------------------------------------------------------------------------------------

at::Tensor Mailbox::receive_next(int stage, const MessageName& name, const at::Tensor& buffer) {
  Lane& from = lane(stage);
  begin();
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  Wanted wanted{.stage = stage, .key = {name.kind, name.micro_batch, name.number}, .buffer = as_bytes(buffer)};
  wanted_ = from.forward.empty() ? &wanted : nullptr;
  const auto is_there = [&] { return wanted.came || !from.forward.empty(); };
  await(stage, name, is_there);
  wanted_ = nullptr;
  Letter letter;
  if (wanted.came) {
    letter = {*wanted.came, wanted.buffer};
  } else {
    letter = std::move(from.forward.front());
    from.forward.pop_front();
  }
  const Header& came = letter.header;
  const MessageName other = came.name();
  const bool is_it = std::tuple(came.kind, came.micro_batch, came.number, came.position) ==
                         std::tuple(name.kind, name.micro_batch, name.number, name.position) &&
                     other.op == name.op.substr(0, sizeof(Header::op) - 1);
  if (!is_it) {
    if (came.kind == MessageKind::kEnd)
      refuse(str(waits_for(rank_, name, stage), "; stage ", stage, " has ended micro-batch ", came.micro_batch,
                 " after ", came.position, " operators", kAdvice));
    refuse(str(waits_for(rank_, name, stage), "; stage ", stage, " has sent ", described(came.kind), " ",
               text_of(other), kAdvice));
  }
  if (buffer.defined() && came.shape != shape_text(buffer).substr(0, sizeof(Header::shape) - 1))
    refuse(str(waits_for(rank_, name, stage), " of ", shape_text(buffer), "; stage ", stage, " has sent ", came.shape,
               kAdvice));
  if (buffer.defined() && !wanted.came && came.bytes > 0) wanted.buffer.copy_(letter.elements);
  return letter.elements;
}

void Mailbox::take(int stage, const MessageName& name, const at::Tensor& buffer) {
  (void)receive_next(stage, name, buffer);
}

std::string Mailbox::take_bytes(int stage, const MessageName& name) { return text_in(receive_next(stage, name, {})); }

MessageKind Mailbox::receive_any(int stage, const MessageName& name, const at::Tensor& buffer) {
  Lane& from = lane(stage);
  begin();
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const Key key{name.kind, name.micro_batch, name.number};
  Wanted wanted{.stage = stage, .key = key, .buffer = as_bytes(buffer)};
  auto found = from.aside.find(key);
  if (found == from.aside.end()) {
    wanted_ = &wanted;
    await(stage, name, [&] { return wanted.came || (found = from.aside.find(key)) != from.aside.end(); });
    wanted_ = nullptr;
  }
  const Header came = wanted.came ? *wanted.came : found->second.header;
  const bool has_elements = came.kind != MessageKind::kNoGradient;
  if (has_elements && came.shape != shape_text(buffer).substr(0, sizeof(Header::shape) - 1))
    refuse(str("stage ", rank_, " waits for ", described(name.kind), " micro-batch ", name.micro_batch, " (number ",
               name.number, ") of ", shape_text(buffer), "; stage ", stage, " has sent ", came.shape, kAdvice));
  if (wanted.came) return came.kind;
  if (has_elements && came.bytes > 0) wanted.buffer.copy_(found->second.elements);
  from.aside.erase(found);
  return came.kind;
}

bool Mailbox::take_gradient(int stage, int64_t micro_batch, int64_t number, const at::Tensor& buffer) {
  return receive_any(stage, {micro_batch, number, MessageKind::kGradient, 0, ""}, buffer) == MessageKind::kGradient;
}

void Mailbox::take_output(int stage, int64_t micro_batch, int64_t number, const at::Tensor& buffer) {
  (void)receive_any(stage, {micro_batch, number, MessageKind::kOutput, 0, ""}, buffer);
}

/// Every stage finishes every step.
bool Mailbox::is_expected(const Lane& lane) const { return lane.finished < steps_; }

/// Reads what has come from a stage. Nothing is received ahead of what will come for certain: between two steps no
/// receive is left behind, whose time would be up.
void Mailbox::look(Lane& from, bool is_awaited) {
  while (from.arrives || is_awaited || is_expected(from)) {
    if (!from.arrives) {
      from.header = at::empty({sizeof(Header)}, at::kByte);
      from.arrives = stages_.recv(from.header, from.stage);
    }
    if (!from.arrives->done()) return;
    from.arrives->wait();
    from.arrives.reset();
    read(from, from.header);
    is_awaited = false;
  }
}

void Mailbox::read(Lane& from, const at::Tensor& bytes) {
  Header header;
  std::memcpy(&header, bytes.const_data_ptr(), sizeof(header));
  const auto damaged = [&](const char* how) {
    refuse(str("stage ", rank_, " got a message from stage ", from.stage, " that ", how));
  };
  if (header.mark != Header::kMark) damaged("does not begin as one of a step function");
  if (header.checksum != header.own_checksum()) damaged("is damaged: its header has another checksum");
  const Key key{header.kind == MessageKind::kNoGradient ? MessageKind::kGradient : header.kind, header.micro_batch,
                header.number};
  if (header.kind == MessageKind::kWaiting) {
    from.waiting = header;
    return;
  }
  from.waiting.reset();  // it goes on
  if (header.kind == MessageKind::kFinished) {
    from.finished = header.number;
    return;
  }
  if (wanted_ != nullptr && wanted_->stage == from.stage && wanted_->key == key && wanted_->buffer.defined() &&
      header.bytes == wanted_->buffer.numel() && !header.is_on_device == wanted_->buffer.device().is_cpu()) {
    if (header.bytes > 0) stages_.recv(wanted_->buffer, from.stage).wait();
    wanted_->came = header;
    wanted_ = nullptr;  // what comes next is another one
    return;
  }
  at::Tensor elements = payload(from, header);
  if (!is_forward(header.kind)) {
    from.aside.insert_or_assign(key, Letter{header, std::move(elements)});
    return;
  }
  // Later ones of a micro-batch that this stage has ended, too, are compared where they are met.
  if (header.micro_batch <= ended_) return meet_end(from, header);
  from.forward.push_back({header, std::move(elements)});
  // Not the awaited one, so that none of the lane is awaited any more.
  if (wanted_ != nullptr && wanted_->stage == from.stage && is_forward(std::get<0>(wanted_->key))) wanted_ = nullptr;
}

at::Tensor Mailbox::payload(Lane& from, const Header& header) {
  const c10::Device device = header.is_on_device ? device_ : c10::Device(c10::kCPU);
  at::Tensor elements = at::empty({header.bytes}, at::TensorOptions().dtype(at::kByte).device(device));
  if (header.bytes > 0) stages_.recv(elements, from.stage).wait();
  return elements;
}

// --- divergence ----------------------------------------------------------------------------------------------------

/// A forward message of a micro-batch that this stage has ended: nothing but the same end may come.
void Mailbox::meet_end(Lane& other, const Header& end) {
  const auto found = records_.find(end.micro_batch);
  if (end.kind != MessageKind::kEnd || found == records_.end())
    refuse(str("stage ", other.stage, " has sent ", described(end.kind), " ", text_of(end.name()), " to stage ", rank_,
               ", which has ended micro-batch ", end.micro_batch,
               found != records_.end() ? str(" after ", found->second.trace.size(), " operators") : "", kAdvice));
  const Record& own = found->second;
  if (end.digest != own.digest || end.position != static_cast<int64_t>(own.trace.size()))
    compare_traces(other, end.micro_batch);
  other.compared = end.micro_batch;
  const auto is_past = [&](const Lane& lane) { return lane.stage == rank_ || lane.compared >= end.micro_batch; };
  if (std::ranges::all_of(lanes_, is_past)) records_.erase(found);
}

/// Two stages ran other operators in a micro-batch: both tell each other which.
void Mailbox::compare_traces(Lane& other, int64_t micro_batch) {
  const OperatorTrace own = records_.at(micro_batch).trace;
  Header header{.micro_batch = micro_batch, .kind = MessageKind::kTrace};
  post(other.stage, header, bytes_of(written(own)));
  const Key key{MessageKind::kTrace, micro_batch, 0};
  const auto begun = Clock::now();
  const auto is_there = [&] { return other.aside.contains(key); };
  (void)wait_until(other.stage, [&] { return is_there() || Clock::now() - begun > kForTrace; });
  if (!is_there())
    refuse(str("stages ", rank_, " and ", other.stage, " ran other operators in micro-batch ", micro_batch, kAdvice));
  const std::vector<Ran> theirs = trace_in(text_in(other.aside.at(key).elements));
  size_t i = 0;
  while (i < own.size() && i < theirs.size() && own[i].second == theirs[i].digest && *own[i].first == theirs[i].op) ++i;
  const std::string where = str(" as operator ", i, " of micro-batch ", micro_batch);
  const auto ran = [&](int stage, const std::string* op, size_t count) {
    return op != nullptr ? str("stage ", stage, " ran ", *op)
                         : str("stage ", stage, " ended it after ", count, " operators");
  };
  const std::string* const mine = i < own.size() ? own[i].first : nullptr;
  const std::string* const its = i < theirs.size() ? &theirs[i].op : nullptr;
  if (mine != nullptr && its != nullptr && *mine == *its)
    refuse(str("stages ", rank_, " and ", other.stage, " ran ", *mine, where, " with other arguments", kAdvice));
  refuse(str(ran(rank_, mine, own.size()), " and ", ran(other.stage, its, theirs.size()), where, kAdvice));
}

/// Of stages that wait for each other one is past the operator of which the other one waits for a message, or both are
/// at the same one: it will never be sent.
void Mailbox::check_waiting(const MessageName& name, int stage) {
  for (const Lane& other : lanes_) {
    if (!other.waiting || other.stage == rank_) continue;
    const Header& theirs = *other.waiting;
    if (other.sent >= std::pair(theirs.micro_batch, theirs.number)) continue;  // it is under way
    const std::pair at{theirs.micro_batch, theirs.position}, here{name.micro_batch, name.position};
    if (at > here || (at == here && other.stage != stage)) continue;
    MessageName awaited = theirs.name();
    awaited.kind = theirs.awaited;
    refuse(str(waits_for(other.stage, awaited, rank_), ", which has not sent it and ",
               waits_for(rank_, name, stage).substr(str("stage ", rank_, " ").size()), kAdvice));
  }
}

/// Waits until `is_there`, which reading what comes may change.
void Mailbox::await(int stage, const MessageName& name, const std::function<bool()>& is_there) {
  const WithoutInterception own_operators;
  try {
    const auto begun = Clock::now();
    bool has_told = false;
    const auto is_over = [&] {
      if (is_there()) return true;
      const auto waited = Clock::now() - begun;
      if (waited < kPatience) return false;
      if (waited > stages_.timeout())
        refuse(str(waits_for(rank_, name, stage), ", and nothing has come for ",
                   std::chrono::duration_cast<std::chrono::seconds>(waited).count(), " s"),
               ErrorCode::kTimeout);
      if (!is_forward(name.kind) || name.kind == MessageKind::kEnd) return false;
      if (!has_told) {
        Header note{.micro_batch = name.micro_batch,
                    .number = name.number,
                    .position = name.position,
                    .kind = MessageKind::kWaiting,
                    .awaited = name.kind};
        put(note.op, name.op);
        post(stage, note, {});
        has_told = true;
      }
      check_waiting(name, stage);
      return false;
    };
    if (wait_until(stage, is_over)) ++waits_[static_cast<size_t>(name.kind)];
  } catch (const CommError& error) {
    wanted_ = nullptr;
    if (error.code() == ErrorCode::kDiverged || error.code() == ErrorCode::kTimeout) throw;
    throw CommError(error.code(), str(waits_for(rank_, name, stage), ": ", error.what()));
  } catch (...) {
    wanted_ = nullptr;
    throw;
  }
}

/// Reads what comes until `is_over`. Whether it was not at once.
bool Mailbox::wait_until(int stage, const std::function<bool()>& is_over) {
  const auto look_around = [&] {
    for (Lane& other : lanes_)
      if (other.stage != rank_) look(other, other.stage == stage && !is_over());
    return is_over();
  };
  if (is_over() || look_around()) return false;
  const WaitScope host;  // a Python program's other threads go on, and Ctrl-C is heard
  const auto begun = Clock::now();
  auto polls_at = begun + kBetweenPolls;
  for (int round = 0; !look_around(); ++round) {
    const auto now = Clock::now();
    if (now >= polls_at) {
      polls_at = now + kBetweenPolls;
      try {
        host.poll();
      } catch (const std::exception& interruption) {
        abort(interruption.what());
        throw;
      }
    }
    if (round < 100)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(now - begun < kBetweenPolls ? 50us : 500us);
  }
  return true;
}

void Mailbox::progress() {
  const WithoutInterception own_operators;
  for (Lane& other : lanes_)
    if (other.stage != rank_) look(other, false);
}

/// "aten::add.Tensor (operator 17 of micro-batch 3)".
std::string Mailbox::text_of(const MessageName& name) const {
  if (name.kind == MessageKind::kEnd) return str("micro-batch ", name.micro_batch);
  if (name.kind == MessageKind::kFinished) return "the step";
  if (!is_forward(name.kind)) return str("micro-batch ", name.micro_batch, " (number ", name.number, ")");
  return str(name.op, " (operator ", name.position, " of micro-batch ", name.micro_batch, ")");
}

std::string Mailbox::waits_for(int stage, const MessageName& name, int from) const {
  return str("stage ", stage, " waits for ", described(name.kind), " ", text_of(name), " from stage ", from);
}

void Mailbox::refuse(const std::string& text, ErrorCode code) {
  abort(text);
  throw CommError(code, text);
}

}  // namespace trireme::ownership
