// The events of an engine's steps, under DeepSpeed's names, and the monitors that are told of them.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "trireme/engine/options.h"
#include "trireme/observe/monitors.h"

namespace torch::nn {
class Module;
}

namespace trireme {

class StepRecord;
class Training;
struct SavedCheckpoint;

/// Functions of who counts the work of passes; empty where nobody does.
struct PassWatch {
  std::function<void()> begin;  ///< a forward, or a schedule of passes, begins
  std::function<void()> end;    ///< those of a window are over
  std::function<void()> tell;   ///< so is the step; collective
};

/// Tells monitors of each step: `Train/Samples/train_loss`, the mean of rank 0's losses of the window; `…/lr`, the rate
/// of the next step in the first parameter group; in fp16 `…/loss_scale`; with wall_clock_breakdown
/// `…/elapsed_time_ms_forward` and its kin; and writes the record that `trireme.record` asks for. Only rank 0 has
/// monitors and record. Where none is switched on, nothing here costs anything.
class RunEvents {
 public:
  RunEvents();
  ~RunEvents();
  RunEvents(const RunEvents&) = delete;
  RunEvents& operator=(const RunEvents&) = delete;

  /// Hands events of the program's own to the monitors.
  void write(std::span<const MonitorEvent> events) { monitors_.write(events); }
  /// Another monitor, on the rank that adds it; `name` opens what is said about it.
  void add_monitor(std::string name, EventSink sink);
  bool is_empty() const { return monitors_.is_empty(); }
  /// The tokens of a sample, for throughput in tokens (`trireme top`, `trireme.record`).
  void set_tokens_per_sample(int64_t tokens);
  /// The same by an input of the model, where it is token ids, int64 [samples, tokens].
  void see_input(const at::Tensor& input);
  /// The events of the last step, for the caller of an engine made with `takes_events`; `lr` instead of the engine's
  /// rate. Empty where no monitor is switched on, and but on rank 0. Waits for a device.
  std::vector<MonitorEvent> take(std::optional<double> lr = {});

  // The engine's own.

  /// `options`, with which the monitors of the configuration are opened before the module is changed; ConfigError where
  /// they need Python, IoError where a folder cannot be written, both on every rank.
  InitializeOptions opening(InitializeOptions options);
  /// Both outlive the last tell() and take().
  void follow(Training& training, const torch::nn::Module& module);
  /// A forward, or a schedule of passes, begins; those of a window are over.
  void begin_passes();
  void end_passes();
  /// A step begins.
  void begin_step();
  /// Adds the loss of a backward pass, in the weight that it has in the window's mean. Waits for no device.
  void add_loss(const at::Tensor& weighted_loss);
  /// Forgets the window's losses.
  void drop() { loss_.reset(); }
  /// Tells the monitors of the step that has just ended, and writes its line, and the report of its FLOPs.
  void tell();
  void note_checkpoint(const SavedCheckpoint& saved);
  /// Ends the record; the report tells of another `reason` than "finished".
  void end(const std::string& reason = "finished");

 private:
  /// All ranks' tokens of the window that ends: `batch` samples of the mean length. Forgets the window's.
  int64_t tokens_of_window(int64_t batch);
  void write_line();

  Monitors monitors_;
  bool collects_ = false;
  at::Tensor loss_;         ///< sum over the window's backward passes, fp32; undefined: there was none
  at::Tensor window_loss_;  ///< the same of the last window that has ended
  double lr_ = 0;           ///< of the step that runs, in the first parameter group
  std::unique_ptr<StepRecord> record_;
  std::function<void()> write_line_;               ///< of the record, as a monitor's is
  int64_t window_length_ = 0, window_inputs_ = 0;  ///< of token ids: their lengths in sum, and how many came
  int64_t tokens_ = -1;                            ///< of the whole training; below 0: no step has ended yet
  bool counts_flops_ = false;
  PassWatch passes_;
  std::function<void(int64_t samples, std::vector<MonitorEvent>& events)> add_times_;  ///< of wall_clock_breakdown
  Training* training_ = nullptr;
};

}  // namespace trireme
