#include "trireme/observe/report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "observe/curves.h"
#include "observe/report_assets.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/format.h"
#include "trireme/base/json.h"
#include "trireme/base/version.h"
#include "trireme/observe/progress.h"

namespace trireme {
namespace {

constexpr double kMiB = 1024.0 * 1024.0;

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      // A page must not hold other control characters; a byte-level model may well produce them.
      default:
        out += (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') || c == 0x7f
                   ? std::string("\xEF\xBF\xBD")
                   : std::string(1, c);
    }
  }
  return out;
}

std::string fixed(double value, int digits) {
  if (!std::isfinite(value)) return std::isnan(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  return formatted("{:.{}f}", value, digits);
}

std::string mebibytes(int64_t bytes) { return grouped(std::llround(static_cast<double>(bytes) / kMiB)) + " MiB"; }

std::string mebibytes(const std::vector<int64_t>& bytes_of_rank) {
  std::string text;
  for (const int64_t bytes : bytes_of_rank) text += (text.empty() ? "" : ", ") + mebibytes(bytes);
  return text;
}

/// How much the ranks trained on in a second, step by step.
struct Throughput {
  const char* unit;
  std::vector<double> of_steps;
};

/// In tokens where the run has told them, else in samples, else in steps.
Throughput throughput_of(const std::vector<StepMetrics>& steps) {
  const bool has_tokens = !steps.empty() && steps.back().tokens > 0;
  const bool has_samples = !steps.empty() && steps.back().samples > 0;
  Throughput throughput{.unit = has_tokens ? "tokens/s" : has_samples ? "samples/s" : "steps/s", .of_steps = {}};
  // A resumed run's first step has samples of earlier ones.
  int64_t samples = steps.empty() ? 0 : steps[0].samples - steps[0].samples / std::max<int64_t>(steps[0].step, 1);
  for (const StepMetrics& step : steps) {
    const double of_samples =
        has_samples ? static_cast<double>(step.samples - std::exchange(samples, step.samples)) : 1;
    throughput.of_steps.push_back(has_tokens ? step.tokens_per_s : of_samples * 1000 / step.step_ms);
  }
  return throughput;
}

Json finite(double value) { return std::isfinite(value) ? Json(value) : Json(); }

/// The data that the script draws. Values that are not finite become null: a hole in the line.
std::string curve_data(const RunLog& log) {
  const auto smooth = smoothed_losses(log.steps);
  const Throughput throughput = throughput_of(log.steps);
  Json data;
  data["throughput_unit"] = throughput.unit;
  for (const char* key :
       {"steps", "loss", "smooth", "lr", "grad_norm", "throughput", "memory", "validation", "checkpoints"})
    data[key] = Json::array();
  for (const size_t i : thinned(log.steps, kCurvePoints)) {
    const StepMetrics& step = log.steps[i];
    data["steps"].push_back(step.step);
    data["loss"].push_back(step.loss ? finite(*step.loss) : Json());
    data["smooth"].push_back(finite(smooth[i]));
    data["lr"].push_back(finite(step.learning_rate));
    data["grad_norm"].push_back(step.grad_norm ? finite(*step.grad_norm) : Json());
    data["throughput"].push_back(finite(throughput.of_steps[i]));
  }
  // Memory is measured every so often: a curve of its own, without the steps in between.
  for (const auto& point : measured_memory_mib(log.steps, kCurvePoints))
    data["memory"].push_back({point.step, point.value});
  for (const auto& point : log.validations) data["validation"].push_back({point.step, finite(point.loss)});
  for (const auto& saved : log.checkpoints) data["checkpoints"].push_back(saved.step);
  std::string text = data.dump();
  // "</script>" or "<!--" inside would end or hide the element.
  for (size_t at = 0; (at = text.find('<', at)) != std::string::npos;) text.replace(at, 1, "\\u003c");
  return text;
}

/// The median of those that are finite.
std::optional<double> median(std::vector<double> values) {
  std::erase_if(values, [](double value) { return !std::isfinite(value); });
  if (values.empty()) return std::nullopt;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The same of the values of `value_of(step)` over the steps that have one.
template <class ValueOf>
std::optional<double> median(const std::vector<StepMetrics>& steps, ValueOf value_of) {
  std::vector<double> values;
  for (const auto& step : steps)
    if (const std::optional<double> value = value_of(step)) values.push_back(*value);
  return median(std::move(values));
}

double duration_s(const RunLog& log) {
  if (log.seconds > 0) return log.seconds;
  double seconds = 0;  // it did not end regularly
  for (const auto& step : log.steps) seconds += std::isfinite(step.step_ms) ? step.step_ms / 1000 : 0;
  return seconds;
}

std::vector<int64_t> peak_memory_of_rank(const RunLog& log) {
  if (log.end && !log.end->peak_memory_bytes_of_rank.empty()) return log.end->peak_memory_bytes_of_rank;
  int64_t peak = 0;
  for (const auto& step : log.steps) peak = std::max(peak, step.memory.pss_bytes);
  return peak > 0 ? std::vector<int64_t>{peak} : std::vector<int64_t>();
}

std::string tile(const std::string& label, const std::string& value, const std::string& note) {
  return str("<div class=\"card tile\"><span>", label, "</span><b>", escaped(value), "</b><small>", escaped(note),
             "</small></div>\n");
}

std::string compute_tile(const RunLog& log) {
  const auto rate = median(log.steps, [](const StepMetrics& step) { return step.tflops_per_rank; });
  if (!rate) return "";
  const auto mfu = median(log.steps, [](const StepMetrics& step) { return step.mfu; });
  return tile("Compute per rank", short_quantity(*rate * 1e12, "FLOP/s"),
              mfu ? str("median step, ", fixed(*mfu * 100, 1), " % of the peak (MFU)") : "median step");
}

/// The disk's part in the steps, in words: what went to and fro, and what bounds them.
std::string disk_line(const RunLog& log) {
  const auto of_step = [&](auto value_of) {
    return median(log.steps, [&](const StepMetrics& step) {
      return step.disk ? std::optional<double>(value_of(step)) : std::nullopt;
    });
  };
  const auto waits = of_step([](const StepMetrics& step) { return step.disk->wait_ms / step.step_ms; });
  if (!waits) return "";
  const auto bytes_of_step = [&](int64_t DiskMetrics::*bytes) {
    return size_text(
        std::llround(*of_step([&](const StepMetrics& step) { return static_cast<double>((*step.disk).*bytes); })));
  };
  constexpr double kBound = 0.5;
  return str(bytes_of_step(&DiskMetrics::bytes), " on rank 0; a step reads ", bytes_of_step(&DiskMetrics::read_bytes),
             " and writes ", bytes_of_step(&DiskMetrics::written_bytes), ", and waits for that ",
             fixed(*waits * 100, 0), " % of its time", *waits > kBound ? ": the disk bounds this run" : "");
}

std::string tiles(const RunLog& log) {
  std::string page = "<div class=\"tiles\">\n";
  if (!log.validations.empty()) {
    const auto best = std::min_element(
        log.validations.begin(), log.validations.end(),
        [](const auto& a, const auto& b) { return a.loss < b.loss || (std::isnan(b.loss) && !std::isnan(a.loss)); });
    page += tile("Validation loss", fixed(log.validations.back().loss, 4),
                 str("best ", fixed(best->loss, 4), " at step ", best->step));
  }
  if (!log.steps.empty()) {
    const StepMetrics& last = log.steps.back();
    if (last.loss)
      page += tile("Training loss, smoothed", fixed(smoothed_losses(log.steps).back(), 4),
                   str("last step ", fixed(*last.loss, 4)));
    const Throughput throughput = throughput_of(log.steps);
    page += tile("Throughput", short_count(median(throughput.of_steps).value_or(0)),
                 str(throughput.unit, ", median step")) +
            compute_tile(log);
    const bool has_tokens = last.tokens > 0;
    page += tile("Duration", short_duration(duration_s(log)),
                 str(grouped(last.step), " steps",
                     has_tokens         ? str(", ", short_count(static_cast<double>(last.tokens)), " tokens")
                     : last.samples > 0 ? str(", ", short_count(static_cast<double>(last.samples)), " samples")
                                        : ""));
  }
  const auto memory = peak_memory_of_rank(log);
  if (!memory.empty())
    page += tile("Peak memory per rank", mebibytes(*std::max_element(memory.begin(), memory.end())),
                 "proportional set size");
  return page + "</div>\n";
}

std::string warnings(const RunLog& log) {
  std::string page;
  const auto warn = [&](const std::string& text) { page += "<p class=\"warning\">" + escaped(text) + "</p>\n"; };
  if (log.steps.empty()) warn("No step was recorded in this run.");
  const auto is_bad = [](const StepMetrics& step) { return step.loss && !std::isfinite(*step.loss); };
  const auto bad = std::count_if(log.steps.begin(), log.steps.end(), is_bad);
  if (bad > 0)
    warn(str("The loss was not finite in ", bad, bad == 1 ? " step" : " steps", ", first in step ",
             std::find_if(log.steps.begin(), log.steps.end(), is_bad)->step, "."));
  if (!log.steps.empty() && log.steps.back().skipped_steps > 0)
    warn(str(log.steps.back().skipped_steps, " steps were skipped because of an overflow in the gradients."));
  if (log.end && log.end->reason != "finished") warn(str("The run ended early: ", log.end->reason));
  return page;
}

std::string details_table(const RunLog& log) {
  std::string rows;
  const auto row = [&](const char* label, const std::string& value) {
    if (!value.empty()) rows += str("<tr><th scope=\"row\">", label, "</th><td>", escaped(value), "</td></tr>\n");
  };
  if (log.run) {
    row("Model", log.run->model);
    if (log.run->parameters > 0) row("Parameters", grouped(log.run->parameters));
    row("Ranks", std::to_string(log.run->ranks));
    row("ZeRO stage", std::to_string(log.run->zero_stage));
    row("Weights", log.run->dtype);
    row("Data", log.run->data);
    if (log.run->flops_per_token > 0)
      row("Work", short_quantity(static_cast<double>(log.run->flops_per_token), "FLOP") + " per token");
    if (log.run->peak_tflops) row("Peak of a rank", short_quantity(*log.run->peak_tflops * 1e12, "FLOP/s"));
    if (log.run->first_step > 0) row("Resumed after step", grouped(log.run->first_step));
    row("Started", log.started);
    if (log.run->started != log.started) row("Resumed", log.run->started);
    row("Host", log.run->host);
    row("Command", log.run->command);
    row("Versions", log.run->versions);
  }
  if (!log.steps.empty()) {
    row("Steps", str(grouped(log.steps.back().step),
                     log.run && log.run->total_steps > 0 ? " of " + grouped(log.run->total_steps) : ""));
    if (log.steps.back().samples > 0) row("Samples", grouped(log.steps.back().samples));
    if (log.steps.back().tokens > 0) row("Tokens", grouped(log.steps.back().tokens));
  }
  const auto memory = peak_memory_of_rank(log);
  row(memory.size() > 1 ? "Peak memory of each rank" : "Peak memory", mebibytes(memory));
  if (log.end) row("Peak resident memory, shared pages counted fully", mebibytes(log.end->peak_resident_bytes_of_rank));
  const auto is_used = [](int64_t bytes) { return bytes > 0; };
  if (log.end && std::ranges::any_of(log.end->peak_device_bytes_of_rank, is_used))
    row("Peak device memory", mebibytes(log.end->peak_device_bytes_of_rank));
  row("Weights and states on disk", disk_line(log));
  if (!log.checkpoints.empty()) {
    const auto& saved = log.checkpoints.back();
    row("Last checkpoint", str(saved.tag, ", ", mebibytes(saved.bytes), " in ", fixed(saved.seconds, 2), " s (",
                               log.checkpoints.size(), " saved)"));
  }
  return rows.empty() ? "" : "<h2>Run</h2>\n<div class=\"card\"><table>\n" + rows + "</table></div>\n";
}

std::string samples(const RunLog& log) {
  std::string page;
  for (auto sample = log.samples.rbegin(); sample != log.samples.rend(); ++sample) {
    page += str("<div class=\"card sample\"><p>after step ", grouped(sample->step), "</p><pre><mark>",
                escaped(sample->prompt), "</mark>", escaped(sample->text), "</pre></div>\n");
  }
  return page.empty() ? "" : "<h2>Generated text</h2>\n" + page;
}

std::string configuration(const RunLog& log) {
  if (!log.run) return "";
  const Json config = Json::parse(log.run->config, nullptr, /*allow_exceptions=*/false);
  if (config.is_discarded() || config.empty()) return "";
  return "<h2>Configuration</h2>\n<details class=\"card\"><summary>Resolved configuration</summary><pre>" +
         escaped(config.dump(2)) + "</pre></details>\n";
}

}  // namespace

std::string render_report(const RunLog& log) {
  const std::string model = log.run && !log.run->model.empty() ? log.run->model : "Training run";
  std::string subtitle = "Training report";
  if (log.run) {
    const auto& run = *log.run;
    if (run.parameters > 0) subtitle += " · " + short_count(static_cast<double>(run.parameters)) + " parameters";
    subtitle += str(" · ", run.ranks, run.ranks == 1 ? " rank" : " ranks", " · ZeRO stage ", run.zero_stage);
    if (!run.dtype.empty()) subtitle += " · " + run.dtype;
  }
  std::string page =
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n";
  page += str("<title>", escaped(model), " · training report</title>\n<style>", kReportStyle,
              "</style>\n</head>\n<body>\n<main>\n");
  std::string origin = log.started;
  if (log.run && !log.run->host.empty()) origin += str(origin.empty() ? "" : " · ", "on ", log.run->host);
  page += str("<header><h1>", escaped(model), "</h1><p>", escaped(subtitle), "</p>",
              origin.empty() ? "" : "<p>" + escaped(origin) + "</p>", "</header>\n");
  page += tiles(log) + warnings(log);
  if (!log.steps.empty()) page += "<h2>Curves</h2>\n<div class=\"charts\" id=\"charts\"></div>\n";
  page += samples(log) + details_table(log) + configuration(log);
  page += str("<footer>Written by Trireme ", kVersion, ", ", utc_now(), "</footer>\n</main>\n");
  if (!log.steps.empty())
    page += str("<script type=\"application/json\" id=\"data\">", curve_data(log), "</script>\n<script>", kReportScript,
                "</script>\n");
  return page + "</body>\n</html>\n";
}

void write_report(const std::filesystem::path& metrics, const std::filesystem::path& html) {
  write_file_atomically(posix_file_system(), html, render_report(read_metrics(metrics)));
}

}  // namespace trireme
