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

bool is_forward(MessageKind kind) { return kind <= MessageKind::kEnd; }

MessageName name_of(const Header& header) {
  return {header.micro_batch, header.number, header.kind, header.position, header.op};
}

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
  if (is_forward(name.kind)) lane(stage).sent = {name.micro_batch, name.number};
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
  if (micro_batch > ended_) {
    ended_ = micro_batch;
    records_.emplace(micro_batch, Record{digest, trace});
  }
  const auto operators = static_cast<int64_t>(trace.size());
  send(stage, {micro_batch, INT64_MAX, MessageKind::kEnd, operators, ""}, digest, {});
  Lane& other = lane(stage);
  // Ends that came before this stage had ended the micro-batch, too.
  while (!other.forward.empty() && other.forward.front().header.micro_batch <= micro_batch) {
    const Letter letter = std::move(other.forward.front());
    other.forward.pop_front();
    meet_end(other, letter.header);
  }
}

// Other stages are heard meanwhile: one that has failed takes nothing any more.
void Mailbox::flush() {
  (void)post_.wait_until([&] { return post_.has_left(); });
}

void Mailbox::finish() {
  if (!post_.is_open()) return;
  const auto await_all = [&](MessageKind kind, const auto& is_there) {
    for (const Lane& other : lanes_)
      if (other.stage != post_.stage()) await(other.stage, {ended_, 0, kind, 0, ""}, [&] { return is_there(other); });
  };
  await_all(MessageKind::kEnd, [&](const Lane& other) { return other.compared >= ended_; });
  post_.send_finished();
  await_all(MessageKind::kFinished, [&](const Lane& other) { return post_.has_finished(other.stage); });
  for (const Lane& other : lanes_)
    if (!other.aside.empty())
      post_.refuse(str("stage ", other.stage, " has sent ",
                       text_of(in_step(name_of(other.aside.begin()->second.header), first_)), " to stage ",
                       post_.stage(), ", which does not take it", kAdvice));
  flush();
  post_.end_step();
  first_ = ended_ + 1;
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

Letter Mailbox::receive(int stage, const MessageName& name, const at::Tensor& buffer) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  Lane& from = lane(stage);
  const Key key{name.kind, name.micro_batch, name.number};
  const at::Tensor bytes = as_bytes(buffer);
  wanted_ = {.stage = stage, .key = key, .buffer = bytes};
  auto found = from.aside.end();
  if (is_forward(name.kind))
    await(stage, name, [&] { return !from.forward.empty(); });
  else
    await(stage, name, [&] { return (found = from.aside.find(key)) != from.aside.end(); });
  wanted_.reset();
  Letter letter;
  if (is_forward(name.kind)) {
    letter = std::move(from.forward.front());
    from.forward.pop_front();
  } else {
    letter = std::move(found->second);
    from.aside.erase(found);
  }
  const Header& came = letter.header;
  const auto here = [&] { return wait_text(post_.stage(), in_step(name, first_), stage); };
  if (is_forward(name.kind) && (Key{came.kind, came.micro_batch, came.number} != key ||
                                came.position != name.position || !came.has_op(name.op))) {
    const std::string of_it = came.kind == MessageKind::kEnd ? str("ended micro-batch ", came.micro_batch - first_,
                                                                   " after ", came.position, " operators")
                                                             : str("sent ", text_of(in_step(name_of(came), first_)));
    diverge(from, std::min(name.micro_batch, came.micro_batch), str(here(), "; stage ", stage, " has ", of_it));
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

at::Tensor Mailbox::take_gradient(int stage, int64_t micro_batch, int64_t number, at::IntArrayRef sizes,
                                  at::ScalarType dtype) {
  const WithoutInterception own_operators;
  const MessageName name{micro_batch, number, MessageKind::kGradient, 0, ""};
  const Letter letter = receive(stage, name, {});
  if (letter.header.kind == MessageKind::kNoGradient) return {};
  const auto strides = lane(stage).aside.extract(Key{MessageKind::kStrides, micro_batch, number});
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

/// The buffer of the take that waits, where this is its message.
at::Tensor Mailbox::room(int stage, const Header& header) {
  const Key key{header.kind, header.micro_batch, header.number};
  const bool is_it = wanted_ && wanted_->stage == stage && wanted_->key == key && wanted_->buffer.defined() &&
                     wanted_->buffer.numel() == header.bytes &&
                     wanted_->buffer.device().is_cpu() == !header.is_on_device;
  return is_it ? wanted_->buffer : at::Tensor();
}

void Mailbox::read(int stage, Letter letter) {
  Lane& from = lane(stage);
  const Header& header = letter.header;
  from.waiting.reset();  // what it waited for has come
  if (header.kind == MessageKind::kWaiting) {
    from.waiting = header;
  } else if (header.kind == MessageKind::kTrace && !is_diverging_) {
    const int64_t micro_batch = header.micro_batch;
    from.aside.emplace(Key{MessageKind::kTrace, micro_batch, 0}, letter);
    const std::string text = text_in(letter.elements);
    diverge(from, micro_batch, text.substr(0, text.find('\0')));
  } else if (!is_forward(header.kind)) {
    const bool is_missing = header.kind == MessageKind::kNoGradient;
    const Key key{is_missing ? MessageKind::kGradient : header.kind, header.micro_batch, header.number};
    from.aside.insert_or_assign(key, std::move(letter));
  } else if (header.micro_batch <= ended_) {
    meet_end(from, header);
  } else {
    from.forward.push_back(std::move(letter));
  }
}

// --- divergence ----------------------------------------------------------------------------------------------------

/// A forward message of a micro-batch that this stage has ended: nothing but the same end may come.
void Mailbox::meet_end(Lane& other, const Header& end) {
  const auto found = records_.find(end.micro_batch);
  if (end.kind != MessageKind::kEnd || found == records_.end())
    diverge(other, end.micro_batch,
            str("stage ", other.stage, " has sent ", text_of(in_step(name_of(end), first_)), " to stage ",
                post_.stage(), ", which has ended micro-batch ", end.micro_batch - first_,
                found != records_.end() ? str(" after ", found->second.trace.size(), " operators") : ""));
  const Record& own = found->second;
  if (end.digest != own.digest || end.position != static_cast<int64_t>(own.trace.size()))
    diverge(other, end.micro_batch, other_operators(post_.stage(), other.stage, end.micro_batch - first_));
  other.compared = end.micro_batch;
  const auto is_past = [&](const Lane& lane) {
    return lane.stage == post_.stage() || lane.compared >= end.micro_batch;
  };
  if (std::ranges::all_of(lanes_, is_past)) records_.erase(found);
}

/// The operators that a stage ran in a micro-batch.
struct Mailbox::Trace {
  const OperatorTrace* operators = nullptr;  // null: it is not known any more, or not yet
  bool is_ended = false;
};

Mailbox::Trace Mailbox::trace_of(int64_t micro_batch) const {
  if (const auto ended = records_.find(micro_batch); ended != records_.end()) return {&ended->second.trace, true};
  return {followed_.first == micro_batch ? followed_.second : nullptr, false};
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
  const auto first_trace = [&] { return other.aside.lower_bound(Key{MessageKind::kTrace, INT64_MIN, 0}); };
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

/// Two stages wait for each other: one is past the operator of which the other one waits for a message, or both are
/// at the same one: it will never be sent.
void Mailbox::check_waiting(const MessageName& name, int from) {
  for (const Lane& other : lanes_) {
    if (!other.waiting) continue;
    MessageName theirs = name_of(*other.waiting);
    theirs.kind = other.waiting->awaited;
    if (other.sent >= std::pair(theirs.micro_batch, theirs.number)) continue;  // it is under way
    const std::pair at{theirs.micro_batch, theirs.position}, here{name.micro_batch, name.position};
    if (at > here || (at == here && other.stage != from)) continue;
    diverge(lane(other.stage), std::min(theirs.micro_batch, name.micro_batch),
            str(wait_text(other.stage, in_step(theirs, first_), post_.stage()),
                ", which has not sent it and waits for ", text_of(in_step(name, first_)), " from stage ", from));
  }
}

/// Waits until `is_there`, which reading what comes changes.
void Mailbox::await(int stage, const MessageName& name, const std::function<bool()>& is_there) {
  post_.begin_step();
  const auto here = [&] { return wait_text(post_.stage(), in_step(name, first_), stage); };
  const auto begun = Clock::now();
  bool has_told = false;
  const auto is_over = [&] {
    if (is_there()) return true;
    if (post_.has_finished(stage))
      post_.refuse(str(here(), ", which has finished the step without sending it", kAdvice));
    const auto waited = Clock::now() - begun;
    if (waited > post_.timeout())
      post_.refuse(str(here(), ", and nothing has come for ",
                       std::chrono::duration_cast<std::chrono::seconds>(waited).count(), " s"),
                   ErrorCode::kTimeout);
    if (waited < kPatience || !is_forward(name.kind) || name.kind == MessageKind::kEnd) return false;
    if (!std::exchange(has_told, true)) {
      Header note{.micro_batch = name.micro_batch,
                  .number = name.number,
                  .position = name.position,
                  .kind = MessageKind::kWaiting,
                  .awaited = name.kind};
      note.set_op(name.op);
      post_.send(stage, note, {});
    }
    check_waiting(name, stage);
    return false;
  };
  try {
    if (post_.wait_until(is_over)) ++waits_[static_cast<size_t>(name.kind)];
  } catch (const CommError& error) {
    wanted_.reset();
    if (error.code() == ErrorCode::kDiverged || error.code() == ErrorCode::kTimeout) throw;
    throw CommError(error.code(), str(here(), ": ", error.what()));
  } catch (...) {
    wanted_.reset();
    throw;
  }
}

}  // namespace trireme::ownership
