// The pass that runs each operator on the stage that owns its parameters.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ownership/cut_tensors.h"
#include "ownership/exchange.h"
#include "ownership/homes.h"
#include "ownership/micro_batch.h"
#include "ownership/sizes.h"
#include "trireme/intercept.h"
#include "trireme/operators/row.h"
#include "trireme/ownership/ownership.h"

namespace trireme::ownership {

/// Runs operators for the micro-batch whose forward pass this thread runs; without one, operators pass through.
class OwnershipPass final : public Pass {
 public:
  OwnershipPass(int stage, int stages, c10::Device device, Mailbox& mailbox)
      : stage_(stage), stages_(stages), device_(device), exchange_(stage, stages, mailbox), calls_(device) {}

  PassOrder order() const override { return PassOrder::kOwnership; }
  void run(OperatorCall& call, Next next) override;

  Homes& homes() { return homes_; }
  /// Ranks share layers from now on.
  void set_cuts(CutActivations& cuts) { exchange_.set(&cut_.emplace(cuts)); }
  /// Null: they do not.
  CutTensors* cut() { return cut_ ? &*cut_ : nullptr; }
  /// Exchange::whole_here().
  at::Tensor whole(const at::Tensor& tensor) { return exchange_.whole_here(tensor); }
  /// Between forward passes this thread runs a backward pass of theirs, or does not.
  void set_backward(bool is_backward) { is_backward_ = is_backward; }
  /// Until leave(), what has no parameters is computed on `stage`.
  void enter(int stage) { entered_.push_back(stage); }
  void leave() {
    if (!entered_.empty()) entered_.pop_back();
  }
  /// The micro-batch whose operators run, and the stages of the modules around the operator.
  struct Running {
    MicroBatch* micro_batch = nullptr;
    std::vector<int> entered = {};
    std::optional<int> forced = {};
  };
  /// Runs what is given from here on; returns what ran.
  Running exchange(Running running) {
    std::swap(current_, running.micro_batch);
    std::swap(entered_, running.entered);
    std::swap(forced_, running.forced);
    exchange_.set(current_);
    return running;
  }
  Running running() const { return {current_, entered_, forced_}; }
  SeenCalls& calls() { return calls_; }
  /// `tensor` on `stage`; see Ownership::move().
  at::Tensor move(const at::Tensor& tensor, int stage);
  OwnershipCounters counters() const {
    OwnershipCounters counters = counters_;
    counters.told = exchange_.heard();
    counters.spared = calls_.spared();
    return counters;
  }

 private:
  /// A tensor that an operator got in place of one of the program's.
  struct Replaced {
    size_t argument, item;
    at::Tensor original, used;
    bool is_received = false;
  };
  using Replacements = c10::SmallVector<Replaced, 2>;
  void check_second_run(const OperatorCall& call);
  void seed(OperatorCall& call, const OperatorFacts& facts);
  const OperatorFacts& facts_of(const OperatorCall& call);
  bool tells_each(const OperatorFacts& facts, const OperatorCall& call) const;
  Home born(const Home& home) const;

  void run_replicated(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed, const Next& next);
  void run_own(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed, const Home& home,
               const Next& next);
  bool are_here(const OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed);
  Replacements bring(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed, bool uses,
                     const Next& next);
  bool is_view(const OperatorCall& call, const OperatorFacts& facts, const ToldCall* known, const Next& next);
  static std::vector<at::Tensor> originals_of(c10::ArrayRef<c10::IValue> arguments, const Replacements& replaced);
  void follow(const OperatorCall& call, const ToldCall& told, const std::vector<at::Tensor>& views_of,
              torch::jit::Stack stack);
  static void give_back(OperatorCall& call, const Replacements& replaced);
  void view_originals(const Next& next, OperatorCall& call, const ToldCall& told, const Replacements& replaced,
                      std::vector<c10::IValue> arguments);
  void note_results(c10::ArrayRef<c10::IValue> results, const ToldCall& told, const Home& home);
  void take_written(const OperatorFacts& facts, const c10::OperatorHandle& op, c10::ArrayRef<c10::IValue> arguments,
                    const Home& home);

  void run_remote(OperatorCall& call, const OperatorFacts& facts, const HomedArguments& homed, const Home& home,
                  const Next& next);
  static void note_writes(const OperatorFacts& facts, const ToldCall& told, c10::ArrayRef<c10::IValue> arguments,
                          const std::vector<at::Tensor>& tensors);
  void make_results(OperatorCall& call, const ToldCall& told, const std::vector<at::Tensor>& arguments,
                    const Home& home);
  static void refuse_mixed(const OperatorFacts& facts, const ToldCall& told);

  const int stage_;
  const int stages_;
  const c10::Device device_;
  Exchange exchange_;
  std::optional<CutTensors> cut_;
  Homes homes_;
  SeenCalls calls_;
  ToldCalls told_;
  ska::flat_hash_map<c10::OperatorHandle, std::unique_ptr<const OperatorFacts>> facts_;
  OperatorRows rows_;
  MicroBatch* current_ = nullptr;
  bool is_backward_ = false;
  std::vector<int> entered_;   ///< stages of the modules around the operator
  std::optional<int> forced_;  ///< the home of the call that move() makes
  OwnershipCounters counters_;
};

}  // namespace trireme::ownership
