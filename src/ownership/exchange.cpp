#include "ownership/exchange.h"

#include <cstring>
#include <string>

#include "ownership/wire.h"
#include "trireme/activations/part_tensor.h"
#include "trireme/base/error.h"

namespace trireme::ownership {
namespace {

/// A number that a program reads: a kind, and 16 bytes; of a text these are its length, and it follows.
std::string bytes_of_values(c10::ArrayRef<c10::IValue> values) {
  std::string bytes;
  for (const c10::IValue& value : values) {
    char kind = 0;
    double parts[2] = {0, 0};
    if (value.isBool()) {
      kind = 'b';
      parts[0] = value.toBool();
    } else if (value.isInt()) {
      kind = 'i';
      const int64_t number = value.toInt();
      std::memcpy(parts, &number, sizeof number);
    } else if (value.isDouble()) {
      kind = 'd';
      parts[0] = value.toDouble();
    } else if (value.isComplexDouble()) {
      kind = 'c';
      parts[0] = value.toComplexDouble().real();
      parts[1] = value.toComplexDouble().imag();
    } else if (value.isString()) {
      kind = 's';
      const auto size = static_cast<int64_t>(value.toStringRef().size());
      std::memcpy(parts, &size, sizeof size);
    } else {
      throw Error(ErrorCode::kUnsupported, "smp: a value of type " + value.tagKind() + " is read of another stage");
    }
    bytes += kind;
    bytes.append(reinterpret_cast<const char*>(parts), sizeof parts);
    if (value.isString()) bytes += value.toStringRef();
  }
  return bytes;
}

std::vector<c10::IValue> values_from(const std::string& bytes) {
  std::vector<c10::IValue> values;
  constexpr size_t kEach = 1 + 2 * sizeof(double);
  for (size_t place = 0; place + kEach <= bytes.size(); place += kEach) {
    double parts[2];
    std::memcpy(parts, bytes.data() + place + 1, sizeof parts);
    int64_t number = 0;
    std::memcpy(&number, parts, sizeof number);
    switch (bytes[place]) {
      case 'b':
        values.emplace_back(parts[0] != 0);
        break;
      case 'i':
        values.emplace_back(number);
        break;
      case 'd':
        values.emplace_back(parts[0]);
        break;
      case 's':
        values.emplace_back(bytes.substr(place + kEach, static_cast<size_t>(number)));
        place += static_cast<size_t>(number);
        break;
      default:
        values.emplace_back(c10::complex<double>(parts[0], parts[1]));
    }
  }
  return values;
}

}  // namespace

at::Tensor Exchange::use(OperatorCall& call, const OperatorFacts& facts, const at::Tensor& tensor, int home, int stage,
                         const Next& next) {
  MicroBatch& now = *now_;
  if (now.replay) return stage == stage_ && home != stage_ ? now.replay->value(facts) : at::Tensor();
  if (home == stage && !now.transfers.has_any()) return {};
  const bool needs = needs_gradient(tensor);
  const auto [entry, brings_data, from] = now.transfers.use(tensor, home, stage, stages_, needs);
  if (entry == nullptr) return {};
  now.must_run();
  const bool is_home = home == stage_, is_user = stage == stage_;
  const bool has_whole = entry->whole.defined() && (entry->whole.requires_grad() || !needs);
  if (is_home && cut_ != nullptr && !has_whole && (brings_data || from == stage_))
    entry->whole = next.run(call, [&] { return whole_here(tensor); });
  const at::Tensor& own = entry->whole.defined() ? entry->whole : tensor;
  // An earlier stage waits for a later one's forward pass, also where a small parameter travels.
  if (brings_data && home > stage) now.come_back(facts, home, stage);
  if (brings_data) cross(home, stage);
  if (brings_data && is_home) {
    const MessageName value = name(MessageKind::kValue, ++now.sent[stage], facts);
    next.run(call, [&] { mailbox_.send(stage, value, packed(own, cut_ != nullptr)); });
  }
  if (brings_data && is_user) {
    const Room room = make_room(tensor, cut_ != nullptr);
    mailbox_.take(home, name(MessageKind::kValue, ++now.received[home], facts), room.buffer);
    entry->data = filled(room);
  }
  if (from >= 0) cross(from, stage);
  if (from == stage_) {
    const TransferId id{.stage = stage, .number = ++now.sent[stage]};
    now.pieces.sent(is_home ? own : entry->used_as, id);
    now.gradient_sizes.emplace(id, MicroBatch::Sizes{own.sizes().vec(), tensor.scalar_type()});
  }
  if (from >= 0 && is_user) {
    const TransferId id{.stage = from, .number = ++now.received[from]};
    if (is_home && cut_ != nullptr && cut_->is_part(tensor))
      now.gradients_of_parts.emplace(id, cut_->whole_of_gradient(tensor));
    if (is_home)
      now.pieces.received_back(local_of(tensor), id);
    else
      entry->used_as = now.pieces.received(entry->data, id);
  }
  if (is_home || !is_user) return {};
  now.keep(Region::Value{.data = entry->data, .needs_gradient = needs});
  return needs ? entry->used_as : entry->data;
}

at::Tensor Exchange::whole_here(const at::Tensor& tensor) {
  if (cut_ == nullptr || !cut_->is_part(tensor)) return tensor;
  return cut_->whole(now_->pieces.part_here(tensor));
}

/// Something goes from one stage to another. A turn that begins by it is a piece of the graph, too.
void Exchange::cross(int from, int to) {
  const bool begins = now_->turns.message(from, to);
  if (from == stage_) now_->pieces.note_sent();
  if (to != stage_) return;
  if (begins && mailbox_.turns() != nullptr) mailbox_.turns()->begin_turn();
  now_->pieces.begin_receive();
}

void Exchange::cross_to_all(int from) {
  now_->shown.reads_values = true;
  for (int stage = 0; stage < stages_; ++stage)
    if (stage != from) cross(from, stage);
}

void Exchange::tell(const OperatorFacts& facts, const Key* key, const ToldCall& told) {
  if (now_->replay) return;
  const std::string bytes = bytes_of(told);
  if (key != nullptr) return mailbox_.send_told(now_->number, *key, facts.name, bytes);
  cross_to_all(stage_);
  for (int stage = 0; stage < stages_; ++stage)
    if (stage != stage_) mailbox_.send_bytes(stage, name(MessageKind::kTold, ++now_->sent[stage], facts), bytes);
}

ToldCall Exchange::hear(const OperatorFacts& facts, const Key* key, int from) {
  if (now_->replay) return now_->replay->told(facts);
  ++told_;
  now_->must_run();
  if (key != nullptr) return told_from(mailbox_.take_told(from, *key, name(MessageKind::kToldOnce, 0, facts)));
  cross_to_all(from);
  ToldCall told = told_from(mailbox_.take_bytes(from, name(MessageKind::kTold, ++now_->received[from], facts)));
  now_->keep(told);
  return told;
}

void Exchange::tell_values(const OperatorFacts& facts, c10::ArrayRef<c10::IValue> results) {
  if (now_->replay) return;
  cross_to_all(stage_);
  const std::string bytes = bytes_of_values(results);
  for (int stage = 0; stage < stages_; ++stage)
    if (stage != stage_) mailbox_.send_bytes(stage, name(MessageKind::kScalar, ++now_->sent[stage], facts), bytes);
}

std::vector<c10::IValue> Exchange::hear_values(const OperatorFacts& facts, int from) {
  if (now_->replay) return now_->replay->numbers(facts);
  now_->must_run();
  cross_to_all(from);
  const MessageName numbers = name(MessageKind::kScalar, ++now_->received[from], facts);
  Region::Numbers values = values_from(mailbox_.take_bytes(from, numbers));
  now_->keep(values);
  return values;
}

MessageName Exchange::name(MessageKind kind, int64_t number, const OperatorFacts& facts) const {
  return {
      .micro_batch = now_->number, .number = number, .kind = kind, .position = now_->place.position, .op = facts.name};
}

}  // namespace trireme::ownership
