#include "ownership/waiting.h"

#include <algorithm>

namespace trireme::ownership {

MessageName message_of(const Header& header) {
  return {header.micro_batch, header.number, header.kind, header.position, header.op};
}

AsideKey aside_key(const MessageName& name) {
  return {name.kind == MessageKind::kNoGradient ? MessageKind::kGradient : name.kind, name.micro_batch, name.number};
}

void Waiting::sent(int stage, const MessageName& name) {
  if (is_forward(name.kind))
    stages_[stage].sent[name.micro_batch] = name.number;
  else
    stages_[stage].sent_aside.insert(aside_key(name));
}

void Waiting::tell(int from, const MessageName& name, const Key& key) {
  const bool has_key = name.kind == MessageKind::kToldOnce;
  Header note{.micro_batch = name.micro_batch,
              .number = has_key ? static_cast<int64_t>(key.first) : name.number,
              .position = name.position,
              .digest = key.second,
              .kind = MessageKind::kWaiting,
              .awaited = name.kind,
              .awaited_from = from};
  note.set_op(name.op);
  post_.send_to_all(note);
}

void Waiting::tell_end() { post_.send_to_all({.kind = MessageKind::kWaiting}); }

void Waiting::heard(int stage, const Header& header) {
  stages_[stage].waits.reset();
  if (header.kind == MessageKind::kWaiting && header.awaited_from >= 0) stages_[stage].waits = header;
}

std::vector<std::pair<int, MessageName>> Waiting::wanted() const {
  std::vector<std::pair<int, MessageName>> wanted;
  for (int stage = 0; stage < post_.size(); ++stage) {
    if (stage == post_.stage() || !waits_for_this(stages_[stage])) continue;
    wanted.emplace_back(stage, message_of(*stages_[stage].waits));
    wanted.back().second.kind = stages_[stage].waits->awaited;
  }
  return wanted;
}

bool Waiting::is_under_way(const Stage& to, const Header& wanted) const {
  if (wanted.awaited == MessageKind::kToldOnce)
    return told_.contains({static_cast<uint64_t>(wanted.number), wanted.digest});
  if (!is_forward(wanted.awaited)) return to.sent_aside.contains({wanted.awaited, wanted.micro_batch, wanted.number});
  const auto sent = to.sent.find(wanted.micro_batch);
  return sent != to.sent.end() && sent->second >= wanted.number;
}

bool Waiting::do_all_wait() const {
  for (int stage = 0; stage < post_.size(); ++stage) {
    if (stage == post_.stage() || post_.has_finished(stage)) continue;
    const Stage& other = stages_[stage];
    if (!other.waits || (other.waits->awaited_from == post_.stage() && !waits_for_this(other))) return false;
  }
  return true;
}

void Waiting::end_step() { std::ranges::fill(stages_, Stage()); }

}  // namespace trireme::ownership
