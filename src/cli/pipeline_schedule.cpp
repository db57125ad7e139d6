#include "cli/pipeline_schedule.h"

#include <algorithm>
#include <charconv>
#include <numeric>

#include "cli/flags.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"
#include "trireme/schedule/schedule.h"
#include "trireme/schedule/simulate.h"

namespace trireme::cli {
namespace {

constexpr const char* kInterleaved = "interleaved";

/// Nothing where `text` is not "F,B,W,COMM": three numbers above 0, and one of at least 0.
std::optional<pipeline::PartTimes> times_of(const std::string& text) {
  pipeline::PartTimes times;
  const char *begin = text.data(), *const end = text.data() + text.size();
  for (double* time : {&times.forward, &times.backward_input, &times.backward_weight, &times.message}) {
    const bool is_last = time == &times.message;
    const auto [behind, error] = std::from_chars(begin, end, *time, std::chars_format::general);
    const bool is_time = error == std::errc() && *time <= 1e12 && (is_last ? *time >= 0 : *time > 0);
    if (!is_time || (is_last ? behind != end : behind == end || *behind != ',')) return std::nullopt;
    begin = behind + 1;
  }
  return times;
}

/// The largest product of stages, micro-batches and chunks: a larger plan takes minutes and gigabytes.
constexpr int64_t kMostOfPlan = 1'000'000;

std::string title_of(const pipeline::Schedule& schedule) {
  return str(schedule.name, ": ", schedule.stages, schedule.stages == 1 ? " stage, " : " stages, ",
             schedule.chunks > 1 ? str(schedule.chunks, " parts on each, ") : "", schedule.micro_batches,
             schedule.micro_batches == 1 ? " micro-batch" : " micro-batches");
}

std::string streams_of(const pipeline::Schedule& schedule) {
  std::string text;
  for (int stage = 0; stage < schedule.stages; ++stage) {
    text += str("stage ", stage, '\n');
    const auto& stream = schedule.streams[stage];
    for (size_t step = 0; step < stream.size(); ++step) {
      text += str("  step ", step, ':');
      for (const pipeline::Instruction& instruction : stream[step]) text += str(' ', to_text(instruction));
      text += '\n';
    }
  }
  return text;
}

// Forwards of `inference` have no backward that they wait for.
bool has_backward(const pipeline::Timeline& timeline) {
  return std::any_of(timeline.slots[0].begin(), timeline.slots[0].end(),
                     [](const pipeline::Slot& slot) { return slot.instruction.kind != pipeline::Kind::kForward; });
}

std::string summary_of(const pipeline::Schedule& schedule, const pipeline::Timeline& timeline) {
  std::string text = formatted("bubble share  {:.2f} % of {:.6g} on each stage\nbuffers      ",
                               100 * timeline.bubble_share, timeline.makespan);
  for (const auto& of_chunks : schedule.buffers)
    text += str(' ', std::accumulate(of_chunks.begin(), of_chunks.end(), 0));
  text += " on the stages, each for the activations of one part and micro-batch\n";
  if (!has_backward(timeline)) return text;
  text += "activations  ";
  for (const int peak : timeline.peak_activations) text += str(' ', peak);
  return text + " at most, of one part and micro-batch each\n";
}

std::string text_of(const pipeline::Schedule& schedule, const ScheduleFlags& flags) {
  const auto times = *times_of(flags.times);
  const auto timeline = pipeline::simulate(schedule, times);
  const std::string title = title_of(schedule);
  if (!flags.svg.empty()) write_file_atomically(posix_file_system(), flags.svg, pipeline::to_svg(timeline, title));
  // Where times are very unlike, a short one gets no column.
  const double column =
      std::max(std::min({times.forward, times.backward_input, times.backward_weight}), timeline.makespan / 2000);
  return flags.streams ? str(title, "\n\n", streams_of(schedule))
                       : str(title, "; a column is ", column, "\n\n", to_text(timeline, column), "\n",
                             summary_of(schedule, timeline));
}

}  // namespace

void declare_schedule(CLI::App& app, ScheduleFlags& flags) {
  app.add_option("--schedule", flags.name, "1f1b, inference, gpipe, interleaved, zb-h1, zb-v or dualpipe-v")
      ->check(one_of(pipeline::schedule_names()))
      ->type_name("NAME")
      ->group("Schedule");
  add_whole(app, "--stages", flags.stages, "parts of the model that run at the same time", {.most = 100'000})
      ->group("Schedule");
  add_whole(app, "--micro-batches", flags.micro_batches, "of one optimizer step", {.most = 100'000})->group("Schedule");
  add_whole(app, "--chunks", flags.chunks, "parts of the model on each stage, of interleaved (default: 2)",
            {.most = 100'000})
      ->group("Schedule");
  app.add_option("--times", flags.times,
                 "of one part and micro-batch: forward, backward of the inputs and of the weights, message")
      ->check(CLI::Validator(
          [](const std::string& text) {
            return times_of(text)
                       ? ""
                       : str("'", text,
                             "' is not F,B,W,COMM: three numbers above 0 and one of at least 0, such as 1,1,1,0.1");
          },
          ""))
      ->capture_default_str()
      ->type_name("F,B,W,COMM")
      ->group("Times");
  app.add_flag("--streams", flags.streams, "the instructions of each stage in place of the timeline")->group("Output");
  app.add_option("--svg", flags.svg, "writes the timeline as a drawing, too")->type_name("FILE")->group("Output");
}

std::string schedule_text(const ScheduleFlags& flags) {
  if (flags.chunks && flags.name != kInterleaved)
    throw ConfigError(str("--chunks ", *flags.chunks, ": the schedule '", flags.name,
                          "' has a fixed number of parts per stage; leave --chunks out, or give --schedule ",
                          kInterleaved));
  const int64_t product = int64_t{*flags.stages} * *flags.micro_batches * flags.chunks.value_or(1);
  if (product > kMostOfPlan)
    throw ConfigError(str("--stages ", *flags.stages, " --micro-batches ", *flags.micro_batches,
                          flags.chunks ? str(" --chunks ", *flags.chunks) : "", ": their product ", product,
                          " is above ", kMostOfPlan, "; give fewer: the middle of a schedule repeats itself"));
  return text_of(pipeline::make_schedule(flags.name, *flags.stages, *flags.micro_batches, flags.chunks.value_or(2)),
                 flags);
}

std::string schedule_text(const Config& config, const ScheduleFlags& flags) {
  if (config.degrees.pipe == 1) return "";
  return text_of(pipeline::make_schedule(config.pipeline.schedule, config.degrees.pipe,
                                         static_cast<int>(config.batch.gradient_accumulation_steps),
                                         static_cast<int>(config.pipeline.chunks)),
                 flags);
}

}  // namespace trireme::cli
