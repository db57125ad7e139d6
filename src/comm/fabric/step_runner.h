// Drives an Algorithm through its steps: who waits for whom, and that all ranks called the same.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/fabric/algorithm.h"
#include "comm/fabric/fabric.h"

namespace trireme::comm {

class StepRunner {
 public:
  explicit StepRunner(Fabric& fabric);

  struct Job {
    const Call& call;
    Algorithm& algorithm;
    int64_t first_step;  ///< of the group's life
  };
  /// Posts the first step if that needs no waiting.
  bool try_post(const Job& job);
  /// The whole job; `posted` says whether its first step is posted already.
  /// Throws CommError: a peer is gone, late, or in another call.
  void run(const Job& job, bool posted, Patience patience);

 private:
  bool slot_is_free(int64_t step, int peer) const;
  void post(const Job& job, int64_t index);
  void wait_for_peers(const Job& job, int64_t index, Patience patience);
  void compare_calls(const Call& call) const;

  Fabric& fabric_;
  std::vector<const std::byte*> slots_;  // of the step at hand, by rank
};

}  // namespace trireme::comm
