#include "ownership/micro_batch.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/base/mix64.h"

namespace trireme::ownership {

void MicroBatch::visit(const OperatorFacts& facts, int stage) {
  if (!visits.empty() && visits.back() == stage) return;
  if (!visits.empty() && visits.back() > stage) come_back(facts, visits.back(), stage);
  visits.push_back(stage);
}

void MicroBatch::come_back(const OperatorFacts& facts, int from, int to) {
  if (stays_ahead)
    throw StateError(str("smp: ", facts.name, " of micro-batch ", number_in_step, " is computed on stage ", to,
                         " and needs stage ", from,
                         " before, which no micro-batch has needed so far, so that stages run "
                         "ahead of each other; write \"pipeline\": \"sequential\" for a program that comes back to a "
                         "stage now and then"));
  comes_back = true;
}

bool MicroBatch::is_in_region() const {
  return std::ranges::any_of(regions, [](const auto& region) { return region->is_open; });
}

void MicroBatch::write_twice(const OperatorFacts& facts) {
  if (stays_ahead)
    throw StateError(str("smp: torch.utils.checkpoint: ", facts.name, " of micro-batch ", number_in_step,
                         " writes a tensor that outlives the micro-batch, which no function that runs again has done "
                         "so far, so that stages run ahead of each other, and the second run would write it at another "
                         "time than in one process; write \"pipeline\": \"sequential\" for a program that begins to "
                         "do so later"));
  writes_twice = true;
}

void MicroBatch::note(const OperatorFacts& facts, const Key& key, int stage) {
  const uint64_t of_call = mix64(key.first + static_cast<uint64_t>(stage + 1));
  if (replay) return replay->follow(facts, of_call);
  digest = mix64(digest ^ of_call);
  trace.emplace_back(&facts.name, of_call);
  for (const auto& region : regions)
    if (region->is_open && is_compared(facts)) region->operators.emplace_back(&facts.name, of_call);
}

}  // namespace trireme::ownership
