#include "ownership/mailbox.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "ownership/wire.h"
#include "trireme/base/error.h"
#include "trireme/intercept.h"

namespace trireme::ownership {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

constexpr auto kPatience = 100ms;  // before a stage says that it waits
constexpr auto kForTrace = 2s;     // until the other one, which may compute, has sent the operators that it ran
constexpr char kAdvice[] =
    "; every stage has to run the same operators: look for what differs by rank, as a branch, an option or Python's "
    "random numbers do, or what a function changes that torch.utils.checkpoint runs again, at other times on each "
    "stage";

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

std::string after_text(const std::string& text) { return text.substr(text.find('\0') + 1); }

/// "a value for aten::add.Tensor (operator 17 of micro-batch 3)".
std::string text_of(const MessageName& name) {
  const std::string of_operator = str(name.op, " (operator ", name.position, " of micro-batch ", name.micro_batch, ")"),
                    of_micro_batch = str("micro-batch ", name.micro_batch),
                    of_number = str(of_micro_batch, " (number ", name.number, ")");
  switch (name.kind) {
    case MessageKind::kValue:
      return "a value for " + of_operator;
    case MessageKind::kScalar:
      return "the number of " + of_operator;
    case MessageKind::kTold:
    case MessageKind::kToldOnce:
      return "the sizes of " + of_operator;
    case MessageKind::kEnd:
      return "the end of " + of_micro_batch;
    case MessageKind::kOutput:
      return "an output of " + of_number;
    case MessageKind::kGradient:
    case MessageKind::kNoGradient:
    case MessageKind::kStrides:
      return "a gradient of " + of_number;
    default:
      return "the end of the step";
  }
}

MessageName in_step(MessageName name, int64_t first) {
  name.micro_batch -= first;
  return name;
}

/// The deed of a stage, by a message of a step that begins with micro-batch `first`.
std::string sent_text(const Header& came, int64_t first) {
  if (came.kind != MessageKind::kEnd) return str("sent ", text_of(in_step(message_of(came), first)));
  return str("ended micro-batch ", came.micro_batch - first, " after ", came.position, " operators");
}

std::string wait_text(int stage, const MessageName& name, int from) {
  return str("stage ", stage, " waits for ", text_of(name), " from stage ", from);
}

std::string other_operators(int stage, int other, int64_t micro_batch) {
  return str("stages ", std::min(stage, other), " and ", std::max(stage, other), " ran other operators in micro-batch ",
             micro_batch);
}

}  // namespace

Mailbox::Mailbox(Group& stages, c10::Device device) : post_(stages, device, *this) {
  for (int stage = 0; stage < stages.size(); ++stage) lanes_.push_back({.stage = stage});
}

Mailbox::~Mailbox() = default;

Mailbox::Lane& Mailbox::lane(int stage) {
  TRIREME_CHECK(stage >= 0 && stage < post_.size() && stage != post_.stage(), "stage ", stage);
  return lanes_[static_cast<size_t>(stage)];
}

// --- sending -------------------------------------------------------------------------------------------------------

void Mailbox::send(int stage, const MessageName& name, uint64_t digest, const at::Tensor& elements) {
  waiting_.sent(stage, name);
  Header header{.micro_batch = name.micro_batch,
                .number = name.number,
                .position = name.position,
                .digest = digest,
                .kind = name.kind};
  header.set_op(name.op);
  post_.send(stage, header, elements);
  ++messages_;
  if (elements.defined()) bytes_ += static_cast<int64_t>(elements.nbytes());
}

void Mailbox::send(int stage, const MessageName& name, const at::Tensor& elements) { send(stage, name, 0, elements); }

void Mailbox::send_bytes(int stage, const MessageName& name, const std::string& bytes) {
  const WithoutInterception own_operators;
  send(stage, name, 0, bytes_of(bytes));
}

void Mailbox::send_told(int64_t micro_batch, const ownership::Key& key, const std::string& op,
                        const std::string& bytes) {
  const WithoutInterception own_operators;
  waiting_.told({key.first, key.second});
  const auto number = static_cast<int64_t>(key.first);
  for (const Lane& to : lanes_)
    if (to.stage != post_.stage())
      send(to.stage, {micro_batch, number, MessageKind::kToldOnce, 0, op}, key.second, bytes_of(bytes));
}

void Mailbox::send_gradient(int stage, int64_t micro_batch, int64_t number, const at::Tensor& gradient) {
  if (!gradient.defined()) return send(stage, {micro_batch, number, MessageKind::kNoGradient, 0, ""}, 0, {});
  const WithoutInterception own_operators;
  const std::string strides = told_strides(layout_of(gradient));
  if (!strides.empty()) send(stage, {micro_batch, number, MessageKind::kStrides, 0, ""}, 0, bytes_of(strides));
  send(stage, {micro_batch, number, MessageKind::kGradient, 0, ""}, 0, packed(gradient));
}

void Mailbox::send_output(int stage, int64_t micro_batch, int64_t number, const at::Tensor& output) {
  send(stage, {micro_batch, number, MessageKind::kOutput, 0, ""}, 0, output);
}

void Mailbox::send_end(int stage, int64_t micro_batch, uint64_t digest, const OperatorTrace& trace) {
  if (!is_ended(micro_batch)) {
    ended_.insert(micro_batch);
    ++ends_;
    records_.emplace(micro_batch, Record{digest, trace, post_.size() - 1});
  }
  const auto operators = static_cast<int64_t>(trace.size());
  send(stage, {micro_batch, INT64_MAX, MessageKind::kEnd, operators, ""}, digest, {});
  Lane& other = lane(stage);
  // Ends that came before this stage had ended the micro-batch, too.
  const auto came = other.forward.extract(micro_batch);
  if (came.empty()) return;
  for (const Letter& letter : came.mapped()) meet_end(other, letter.header);
}

void Mailbox::follow(int64_t micro_batch, const OperatorTrace* trace) {
  if (trace != nullptr)
    followed_[micro_batch] = trace;
  else
    followed_.erase(micro_batch);
}

// Other stages are heard meanwhile: one that has failed takes nothing any more.
void Mailbox::flush() {
  (void)post_.wait_until([&] { return post_.has_left(); });
}

void Mailbox::finish() {
  if (!post_.is_open()) return;
  const int64_t last = ended_.empty() ? ended_below_ : *ended_.rbegin();
  const auto await_all = [&](MessageKind kind, const auto& is_there) {
    for (const Lane& other : lanes_)
      if (other.stage != post_.stage())
        take({.stage = other.stage, .name = {last, 0, kind, 0, ""}, .key = {}, .has_come = [&] {
                return is_there(other);
              }});
  };
  await_all(MessageKind::kEnd, [&](const Lane& other) { return other.compared >= ends_; });
  post_.send_finished();
  await_all(MessageKind::kFinished, [&](const Lane& other) { return post_.has_finished(other.stage); });
  for (const Lane& other : lanes_)
    if (!other.aside.empty())
      post_.refuse(str("stage ", other.stage, " has sent ",
                       text_of(in_step(message_of(other.aside.begin()->second.header), first_)), " to stage ",
                       post_.stage(), ", which does not take it", kAdvice));
  flush();
  post_.end_step();
  ended_below_ = last;
  first_ = last + 1;
  ended_.clear();
  has_stalled_ = false;
  for (Lane& other : lanes_) other.told.clear();
  waiting_.end_step();
}

void Mailbox::clear() {
  for (Lane& other : lanes_) {
    other.forward.clear();
    other.aside.clear();
    other.told.clear();
  }
  records_.clear();
}

// --- receiving -----------------------------------------------------------------------------------------------------

Letter Mailbox::receive(int stage, const MessageName& name, const at::Tensor& buffer) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  Lane& from = lane(stage);
  const AsideKey key{name.kind, name.micro_batch, name.number};
  const at::Tensor bytes = as_bytes(buffer);
  struct Room {
    std::map<std::pair<int, AsideKey>, at::Tensor>& wanted;
    const std::pair<int, AsideKey> of;
    ~Room() { wanted.erase(of); }
  } const room{wanted_, {stage, key}};
  if (bytes.defined()) wanted_.insert_or_assign(room.of, bytes);
  Letter letter;
  if (is_forward(name.kind)) {
    const auto due = [&] {  // of another micro-batch only where passes take turns
      return turns_ != nullptr ? from.forward.find(name.micro_batch) : from.forward.begin();
    };
    take({.stage = stage, .name = name, .key = {}, .has_come = [&] { return due() != from.forward.end(); }});
    const auto queue = due();
    letter = std::move(queue->second.front());
    queue->second.pop_front();
    if (queue->second.empty()) from.forward.erase(queue);
  } else {
    take({.stage = stage, .name = name, .key = {}, .has_come = [&] { return from.aside.contains(key); }});
    letter = std::move(from.aside.extract(key).mapped());
  }
  const Header& came = letter.header;
  const auto here = [&] { return wait_text(post_.stage(), in_step(name, first_), stage); };
  if (is_forward(name.kind) && (AsideKey{came.kind, came.micro_batch, came.number} != key ||
                                came.position != name.position || !came.has_op(name.op))) {
    diverge(from, std::min(name.micro_batch, came.micro_batch),
            str(here(), "; stage ", stage, " has ", sent_text(came, first_)));
  }
  if (!buffer.defined()) return letter;
  if (!came.fits(shape_text(buffer)))
    post_.refuse(str(here(), ", of ", shape_text(buffer), "; stage ", stage, " has sent ", came.shape, kAdvice));
  if (!letter.elements.is_same(bytes)) bytes.copy_(letter.elements);
  return letter;
}

void Mailbox::take(int stage, const MessageName& name, const at::Tensor& buffer) { (void)receive(stage, name, buffer); }

std::string Mailbox::take_bytes(int stage, const MessageName& name) {
  return text_in(receive(stage, name, {}).elements);
}

std::string Mailbox::take_told(int stage, const ownership::Key& key, const MessageName& name) {
  Lane& from = lane(stage);
  const SizesKey sizes{key.first, key.second};
  // The stage tells sizes before it sends anything of a later operator.
  const auto later = [&]() -> const Header* {
    const auto queue = from.forward.find(name.micro_batch);
    if (queue == from.forward.end()) return nullptr;
    const Header& last = queue->second.back().header;
    return last.kind == MessageKind::kEnd || last.position > name.position ? &last : nullptr;
  };
  take({.stage = stage, .name = name, .key = key, .has_come = [&] {
          return from.told.contains(sizes) || later() != nullptr;
        }});
  if (!from.told.contains(sizes))
    diverge(from, name.micro_batch,
            str(wait_text(post_.stage(), in_step(name, first_), stage), "; stage ", stage, " has ",
                sent_text(*later(), first_)));
  return from.told.at(sizes);
}

at::Tensor Mailbox::take_gradient(int stage, int64_t micro_batch, int64_t number, at::IntArrayRef sizes,
                                  at::ScalarType dtype) {
  const WithoutInterception own_operators;
  const MessageName name{micro_batch, number, MessageKind::kGradient, 0, ""};
  const Letter letter = receive(stage, name, {});
  if (letter.header.kind == MessageKind::kNoGradient) return {};
  const auto strides = lane(stage).aside.extract(AsideKey{MessageKind::kStrides, micro_batch, number});
  const Layout layout = layout_from(sizes, dtype, strides.empty() ? "" : text_in(strides.mapped().elements));
  const std::string shape = shape_text(dtype, {packed_numel(layout)});
  if (!letter.header.fits(shape))
    post_.refuse(str(wait_text(post_.stage(), in_step(name, first_), stage), ", of ", shape, "; stage ", stage,
                     " has sent ", letter.header.shape, kAdvice));
  return unpacked(letter.elements.view(dtype), layout);
}

void Mailbox::take_output(int stage, int64_t micro_batch, int64_t number, const at::Tensor& buffer) {
  (void)receive(stage, {micro_batch, number, MessageKind::kOutput, 0, ""}, buffer);
}

/// The buffer of the take that waits for it.
at::Tensor Mailbox::room(int stage, const Header& header) {
  const auto wanted = wanted_.find({stage, AsideKey{header.kind, header.micro_batch, header.number}});
  const bool fits = wanted != wanted_.end() && wanted->second.numel() == header.bytes &&
                    wanted->second.device().is_cpu() == !header.is_on_device;
  return fits ? wanted->second : at::Tensor();
}

void Mailbox::read(int stage, Letter letter) {
  Lane& from = lane(stage);
  const Header& header = letter.header;
  waiting_.heard(stage, header);
  if (header.kind == MessageKind::kWaiting) return;
  if (header.kind == MessageKind::kStalled) {
    has_stalled_ = true;
  } else if (header.kind == MessageKind::kToldOnce) {
    from.told.emplace(SizesKey{header.number, header.digest}, text_in(letter.elements));
  } else if (header.kind == MessageKind::kTrace && !is_diverging_) {
    const int64_t micro_batch = header.micro_batch;
    from.aside.emplace(AsideKey{MessageKind::kTrace, micro_batch, 0}, letter);
    const std::string text = text_in(letter.elements);
    diverge(from, micro_batch, text.substr(0, text.find('\0')));
  } else if (!is_forward(header.kind)) {
    from.aside.insert_or_assign(aside_key(message_of(header)), std::move(letter));
  } else if (is_ended(header.micro_batch)) {
    meet_end(from, header);
  } else {
    from.forward[header.micro_batch].push_back(std::move(letter));
  }
}

// --- divergence ----------------------------------------------------------------------------------------------------

/// A forward message of a micro-batch that this stage has ended: nothing but the same end may come.
void Mailbox::meet_end(Lane& other, const Header& end) {
  const auto found = records_.find(end.micro_batch);
  if (end.kind != MessageKind::kEnd || found == records_.end())
    diverge(other, end.micro_batch,
            str("stage ", other.stage, " has sent ", text_of(in_step(message_of(end), first_)), " to stage ",
                post_.stage(), ", which has ended micro-batch ", end.micro_batch - first_,
                found != records_.end() ? str(" after ", found->second.trace.size(), " operators") : ""));
  Record& own = found->second;
  if (end.digest != own.digest || end.position != static_cast<int64_t>(own.trace.size()))
    diverge(other, end.micro_batch, other_operators(post_.stage(), other.stage, end.micro_batch - first_));
  ++other.compared;
  if (--own.left == 0) records_.erase(found);
}

/// The operators that a stage ran in a micro-batch.
struct Mailbox::Trace {
  const OperatorTrace* operators = nullptr;  // null: it is not known any more, or not yet
  bool is_ended = false;
};

Mailbox::Trace Mailbox::trace_of(int64_t micro_batch) const {
  if (const auto ended = records_.find(micro_batch); ended != records_.end()) return {&ended->second.trace, true};
  const auto followed = followed_.find(micro_batch);
  return {followed != followed_.end() ? followed->second : nullptr, false};
}

void Mailbox::send_trace(int stage, int64_t micro_batch, const std::string& text) {
  const Trace own = trace_of(micro_batch);
  post_.send(stage, {.micro_batch = micro_batch, .position = own.is_ended, .kind = MessageKind::kTrace},
             bytes_of(text + '\0' + (own.operators != nullptr ? written(*own.operators) : "")));
}

/// Two stages do not run the same program, in this micro-batch or since: both tell each other what they ran in it, and
/// name the first operator that differs, or say `text` where there is none.
void Mailbox::diverge(Lane& other, int64_t micro_batch, const std::string& text) {
  const WithoutInterception own_operators;
  if (trace_of(micro_batch).operators == nullptr) post_.refuse(text + kAdvice);
  is_diverging_ = true;
  send_trace(other.stage, micro_batch, text);
  const auto first_trace = [&] { return other.aside.lower_bound(AsideKey{MessageKind::kTrace, INT64_MIN, 0}); };
  const auto is_there = [&] {
    const auto found = first_trace();
    return found != other.aside.end() && std::get<0>(found->first) == MessageKind::kTrace &&
           std::get<1>(found->first) <= micro_batch;
  };
  const auto begun = Clock::now();
  (void)post_.wait_until([&] { return is_there() || Clock::now() - begun > kForTrace; });
  if (!is_there()) post_.refuse(text + kAdvice);
  const Letter letter = first_trace()->second;
  if (letter.header.micro_batch < micro_batch) {  // it has found another difference, in an earlier one
    micro_batch = letter.header.micro_batch;
    send_trace(other.stage, micro_batch, text);
  }
  const Trace own = trace_of(micro_batch);
  const std::vector<Ran> mine = trace_in(own.operators != nullptr ? written(*own.operators) : ""),
                         its = trace_in(after_text(text_in(letter.elements)));
  const bool is_first = post_.stage() < other.stage;
  const std::vector<Ran>&one = is_first ? mine : its, &two = is_first ? its : mine;
  const int stage_one = std::min(post_.stage(), other.stage), stage_two = std::max(post_.stage(), other.stage);
  size_t i = 0;
  while (i < one.size() && i < two.size() && one[i].digest == two[i].digest && one[i].op == two[i].op) ++i;
  const std::string where = str(" as operator ", i, " of micro-batch ", micro_batch - first_);
  const bool ends_one = i == one.size(), ends_two = i == two.size();
  const bool is_ended = own.is_ended, has_its_ended = letter.header.position != 0;
  if ((i == mine.size() && !is_ended) || (i == its.size() && !has_its_ended)) post_.refuse(text + kAdvice);
  if (ends_one && ends_two)
    post_.refuse(str("stages ", stage_one, " and ", stage_two, " ran the same operators and returned other tensors in ",
                     "micro-batch ", micro_batch - first_, kAdvice));
  if (!ends_one && !ends_two && one[i].op == two[i].op)
    post_.refuse(str("stages ", stage_one, " and ", stage_two, " ran ", one[i].op, where, " with other arguments, ",
                     "or with gradients or autocast on in one of them", kAdvice));
  const auto ran = [&](int stage, const std::vector<Ran>& trace) {
    return i < trace.size() ? str("stage ", stage, " ran ", trace[i].op)
                            : str("stage ", stage, " ended it after ", trace.size(), " operators");
  };
  post_.refuse(str(ran(stage_one, one), " and ", ran(stage_two, two), where, kAdvice));
}

/// Whether this stage, which waits at `here`, has run the operator at `position`.
bool Mailbox::is_past(int64_t micro_batch, int64_t position, const MessageName& here) const {
  const bool takes_turns = turns_ != nullptr && micro_batch != here.micro_batch;
  if (is_forward(here.kind) && !takes_turns &&
      std::pair(micro_batch, position) < std::pair(here.micro_batch, here.position))
    return true;
  const auto followed = followed_.find(micro_batch);
  return followed != followed_.end() ? static_cast<int64_t>(followed->second->size()) > position
                                     : is_ended(micro_batch);
}

/// Two stages wait for each other: one is past the operator of which the other one waits for a message, or both are
/// at the same one: it will never be sent.
void Mailbox::check_waiting(const MessageName& name, int from) {
  for (const auto& [stage, theirs] : waiting_.wanted()) {
    if (theirs.kind != MessageKind::kToldOnce && (!is_forward(theirs.kind) || theirs.kind == MessageKind::kEnd))
      continue;
    const bool is_at_same = stage == from && theirs.micro_batch == name.micro_batch &&
                            theirs.position == name.position && name.kind != MessageKind::kGradient;
    if (!is_at_same && !is_past(theirs.micro_batch, theirs.position, name)) continue;
    diverge(lane(stage), std::min(theirs.micro_batch, name.micro_batch),
            str(wait_text(stage, in_step(theirs, first_), post_.stage()), ", which has not sent it and waits for ",
                text_of(in_step(name, first_)), " from stage ", from));
  }
}

bool Mailbox::has_come(const Wait& wait) {
  if (wait.has_come()) return true;
  progress();
  return wait.has_come();
}

/// The result of `call`, whose errors of communication say what was waited for.
template <class Call>
auto Mailbox::named(const Wait& wait, const Call& call) {
  try {
    return call();
  } catch (const CommError& error) {
    if (error.code() == ErrorCode::kDiverged || error.code() == ErrorCode::kTimeout) throw;
    throw CommError(error.code(),
                    str(wait_text(post_.stage(), in_step(wait.name, first_), wait.stage), ": ", error.what()));
  }
}

void Mailbox::take(const Wait& wait) {
  const bool has_come_before = named(wait, [&] {
    post_.begin_step();
    return has_come(wait);
  });
  if (has_come_before) return;
  ++waits_[static_cast<size_t>(wait.name.kind)];
  if (turns_ != nullptr && turns_->await(wait)) return;
  while (!await(wait)) {
  }
}

/// The watch of a stage that waits: looks for what ends the wait without the message.
bool Mailbox::watch_wait(const Wait& wait, Clock::duration waited, bool& has_told) {
  const MessageName& name = wait.name;
  const auto here = [&] { return wait_text(post_.stage(), in_step(name, first_), wait.stage); };
  if (post_.has_finished(wait.stage))
    post_.refuse(str(here(), ", which has finished the step without sending it", kAdvice));
  if (waited > post_.timeout())
    post_.refuse(str(here(), ", and nothing has come for ",
                     std::chrono::duration_cast<std::chrono::seconds>(waited).count(), " s"),
                 ErrorCode::kTimeout);
  if (name.kind == MessageKind::kFinished) return false;  // nobody reads any more what this stage sends
  const bool is_watched = turns_ != nullptr || name.kind == MessageKind::kToldOnce ||
                          (is_forward(name.kind) && name.kind != MessageKind::kEnd);
  if (waited < kPatience || !is_watched) return false;
  if (!std::exchange(has_told, true)) waiting_.tell(wait.stage, name, wait.key);
  check_waiting(name, wait.stage);
  if (turns_ != nullptr && !has_stalled_ && waiting_.do_all_wait()) {
    has_stalled_ = true;
    post_.send_to_all({.kind = MessageKind::kStalled});
  }
  return false;
}

bool Mailbox::await(const Wait& wait) {
  const bool has_stalled_before = has_stalled_;
  auto begun = Clock::now();
  bool has_told = false;
  const auto end_note = [&] {
    if (std::exchange(has_told, false)) waiting_.tell_end();
  };
  const auto is_over = [&] {
    if (wait.has_come() || has_stalled_ != has_stalled_before) return true;
    if (turns_ != nullptr && turns_->meanwhile()) {
      end_note();
      begun = Clock::now();
      return wait.has_come();
    }
    return watch_wait(wait, Clock::now() - begun, has_told) || has_stalled_ != has_stalled_before;
  };
  (void)named(wait, [&] { return post_.wait_until(is_over); });
  end_note();
  return wait.has_come();
}

}  // namespace trireme::ownership
