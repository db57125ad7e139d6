#include "comm/fabric/step_runner.h"

#include "comm/group_state.h"

namespace trireme::comm {

StepRunner::StepRunner(Fabric& fabric) : fabric_(fabric), slots_(static_cast<size_t>(fabric.place().size)) {}

bool StepRunner::slot_is_free(int64_t step, int peer) const {
  return fabric_.control(peer).done.load(std::memory_order_acquire) + kSlots > step;
}

bool StepRunner::try_post(const Job& job) {
  for (int peer = 0; peer < fabric_.place().size; ++peer)
    if (peer != fabric_.place().rank && !slot_is_free(job.first_step, peer)) return false;
  post(job, 0);
  return true;
}

void StepRunner::post(const Job& job, int64_t index) {
  RankControl& own = fabric_.own();
  const int64_t step = job.first_step + index;
  if (index == 0) {
    own.calls[job.call.seq % kCallRecords].write(job.call);
    own.started.store(job.call.seq, std::memory_order_release);
  }
  job.algorithm.post(index, fabric_.slot(fabric_.place().rank, step));
  own.posted.store(step + 1, std::memory_order_release);
  fabric_.notify();
}

void StepRunner::run(const Job& job, bool posted, Patience patience) {
  RankControl& own = fabric_.own();
  const Place& place = fabric_.place();
  const std::function<std::string()> what = [&job] { return describe(job.call); };
  const int64_t steps = job.algorithm.steps();
  for (int64_t index = 0; index < steps; ++index) {
    const int64_t step = job.first_step + index;
    if (index > 0 || !posted) {
      for (int peer = 0; peer < place.size; ++peer)
        if (peer != place.rank)
          fabric_.wait([&] { return slot_is_free(step, peer); }, {peer, patience, what, &job.call});
      post(job, index);
    }
    wait_for_peers(job, index, patience);
    if (index == 0) compare_calls(job.call);
    for (int rank = 0; rank < place.size; ++rank) slots_[static_cast<size_t>(rank)] = fabric_.slot(rank, step);
    job.algorithm.read(index, slots_);
    own.done.store(step + 1, std::memory_order_release);
    fabric_.notify();
  }
  own.finished.store(job.call.seq, std::memory_order_release);
}

void StepRunner::wait_for_peers(const Job& job, int64_t index, Patience patience) {
  const std::function<std::string()> what = [&job] { return describe(job.call); };
  const int64_t step = job.first_step + index;
  for (int peer = 0; peer < fabric_.place().size; ++peer) {
    if (peer == fabric_.place().rank || (index > 0 && !job.algorithm.reads(peer))) continue;
    RankControl& control = fabric_.control(peer);
    fabric_.wait([&] { return control.posted.load(std::memory_order_acquire) > step; },
                 {peer, patience, what, &job.call});
  }
}

void StepRunner::compare_calls(const Call& call) const {
  for (int peer = 0; peer < fabric_.place().size; ++peer) {
    const Call other = fabric_.control(peer).calls[call.seq % kCallRecords].read();
    if (other.same_as(call)) continue;
    throw PeerError(ErrorCode::kDiverged,
                    describe_mismatch(fabric_.info(), {fabric_.place().rank, call}, {peer, other}), peer);
  }
}

}  // namespace trireme::comm
