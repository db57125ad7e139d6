// A step in which forward passes take turns on a stage, by a schedule of visits.
//
// The main idea: a stage's forward pass of a micro-batch ends a turn where it would have to wait for a later stage. The
// schedule says which turn, or which piece of a backward pass, comes next; each forward pass runs in a thread that
// stops there. Passes whose turns are others than the schedule knows (control flow by values, new sizes) stay behind
// and go on when what they need has come. Where all stages wait for each other, the schedule is left: every stage ends
// one micro-batch after the other, which is an order for any program.
#pragma once

#include <c10/core/Device.h>

#include <functional>
#include <limits>
#include <memory>
#include <vector>

#include "pipeline/micro_batch_thread.h"
#include "trireme/ownership/ownership.h"
#include "trireme/schedule/schedule.h"

namespace trireme {

/// The work of a step with its micro-batches.
struct MicroBatchWork {
  std::function<void(int micro_batch)> forward;  ///< on a thread of its own
  /// After its forward: the pieces of its backward pass; 0: it has none.
  std::function<int(int micro_batch)> pieces;
  std::function<void(int micro_batch, int piece)> backward;
};

/// One step of a stage.
class StepTurns final : public ForwardTurns {
 public:
  using Threads = std::vector<std::unique_ptr<MicroBatchThread>>;
  /// All outlive this. `threads`: of earlier steps, or none; more are added. `in_order`: forward passes write what
  /// outlives them, so that none goes before an earlier one that stays behind for new sizes.
  StepTurns(Ownership& ownership, const pipeline::Schedule& schedule, c10::Device device, const MicroBatchWork& work,
            Threads& threads, bool in_order);
  ~StepTurns() override;

  void run();
  /// Ends all forward passes.
  void give_up();
  /// An interrupted forward pass runs on, in a thread that still uses this and `ownership`.
  bool has_left() const;

  void begin_turn() override;
  bool await(const ownership::Wait& wait) override;
  bool meanwhile() override;

 private:
  static constexpr int kAllTurns = std::numeric_limits<int>::max();
  struct Pass {
    MicroBatchThread* thread = nullptr;  ///< while it runs
    bool has_begun = false, has_ended = false;
    int turns = 0;                          ///< that it has ended
    int due = 0;                            ///< turns that it should have ended by now
    const ownership::Wait* wait = nullptr;  ///< it has stopped for a message
    bool is_awaited = false;                ///< the stage waits for just that
    int pieces = -1;                        ///< of its backward pass that are left; -1: not known yet
  };

  /// The messages for which go() waits.
  enum class Waits { kNone, kPlanned, kAll };

  void follow_schedule();
  void backward(int micro_batch, int chunk);
  bool go(int micro_batch, Waits waits);
  bool is_there(Pass& pass, Waits waits);
  bool is_off_plan(const Pass& pass) const;
  void go_once(int micro_batch);
  bool let_others_go();
  void complete(int micro_batch);
  void stop(MicroBatchThread::Stop why);

  Ownership& ownership_;
  const pipeline::Schedule& schedule_;
  const c10::Device device_;
  const MicroBatchWork& work_;
  Threads& threads_;
  const bool in_order_;
  const int planned_;         ///< turns of a forward pass here
  std::vector<Pass> passes_;  ///< by micro-batch
  int running_ = -1;          ///< the micro-batch whose forward pass runs now
  int going_back_ = 0;        ///< the micro-batch whose backward pass runs now
  bool is_completing_ = false;
};

}  // namespace trireme
