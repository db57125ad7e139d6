#include "ownership/micro_batch.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/mix64.h"

namespace trireme::ownership {

void MicroBatch::visit(const OperatorFacts& facts, int stage) {
  for (OpenCall& call : calls)
    if (call.visitor == nullptr) call.visitor = &facts;
  std::vector<int>& visits = shown.visits;
  if (!visits.empty() && visits.back() == stage) return;
  if (!visits.empty() && visits.back() > stage) come_back(facts, visits.back(), stage);
  visits.push_back(stage);
}

void MicroBatch::come_back(const OperatorFacts& facts, int from, int to) {
  if (order == ForwardOrder::kAhead)
    throw StateError(str("smp: ", facts.name, " of micro-batch ", number_in_step, " is computed on stage ", to,
                         " and needs stage ", from,
                         " before, which no micro-batch has needed so far, so that stages run "
                         "ahead of each other; write \"pipeline\": \"sequential\" for a program that comes back to a "
                         "stage now and then"));
  shown.comes_back = true;
}

void MicroBatch::touch(const OperatorFacts& facts, const HomedArgument& one, bool is_written) {
  if (one.home.born >> 32 == static_cast<uint64_t>(number + 1) || (one.home.is_parameter && !is_written)) return;
  if (is_written || one.home.born != 0) must_run();
  for (OpenCall& call : calls)
    if (call.stands)
      call.older.push_back({.tensor = decltype(OlderTensor::tensor)(one.tensor->getIntrusivePtr()),
                            .requires_grad = one.tensor->requires_grad(),
                            .touched_by = &facts});
  const c10::StorageImpl* const storage = storage_of(*one.tensor);
  const int turn = turns.number(one.home.stage);
  Lasting& lasting = this->lasting.try_emplace(storage, Lasting{turn}).first->second;
  lasting.is_written = lasting.is_written || is_written;
  shown.writes_lasting = shown.writes_lasting || is_written;
  const bool is_of_another = one.home.born != 0;
  shown.carries_state = shown.carries_state || is_of_another || (turn != lasting.turn && lasting.is_written);
  if (order != ForwardOrder::kTurns) return;
  bool is_late = is_of_another;
  if (of_all != nullptr && one.home.stage == own_stage) {
    LastingUse& use = (*of_all)[storage];
    is_late = is_late || use.writer > number || (is_written && use.reader > number);
    (is_written ? use.writer : use.reader) = number;
  }
  if (is_late)
    throw StateError(str("smp: ", facts.name, " of micro-batch ", number_in_step, " uses a tensor of sizes ",
                         one.tensor->sizes(), " of stage ", one.home.stage, " that ",
                         is_of_another ? "another micro-batch has computed" : "a later micro-batch has used before it",
                         ", as micro-batches take turns; write \"pipeline\": \"sequential\" for a program that keeps "
                         "such tensors"));
}

bool MicroBatch::is_in_region() const {
  return std::ranges::any_of(regions, [](const auto& region) { return region->is_open; });
}

void MicroBatch::write_twice(const OperatorFacts& facts) {
  if (order != ForwardOrder::kOneByOne)
    throw StateError(str("smp: torch.utils.checkpoint: ", facts.name, " of micro-batch ", number_in_step,
                         " writes a tensor that outlives the micro-batch, which no function that runs again has done "
                         "so far, so that stages run ahead of each other, and the second run would write it at another "
                         "time than in one process; write \"pipeline\": \"sequential\" for a program that begins to "
                         "do so later"));
  shown.writes_twice = true;
}

void MicroBatch::note(const OperatorFacts& facts, const Key& key, int stage) {
  const uint64_t of_call = mix64(key.first + static_cast<uint64_t>(stage + 1));
  if (replay) return replay->follow(facts, of_call);
  note(facts.name, of_call);
}

void MicroBatch::note(const std::string& name, uint64_t of_call) {
  digest = mix64(digest ^ of_call);
  trace.emplace_back(&name, of_call);
  for (const auto& region : regions)
    if (region->is_open && is_compared(name)) region->operators.emplace_back(&name, of_call);
}

}  // namespace trireme::ownership
