// Stages that own parts of an unmodified model: every stage runs the same program, an operator runs on the stage that
// has its parameters, and the others get a tensor of its sizes without memory.
//
//   Ownership ownership(stages, device);
//   for (each parameter and persistent buffer) ownership.own(tensor, its stage, its name);
//   auto micro_batch = ownership.begin(number, seed);
//   {
//     const Ownership::Scope forward(ownership, *micro_batch);
//     const at::Tensor loss = …;  // any program that uses the parameters
//     ownership.backward(loss);   // notes the root
//     ownership.end_forward({loss});
//   }
//   for (int piece = ownership.pieces(*micro_batch) - 1; piece >= 0; --piece) {
//     auto roots = ownership.receive_gradients(*micro_batch, piece);
//     (a backward pass from roots)
//     ownership.send_gradients(*micro_batch, piece);
//   }
//
// Inside of a scope a program may do with any tensor what operators do; values that it reads (item()) come from the
// stage that has them. See docs/ownership.md.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "trireme/activations/cut_activations.h"
#include "trireme/comm/group.h"
#include "trireme/ownership/home.h"

namespace trireme {

namespace ownership {
struct MicroBatch;
struct Region;
struct Wait;
}  // namespace ownership

/// How the forward passes of a step follow each other.
enum class ForwardOrder : uint8_t {
  kOneByOne,  ///< each ends, on all stages, before the next one begins: right for any program
  kAhead,     ///< stages run ahead of each other, each a whole pass at a time: a later stage is never waited for
  kTurns,     ///< on a stage passes take turns, so that none may need what another one writes
};

/// The program as a forward pass has shown it, the same on every stage.
struct ForwardFacts {
  std::vector<int> visits = {};  ///< the stages that ran operators, in program order
  bool comes_back = false;       ///< a stage needed something of a later one, numbers that the program reads aside
  std::vector<int> turns = {};   ///< the stages of all turns, each after those that it needs
  /// By turn, where the micro-batch measures: multiply-adds, and as much for elements that are moved.
  std::vector<double> costs = {};
  bool reads_values = false;    ///< or sizes of another stage, on which its turns may depend
  bool writes_lasting = false;  ///< it writes what is older than itself, as batch norm its statistics,
  bool writes_twice = false;    ///< in a region, which a second run writes again
  bool carries_state = false;   ///< it uses what another micro-batch may write in another turn of its stage
};

/// Decides what a rank does while forward passes wait, each of which runs in a thread of its own; one runs at a time.
class ForwardTurns {
 public:
  virtual ~ForwardTurns() = default;
  /// This thread's forward pass is about to receive something after it has sent: its next turn begins.
  virtual void begin_turn() = 0;
  /// This thread's forward pass needs a message that is not there. Returns when it is; false: this thread runs none.
  virtual bool await(const ownership::Wait& wait) = 0;
  /// Called again and again while the rank's own thread waits. Whether it has let something go on.
  virtual bool meanwhile() = 0;
};

/// Counts of this stage since it was made.
struct OwnershipCounters {
  int64_t own = 0;         ///< operators that this stage ran for all
  int64_t remote = 0;      ///< operators that another stage ran
  int64_t replicated = 0;  ///< operators that every stage ran
  int64_t messages = 0;    ///< sent
  int64_t bytes = 0;       ///< sent, without headers
  int64_t told = 0;        ///< waits for sizes
  int64_t spared = 0;      ///< calls of modules for which an earlier one stood
};

/// One per rank, whose operators it sees from then on. Call all methods from the thread that made it.
class Ownership {
  class Impl;

 public:
  /// `stages` has one rank per stage and outlives this. Collective over it.
  Ownership(Group& stages, c10::Device device);
  ~Ownership();
  Ownership(const Ownership&) = delete;
  Ownership& operator=(const Ownership&) = delete;

  int stage() const;
  int stages() const;

  /// `tensor` is `stage`'s from now on: on other stages it loses its memory, and keeps its sizes, its graph and its
  /// place in the module. Call it for the same tensors on every stage. A tensor that needs a gradient is a trained
  /// parameter.
  /// Throws    ConfigError: no such stage, or the tensor is another stage's already.
  void own(const at::Tensor& tensor, int stage, const std::string& name);
  /// Ranks of a stage have parts of its tensors, as `cuts` knows, which outlives this: from now on what leaves a stage
  /// is whole, and stages take the sizes of wholes for those of their tensors. Before own() is called of all tensors,
  /// also of those that were owned before, on every stage.
  void set_cuts(CutActivations& cuts);
  /// Nothing: every stage has it.
  std::optional<Home> home_of(const at::Tensor& tensor) const;

  /// The state of one micro-batch from its forward pass to the end of its backward pass.
  using MicroBatch = ownership::MicroBatch;
  /// `number`: of the micro-batch among all of the run, alike on all stages. `seed`: of its random numbers.
  /// `order`: a StateError ends a forward pass that does what it may not do there. `measures`: ForwardFacts::costs.
  std::shared_ptr<MicroBatch> begin(int64_t number, uint64_t seed, ForwardOrder order = ForwardOrder::kOneByOne,
                                    bool measures = false);
  /// While it lives, operators of this thread are the micro-batch's forward pass.
  class [[nodiscard]] Scope {
   public:
    Scope(Ownership& ownership, MicroBatch& micro_batch);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Ownership& ownership_;
    const MicroBatch& micro_batch_;
  };
  /// While it lives, the scope's forward pass waits, and others may run.
  class [[nodiscard]] Pause {
   public:
    explicit Pause(Ownership& ownership);
    ~Pause();
    Pause(const Pause&) = delete;
    Pause& operator=(const Pause&) = delete;

   private:
    struct State;
    Ownership& ownership_;
    const std::unique_ptr<State> state_;
  };
  /// Forward passes of the step take turns, as `turns` says; null: they do not. Outlives the step.
  void take_turns(ForwardTurns* turns);
  /// A message that a forward pass waits for: whether it has come; whether it brings sizes that no earlier call had,
  /// which the order of turns does not know of.
  bool has_come(const ownership::Wait& wait);
  static bool is_for_new_sizes(const ownership::Wait& wait);
  /// Waits for it in this thread. False: all stages wait for each other (has_stalled()).
  bool await(const ownership::Wait& wait);
  /// Whether all stages have once waited for each other in this step, as forward passes had other turns than the order
  /// of the step knows of. Then every stage ends one micro-batch after the other.
  bool has_stalled() const;

  // Inside of a scope:

  /// Notes `root`, from which backward begins with `gradient` (undefined: 1) where the root's numbers are; `scale` is
  /// applied to it there.
  /// Throws    StateError: it needs no gradient. ShapeError: it needs a `gradient` of its sizes.
  using Scale = std::function<at::Tensor(const at::Tensor&)>;
  void backward(const at::Tensor& root, const at::Tensor& gradient = {}, const Scale& scale = {});
  /// Between enter() and leave(), which nest, operators of activations without parameters run on `stage`: what a module
  /// of that stage does before its first parameter, so that one tensor crosses in place of several.
  void enter(int stage);
  void leave();
  /// Calls of modules that lie wholly on another stage, in the forward pass that runs; they nest.
  class ModuleCalls {
   public:
    struct Begun {
      bool is_open = false;  ///< the module runs, and then end() or drop() ends the call
      int64_t seen = -1;     ///< the number of an earlier call that stands for this one, so that nothing runs; -1: none
      std::vector<at::Tensor> results = {};  ///< of that call, in the order that end() got: made anew
    };
    /// A call on `stage`. `key`: of the module, and of all that it is called with beside the tensors `inputs`. The
    /// program promises that calls alike run the same operators: what the stage runs is compared with what the earlier
    /// call ran, at the end of the micro-batch.
    Begun begin(uint64_t key, int stage, const std::vector<at::Tensor>& inputs);
    /// The number of the call that ends, if it may stand for others; -1: it may not. One that may has used, written and
    /// left nothing but its own, and trained parameters of its stage.
    int64_t end(const std::vector<at::Tensor>& results);
    /// It ends, and stands for none.
    void drop();

   private:
    friend class Ownership;
    explicit ModuleCalls(Impl& impl) : impl_(impl) {}
    Impl& impl_;
  };
  ModuleCalls calls() { return ModuleCalls(*impl_); }
  /// `tensor`, with its numbers on `stage`; itself where it has no home or is there.
  at::Tensor move(const at::Tensor& tensor, int stage);
  /// A copy of `tensor` on the host, with its numbers on every stage; itself where it has no home.
  at::Tensor numbers_of(const at::Tensor& tensor);
  /// A *region*: operators from here to end_region() may run again in the backward pass, in a Replay. Regions nest.
  using Region = ownership::Region;
  std::shared_ptr<Region> begin_region();
  static void end_region(Region& region) noexcept;
  /// The last call of a forward pass: `results` go from their stages to all, where outputs() has them, and the other
  /// stages are told that the pass has ended, with a digest of its operators that they compare with theirs.
  void end_forward(const std::vector<at::Tensor>& results);

  // Afterwards:

  /// While it lives, operators of this thread are a second run of the region, on this stage by itself: they draw the
  /// random numbers of the first run, and what that one got from other stages comes from its journal. It may end before
  /// the region's end.
  /// Throws    StateError: the region has not ended. An operator that the region's first run did not have is one, too.
  class [[nodiscard]] Replay {
   public:
    Replay(Ownership& ownership, const std::shared_ptr<Region>& region);
    ~Replay();
    Replay(const Replay&) = delete;
    Replay& operator=(const Replay&) = delete;

   private:
    struct State;
    Ownership& ownership_;
    const std::unique_ptr<State> state_;
  };
  /// Whether any stage called backward(): all do, or none.
  bool has_root(const MicroBatch& micro_batch) const;
  /// Pieces of the micro-batch's backward pass on this stage; the last one runs first.
  int pieces(const MicroBatch& micro_batch) const;
  struct Roots {
    torch::autograd::edge_list edges;
    std::vector<at::Tensor> gradients;
  };
  /// Waits for the gradients that the piece begins with.
  Roots receive_gradients(MicroBatch& micro_batch, int piece);
  /// Hands on what the piece has computed for other stages.
  void send_gradients(MicroBatch& micro_batch, int piece);
  /// The results of the forward pass, detached, with its numbers on every stage; waits for it.
  std::vector<at::Tensor> outputs(MicroBatch& micro_batch);
  ForwardFacts facts(const MicroBatch& micro_batch) const;
  /// In a forward pass: it has changed `what`, which outlives it and of which nothing is known here, as an attribute of
  /// a Python module. Throws StateError: forward passes take turns.
  void changes_state(const std::string& what);
  /// A context of autocast ends in the forward pass that runs: it casts weights anew from here on.
  void end_autocast();
  /// At the end of a step: all that was sent has left, and every forward pass was compared with the other stages'.
  /// Throws    CommError(kDiverged) on every stage: programs differ; names both operators.
  void finish();

  /// Ends everything: other stages' waits throw `why`.
  void abort(const std::string& why) noexcept;
  OwnershipCounters counters() const;

 private:
  const std::unique_ptr<Impl> impl_;
};

}  // namespace trireme
