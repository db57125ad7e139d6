#include "cli/run_record.h"

#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"
#include "trireme/base/pattern.h"
#include "trireme/device/device.h"
#include "trireme/observe/report.h"
#include "trireme/parallel/axis.h"
#include "trireme/plan/device_peak.h"
#include "trireme/precision/precision.h"

namespace trireme::cli {
namespace {

// Walking the page tables takes about as long as a small model's step.
constexpr int64_t kMemoryEverySteps = 10;

// A rank's stderr is a pipe to the supervisor, which tells how wide the terminal behind it is.
ProgressOutput progress_output(bool quiet) {
  auto output = output_to(2);
  if (quiet) output.write = [](std::string_view) {};
  const auto columns = environment("TRIREME_COLUMNS");
  if (!columns) return output;
  const int width = std::atoi(columns->c_str());
  if (width > 0) output.columns = [width] { return std::optional<int>(width); };
  return output;
}

std::string describe_skipped(const DataSplits& data) {
  if (data.skipped_files == 0) return "";
  std::string why =
      data.format == DataFormat::kBytes || data.is_encoded ? "binary or empty" : "empty, or neither .bin nor .npy";
  for (const auto& kind : data.skipped_kinds) why += str(&kind == &data.skipped_kinds.front() ? ": " : ", ", kind);
  return str(", ", data.skipped_files, data.skipped_files == 1 ? " file" : " files", " skipped (", why, ")");
}

std::string describe(const DataSplits& data) {
  return str(short_count(static_cast<double>(data.train.tokens())), " tokens in ", data.train.files(),
             " files for training, ", short_count(static_cast<double>(data.held_out.tokens())), " held out",
             data.json_files == 0 ? "" : str(", the texts of a key in ", data.json_files, " of them"),
             data.parquet_files == 0 ? "" : str(", the texts of a column in ", data.parquet_files, " of them"),
             describe_skipped(data));
}

std::string describe_axes(const Degrees& degrees) {
  std::string text;
  for (const AxisPart* axis : all_axes())
    if (axis->described != nullptr && degrees.*axis->degree > 1)
      text += ", " + filled(axis->described, {str(degrees.*axis->degree)});
  return text;
}

int64_t largest_of_ranks(Group& group, int64_t value) {
  const auto largest = at::tensor({value}, at::kLong);
  group.all_reduce(largest, ReduceOp::kMax).wait();
  return largest.item<int64_t>();
}

std::vector<int64_t> value_of_ranks(Group& group, int64_t value) {
  const auto all = at::zeros({group.size()}, at::kLong);
  group.all_gather(all, at::tensor({value}, at::kLong)).wait();
  return {all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + group.size()};
}

// The published peak of the device that a rank computes on, in the dtype that it computes in.
std::optional<double> published_peak(const EngineBase& engine) {
  const PrecisionOptions& precision = engine.config().precision;
  return peak_tflops(device_name(engine.pager().device()),
                     precision.autocast.enabled ? precision.autocast.dtype : precision.weight_dtype);
}

}  // namespace

AgreedStep agree_on_step(Group& group, double loss, const StopSignals& signals) {
  const auto as_number = [](bool asked) { return asked ? 1.0 : 0.0; };
  const auto sums =
      at::tensor({loss, as_number(signals.signal() != 0), as_number(signals.take_save_request())}, at::kDouble);
  group.all_reduce(sums).wait();
  const double* values = sums.const_data_ptr<double>();
  return {values[0] / group.size(), values[1] > 0, values[2] > 0};
}

RunRecord::RunRecord(const TrainSetup& setup, EngineBase& engine, Group& world)
    : setup_(setup),
      engine_(engine),
      world_(world),
      compute_{.flops_per_token = static_cast<double>(training_flops_per_token(setup.model, setup.options.seq)),
               .ranks = world.size(),
               .peak_tflops = setup.options.peak_tflops ? setup.options.peak_tflops : published_peak(engine)} {
  engine.events().set_tokens_per_sample(setup.options.seq);
  if (world.rank() != 0) return;
  posix_file_system().create_directories(setup.out);
  write_file_atomically(posix_file_system(), setup.out / "resolved_config.json", to_text(engine.config()));
  write_run_flags(setup.flags, setup.out);
  const auto path = setup.out / "metrics.jsonl";
  const int64_t first_step = engine.global_steps();
  metrics_ =
      setup.options.resume ? std::make_unique<MetricsWriter>(path, first_step) : std::make_unique<MetricsWriter>(path);
  metrics_->run({.model = setup.name,
                 .parameters = parameter_count(setup.model),
                 .ranks = world.size(),
                 .zero_stage = engine.config().pager.stage,
                 .dtype = short_name(engine.config().precision.weight_dtype),
                 .total_steps = setup.options.steps,
                 .first_step = first_step,
                 .config = to_text(engine.config()),
                 .data = describe(setup.data),
                 .flops_per_token = training_flops_per_token(setup.model, setup.options.seq),
                 .peak_tflops = compute_.peak_tflops,
                 .started = utc_now(),
                 .host = host_name(),
                 .command = setup.flags.command,
                 .versions = software_versions()});
  progress_ = std::make_unique<Progress>(
      ProgressOptions{.total_steps = setup.options.steps, .first_step = first_step, .compute = compute_},
      progress_output(setup.options.quiet));
  pass_notes_on();
  note(str(setup.name, ": ", short_count(static_cast<double>(parameter_count(setup.model))), " parameters, ZeRO stage ",
           engine.config().pager.stage, describe_axes(engine.config().degrees), " on ", world.size(),
           world.size() == 1 ? " rank (" : " ranks (", device_name(engine.pager().device()), "), ",
           engine.train_batch_size(), " x ", setup.options.seq, " tokens per step"));
  note(str("data: ", describe(setup.data)));
  if (setup.options.epochs)
    note(str("--epochs ", *setup.options.epochs, " of ", setup.data.train.size(), " samples: ", setup.options.steps,
             " steps in all"));
  if (first_step > 0) note(str("continues after step ", first_step));
}

RunRecord::~RunRecord() {
  if (log_before_) set_log_sink(std::move(log_before_));
}

// A line that is printed beside the progress bar would tear it. The bar itself belongs to this thread.
void RunRecord::pass_notes_on() {
  const auto own_thread = std::this_thread::get_id();
  log_before_ = set_log_sink({});
  set_log_sink([this, own_thread, former = log_before_](LogLevel level, const std::string& message) {
    if (level == LogLevel::kInfo && std::this_thread::get_id() == own_thread) return note(message);
    if (former) former(level, message);
  });
}

void RunRecord::step(double loss, double lr) {
  const int64_t step = engine_.global_steps();
  const bool looks_at_memory = step % kMemoryEverySteps == 0 || step == setup_.options.steps;
  MemoryUse memory;
  if (looks_at_memory) {
    memory = memory_use();
    peak_pss_bytes_ = std::max(peak_pss_bytes_, memory.pss_bytes);
    memory.pss_bytes = largest_of_ranks(world_, memory.pss_bytes);
    memory.rss_bytes = largest_of_ranks(world_, memory.rss_bytes);
  }
  const auto now = Clock::now();
  const double step_s = std::chrono::duration<double>(now - step_start_).count();
  step_start_ = now;
  if (!metrics_) return;
  std::optional<double> scale;
  if (engine_.config().precision.needs_loss_scale()) scale = engine_.loss_scale();
  const int64_t step_tokens = engine_.train_batch_size() * setup_.options.seq;
  const double tokens_per_s = static_cast<double>(step_tokens) / step_s;
  std::optional<DiskMetrics> disk;
  if (const DiskUse use = engine_.disk_use(); use.bytes > 0) {
    const DiskUse before = std::exchange(disk_use_, use);
    disk = {.bytes = use.bytes,
            .read_bytes = use.read_bytes - before.read_bytes,
            .written_bytes = use.written_bytes - before.written_bytes,
            .wait_ms = 1e3 * (use.wait_s - before.wait_s)};
    disk_wait_s_ += use.wait_s - before.wait_s;
    stepping_s_ += step_s;
  }
  metrics_->step({.step = step,
                  .samples = engine_.global_samples(),
                  .tokens = engine_.global_samples() * setup_.options.seq,
                  .loss = loss,
                  .learning_rate = lr,
                  .grad_norm = engine_.get_global_grad_norm(),
                  .step_ms = step_s * 1e3,
                  .tokens_per_s = tokens_per_s,
                  .memory = memory,
                  .skipped_steps = engine_.skipped_steps(),
                  .loss_scale = scale,
                  .tflops_per_rank = compute_.tflops_per_rank(tokens_per_s),
                  .disk = disk,
                  .mfu = compute_.mfu(tokens_per_s)});
  progress_->update({.step = step, .loss = loss, .learning_rate = lr, .tokens = step_tokens});
  if (!engine_.was_step_applied()) note(str("step ", step, " was skipped: its gradients are not finite"));
}

void RunRecord::validation(double loss) {
  step_start_ = Clock::now();  // what is not training does not count as a slow step
  if (!metrics_) return;
  metrics_->validation(engine_.global_steps(), loss);
  note(str("step ", engine_.global_steps(), ": validation loss ", loss));
}

void RunRecord::checkpoint(const SavedCheckpoint& saved, int64_t step) {
  step_start_ = Clock::now();
  if (!metrics_) return;
  metrics_->checkpoint(
      {.step = step, .tag = saved.path.filename().string(), .bytes = saved.tensor_bytes, .seconds = saved.seconds});
  note(str("step ", step, ": saved ", saved.path.string()));
}

void RunRecord::sample(const std::string& text) {
  if (metrics_) metrics_->sample(engine_.global_steps(), setup_.options.prompt, text);
}

void RunRecord::note(const std::string& line) {
  if (progress_) progress_->note(line);
}

void RunRecord::say(const std::string& line) {
  if (!setup_.options.quiet) return note(line);
  if (progress_) output_to(2).write(line + "\n");
}

void RunRecord::finish(const std::string& reason) {
  const auto peaks = value_of_ranks(world_, std::max(peak_pss_bytes_, memory_use().pss_bytes));
  const auto resident = value_of_ranks(world_, peak_resident_bytes());
  const Pager& pager = engine_.pager();
  const auto on_device =
      value_of_ranks(world_, device_memory(pager.device()).peak_bytes + pager.memory().registered_bytes);
  if (!metrics_) return;
  end({.step = engine_.global_steps(),
       .reason = reason,
       .seconds = seconds(),
       .peak_memory_bytes_of_rank = peaks,
       .peak_resident_bytes_of_rank = resident,
       .peak_device_bytes_of_rank = on_device});
  if (stepping_s_ > 0)
    note(str("on disk: ", size_text(disk_use_.bytes), " of rank 0; steps waited for it ",
             formatted("{:.0f}", 100 * disk_wait_s_ / stepping_s_), " % of their time"));
  note_peak("resident", resident);
  note_peak("device", on_device);
}

void RunRecord::note_peak(const char* which, const std::vector<int64_t>& bytes_of_rank) {
  const int64_t largest = *std::max_element(bytes_of_rank.begin(), bytes_of_rank.end());
  if (largest == 0) return;  // there is none, or the system does not tell
  note(str("peak ", which, " memory", bytes_of_rank.size() > 1 ? " of the largest rank: " : ": ",
           short_quantity(static_cast<double>(largest), "B")));
}

void RunRecord::fail(const std::string& reason) noexcept {
  if (!metrics_) return;
  try {
    end({.step = engine_.global_steps(), .reason = reason, .seconds = seconds(), .peak_memory_bytes_of_rank = {}});
  } catch (const std::exception&) {  // the disk may be full, which is why we are here
  }
}

void RunRecord::end(const RunEnd& end) {
  progress_->finish();
  metrics_->end(end);
  write_report(setup_.out / "metrics.jsonl", setup_.out / "report.html");
}

}  // namespace trireme::cli
