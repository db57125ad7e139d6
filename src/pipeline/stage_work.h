// Forward and backward passes of one stage's parts of a model, micro-batch by micro-batch.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/edge.h>

#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/messages.h"
#include "pipeline/micro_batch_feed.h"
#include "pipeline/sequence_cut.h"
#include "pipeline/split_backward.h"
#include "pipeline/tied_copies.h"
#include "trireme/pipeline/stage_model.h"
#include "trireme/schedule/schedule.h"
#include "trireme/training/training.h"

namespace trireme {

/// The purpose of a run of passes.
struct WorkMode {
  bool trains = false;
  bool computes_loss = false;
  bool returns_outputs = false;
};

/// Activations of a micro-batch are held in a slot from its first instruction to its last. What goes from one part of
/// this stage to another of its parts is handed over here; what goes to other stages is taken out and put in.
class StageWork {
 public:
  /// The micro-batches, and how their sequences are cut.
  struct Data {
    const MicroBatchFeed& feed;
    const SequenceCut& cut;
  };
  /// All of these outlive this. `tied_group`, with one rank per stage, has no other user. `sums_whole`: the gradients
  /// of a step's micro-batches are reduced once. Collective over the ranks of `training` and `tied_group`.
  StageWork(Training& training, const StageModel& model, const Data& data, Group& tied_group,
            const pipeline::Schedule& shape, bool sums_whole);

  /// Before the first instruction of `schedule`, which outlives its last one.
  void begin(const pipeline::Schedule& schedule, WorkMode mode);
  void forward(const pipeline::Instruction& instruction);
  void backward(const pipeline::Instruction& instruction);
  /// The activation from the part before, which is on another stage.
  void put_input(const pipeline::Instruction& instruction, Message message);
  /// The activation for the part after.
  Message take_output(const pipeline::Instruction& instruction);
  /// The gradients from the part after, which is on another stage.
  void put_output_gradients(const pipeline::Instruction& instruction, Message message);
  /// The gradients for the part before.
  Message take_input_gradients(const pipeline::Instruction& instruction);
  /// After the update: copies of tied parameters get their owners' values. Collective over the world.
  void end_window();
  /// As end_window(), whatever has changed the owners. Collective over the world.
  void follow_owners() { tied_.follow_owners(); }
  /// After an error: drops all that is held.
  void clear();

  /// The sum over micro-batches so far, [] fp32; undefined where this stage computes no loss.
  const at::Tensor& loss() const { return loss_; }
  /// The last part's outputs, by micro-batch.
  std::vector<c10::IValue> take_outputs() { return std::exchange(outputs_, {}); }
  /// By chunk: the most micro-batches whose activations were held at once.
  const std::vector<int>& peak_buffers() const { return peak_buffers_; }

 private:
  struct Slot {
    int micro_batch = -1;  ///< -1: free
    std::optional<Message> input = {};
    std::vector<at::Tensor> leaves = {};  ///< of the input: those that need a gradient
    std::optional<Message> output = {};   ///< until it is sent
    torch::autograd::edge_list output_edges = {};
    std::vector<at::Tensor> output_gradients = {};
    std::optional<SplitBackward> split = {};
    std::vector<at::Tensor> input_gradients = {};  ///< of `leaves`, until they are sent
  };

  int part_of(int chunk) const { return schedule_->part_of(stage_, chunk); }
  bool stays_here(int part) const {
    return part >= 0 && part < schedule_->parts() && schedule_->stage_of(part) == stage_;
  }
  bool is_last(int chunk) const { return part_of(chunk) == schedule_->parts() - 1; }
  bool carries_random_state() const { return mode_.trains && training_.step().is_deterministic(); }
  void find_units();
  Slot& slot(const pipeline::Instruction& instruction);
  void release_if_over(const pipeline::Instruction& instruction);
  c10::IValue first_input(const pipeline::Instruction& instruction, ForwardScope& scope);
  c10::IValue input_of(Slot& slot, const pipeline::Instruction& instruction);
  Message output_of(Slot& slot, const c10::IValue& value) const;
  c10::IValue whole(const c10::IValue& value) const;
  void finish_forward(Slot& slot, const c10::IValue& output, int micro_batch);
  void refuse_reentrant(const Slot& slot) const;
  void backward_inputs(Slot& slot);
  void backward_weights(Slot& slot, const pipeline::Instruction& instruction);
  static Message gradients_of(Slot& slot);
  Message take_over(int kind, int micro_batch);

  Training& training_;
  const StageModel& model_;
  const Data data_;
  const int stage_;
  TiedCopies tied_;
  const bool sums_whole_;
  std::vector<std::vector<bool>> units_;  ///< by chunk and unit: what its passes reach; empty: all
  std::vector<int> peak_buffers_;

  // State of the window that runs:
  const pipeline::Schedule* schedule_;
  WorkMode mode_;
  bool splits_backward_ = false;
  std::vector<std::vector<Slot>> slots_;                ///< by chunk and buffer
  std::vector<int> passes_left_;                        ///< by chunk
  std::map<std::pair<int, int>, Message> handed_over_;  ///< between parts of this stage, by kind and micro-batch
  at::Tensor loss_;
  std::vector<c10::IValue> outputs_;
};

}  // namespace trireme
