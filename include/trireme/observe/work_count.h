// The multiply-adds of a model, by the calls of modules in which its operators run: forward, backward and recomputed.
//
// The main idea: a pass at the end of the chain sees each operator as this rank runs it, so that it counts slices of
// layers, of samples and of tokens, and nothing that another rank computes. Forward, an operator belongs to the calls
// of modules that are open. Backward, it belongs to those that were open when autograd recorded the node that runs: a
// node's number tells that, since numbers grow. While no count runs, nothing of this is there.
#pragma once

#include <torch/csrc/autograd/function.h>

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "trireme/intercept.h"
#include "trireme/operators/multiply_adds.h"

namespace trireme {

/// Multiply-adds.
struct WorkSums {
  int64_t forward = 0;
  int64_t backward = 0;    ///< of gradients
  int64_t recomputed = 0;  ///< of modules that are called again in backward (activation checkpointing)
};

/// A module that is called by another one: a place in the tree of calls.
struct WorkCall {
  int caller = -1;      ///< its place; -1: of the root
  int64_t module = -1;  ///< as enter() got it; -1: the root, outside of every module
  int64_t calls = 0;    ///< forward
  double seconds = 0;   ///< of its forward calls, those of modules inside included
  WorkSums sums = {};   ///< of its own operators, those of modules inside not included
};

/// Counts from start() to stop(), on the thread that calls these and on autograd's.
class WorkCount final : public Pass {
 public:
  WorkCount();
  ~WorkCount() override;
  WorkCount(const WorkCount&) = delete;
  WorkCount& operator=(const WorkCount&) = delete;

  /// Forgets what was counted. Ordering  not between enter() and leave().
  void reset();
  /// Throws    StateError: it counts already.
  void start();
  /// Throws    StateError: start() was called on another thread.
  void stop();
  bool is_running() const { return scope_ != nullptr; }

  /// A call of a module begins, and ends; modules have any numbers >= 0. leave() ends calls inside of it, too, that an
  /// exception has left.
  void enter(int64_t module);
  void leave(int64_t module);

  /// The tree; the first is the root, and callers come before what they call.
  std::vector<WorkCall> calls() const;
  /// Operators that ran and are Work::kUnknown, or of tensors that tell no sizes, and how often.
  std::unordered_map<std::string, int64_t> uncounted() const;

  /// Behind all others: of its order those that are open already come first.
  PassOrder order() const override { return PassOrder::kTouch; }
  void run(OperatorCall& call, Next next) override;

 private:
  using Clock = std::chrono::steady_clock;
  struct Frame {
    int call;
    const void* node;  // of autograd, in which it was entered; null: forward
    Clock::time_point begin;
  };
  /// From this number on, autograd's nodes of a thread belong to `call`.
  struct Change {
    uint64_t number;
    int call;
  };
  struct Thread {
    std::vector<Frame> open;
    std::vector<Change> changes;
  };
  int called(int caller, int64_t module);
  int caller_of(const Thread& thread, const torch::autograd::Node* node, int64_t module) const;
  int recorded_in(const torch::autograd::Node& node) const;
  void add(int64_t made);
  void note_change(Thread& thread);

  std::unique_ptr<InterceptScope> scope_;
  std::thread::id runs_on_;

  mutable std::mutex mutex_;
  std::vector<WorkCall> calls_;
  std::map<std::pair<int, int64_t>, int> places_;  // by caller and module
  std::unordered_map<uint64_t, Thread> threads_;   // by libtorch's number of it
  std::unordered_map<std::string, int64_t> uncounted_;
  std::unordered_map<c10::OperatorHandle, Work> known_;
};

}  // namespace trireme
