// A pipeline's schedule as a value: which instruction each stage executes when. Pure; executed, checked, simulated and
// printed by others.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::pipeline {

/// The kind of an instruction: DeepSpeed's, and the two halves of a split backward.
enum class Kind : uint8_t {
  kLoadMicroBatch,
  kReceiveActivation,
  kSendActivation,
  kForward,
  kReceiveGradient,
  kSendGradient,
  kBackward,        ///< gradients of inputs and of weights
  kBackwardInput,   ///< gradients of inputs alone, which the stage before waits for
  kBackwardWeight,  ///< gradients of weights, after kBackwardInput
  kReduceTiedGradients,
  kReduceGradients,
  kStep,
};

/// One instruction of a stage.
struct Instruction {
  Kind kind = Kind::kStep;
  int chunk = 0;         ///< which of the stage's parts of the model
  int micro_batch = -1;  ///< -1: none
  int buffer = -1;       ///< of the chunk, from 0; -1: none
  int peer = -1;         ///< stage to send to or receive from; -1: none
  bool operator==(const Instruction&) const = default;
};

/// DeepSpeed's name of the instruction: "ForwardPass".
const char* name_of(Kind kind);
/// Throws    ConfigError: no instruction has this name.
Kind kind_of(const std::string& name);
/// "ForwardPass(micro_batch=3, chunk=1, buffer=0)"
std::string to_text(const Instruction& instruction);

/// A step of the schedule, not of the optimizer: instructions that a stage executes in order. Stages may meet between
/// two steps.
using Step = std::vector<Instruction>;

/// Which stage has which part of the model; each micro-batch passes the parts in order.
enum class PartOrder : uint8_t {
  kLoop,    ///< chunk c of stage s is part c * stages + s
  kV,       ///< two chunks: stage s has the parts s and 2 * stages - 1 - s
  kListed,  ///< as Schedule::stage_of_part says; chunk c of a stage is the c-th of its parts
};

/// The instructions of all stages.
struct Schedule {
  std::string name;
  int stages = 1;
  int micro_batches = 1;
  int chunks = 1;  ///< of each stage; under kListed, of the stage that has the most
  PartOrder order = PartOrder::kLoop;
  std::vector<int> stage_of_part = {};     ///< under kListed
  std::vector<std::vector<Step>> streams;  ///< by stage
  std::vector<std::vector<int>> buffers;   ///< by stage and chunk: micro-batches whose activations are kept at once

  int parts() const;
  int part_of(int stage, int chunk) const;
  int stage_of(int part) const;
  int chunk_of(int part) const;
  int chunks_of(int stage) const;
};

/// DeepSpeed's TrainSchedule: one forward, one backward, in steps that all stages make together.
/// Throws    this and all below: ConfigError that names the argument; stages and micro-batches are 1 or more.
/// Source    Narayanan et al. 2019 (PipeDream), arXiv:1806.03377; DeepSpeed's documentation of its schedule.
Schedule one_f_one_b(int stages, int micro_batches);
/// DeepSpeed's InferenceSchedule: forwards alone.
Schedule inference(int stages, int micro_batches);
/// DeepSpeed's DataParallelSchedule: one stage that accumulates gradients.
Schedule data_parallel(int micro_batches);
/// All forwards, then all backwards. Source: Huang et al. 2019, arXiv:1811.06965.
Schedule gpipe(int stages, int micro_batches);
/// 1F1B over several chunks of each stage. Throws ConfigError too: micro-batches that are no multiple of the stages.
/// Source    Narayanan et al. 2021, arXiv:2104.04473, section 2.2.
Schedule interleaved(int stages, int micro_batches, int chunks);
/// ZB-H1: 1F1B whose backward is split. Gradients of weights fill bubbles, within the memory of 1F1B's first stage.
/// Source    Qi et al. 2023, arXiv:2401.10241, section 2.1.
Schedule zero_bubble_h1(int stages, int micro_batches);
/// ZB-V: two chunks in a V, within the memory of 1F1B's first stage. Throws ConfigError too: fewer micro-batches than
/// two per stage.
/// Source    Qi et al. 2024, arXiv:2405.15362, section 3.
Schedule zero_bubble_v(int stages, int micro_batches);
/// DualPipeV: the half of DualPipe that needs one copy of the model. Throws ConfigError too: fewer micro-batches than
/// two per stage.
/// Source    DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, cut in half as Sea AI Lab describe it.
Schedule dual_pipe_v(int stages, int micro_batches);

/// The options of visits_schedule().
struct VisitsOptions {
  int micro_batches = 1;
  int active = 1;               ///< micro-batches that a stage has begun and not ended, at most
  bool forwards_first = false;  ///< no stage goes backward before its last forward
  bool has_backward = true;
  std::vector<double> times = {};  ///< of each visit's forward, in any one unit; empty: all are as long
};
/// The order of a program that comes back to stages: `stage_of_visit` lists the stages that each micro-batch visits one
/// after the other. A stage that is free takes a backward before a forward, and of two the lower micro-batch, as these
/// would be ready if backward took twice the time of forward. Every part has its micro-batches in ascending order.
/// Throws ConfigError too: a stage that is not visited.
Schedule visits_schedule(const std::vector<int>& stage_of_visit, const VisitsOptions& options);

/// "1f1b", "inference", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v".
std::vector<std::string> schedule_names();
/// One of the above by its name; `chunks` is for "interleaved" alone.
/// Throws    ConfigError: another name, with those that there are; as the function itself.
Schedule make_schedule(const std::string& name, int stages, int micro_batches, int chunks = 1);

/// Computations of one stage in order, to which assemble() adds loads, messages, buffers and the optimizer step.
struct Computation {
  Kind kind = Kind::kForward;  ///< a forward or one of the backwards
  int chunk = 0;
  int micro_batch = 0;
};

/// Makes a schedule from each stage's computations, for schedules of a program's own. A stage receives messages of a
/// peer in the order in which they are sent.
/// Throws    ConfigError: a computation that is missing, or is there twice.
Schedule assemble(std::string name, int stages, int micro_batches, int chunks, PartOrder order,
                  const std::vector<std::vector<Computation>>& computations);
/// The same over parts that are listed.
Schedule assemble(std::string name, int micro_batches, const std::vector<int>& stage_of_part,
                  const std::vector<std::vector<Computation>>& computations);

/// Fills in the micro-batches and peers of a schedule, with one chunk per stage, whose instructions name only their
/// buffers, as DeepSpeed's do. Load n of a stage is of micro-batch n; a received activation is of the micro-batch that
/// the stage before sends then; any other instruction is of the micro-batch in its buffer. Peers are the neighbouring
/// stages.
/// Throws    ConfigError: an instruction whose buffer is empty, or that receives more than is sent.
Schedule follow_buffers(Schedule schedule);

}  // namespace trireme::pipeline
