#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/observe/metrics.h"

namespace trireme {
namespace {

double number_from(const Json& json) {
  if (!json.is_string()) return json.get<double>();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto text = json.get<std::string>();
  return text == "inf" ? kInfinity : text == "-inf" ? -kInfinity : std::numeric_limits<double>::quiet_NaN();
}

double number_at(const Json& json, const char* key) { return json.contains(key) ? number_from(json[key]) : 0; }

std::optional<double> maybe_at(const Json& json, const char* key) {
  if (!json.contains(key)) return std::nullopt;
  return number_from(json[key]);
}

std::optional<DiskMetrics> disk_from(const Json& json) {
  if (!json.contains("disk")) return std::nullopt;
  const Json& disk = json["disk"];
  return DiskMetrics{.bytes = disk.value("bytes", int64_t{0}),
                     .read_bytes = disk.value("read_bytes", int64_t{0}),
                     .written_bytes = disk.value("written_bytes", int64_t{0}),
                     .wait_ms = number_at(disk, "wait_ms")};
}

StepMetrics step_from(const Json& json) {
  return {.step = json.at("step").get<int64_t>(),
          .samples = json.value("samples", int64_t{0}),
          .tokens = json.value("tokens", int64_t{0}),
          .loss = maybe_at(json, "loss"),
          .learning_rate = number_at(json, "lr"),
          .grad_norm = maybe_at(json, "grad_norm"),
          .step_ms = number_at(json, "step_ms"),
          .tokens_per_s = number_at(json, "tokens_per_s"),
          .memory = {json.value("pss_bytes", int64_t{0}), json.value("rss_bytes", int64_t{0})},
          .skipped_steps = json.value("skipped_steps", int64_t{0}),
          .loss_scale = maybe_at(json, "loss_scale"),
          .tflops_per_rank = maybe_at(json, "tflops_per_rank"),
          .disk = disk_from(json),
          .mfu = maybe_at(json, "mfu")};
}

RunInfo run_from(const Json& json) {
  return {.model = json.value("model", ""),
          .parameters = json.value("parameters", int64_t{0}),
          .ranks = json.value("ranks", 1),
          .zero_stage = json.value("zero_stage", 0),
          .dtype = json.value("dtype", ""),
          .total_steps = json.value("total_steps", int64_t{0}),
          .first_step = json.value("step", int64_t{0}),
          .config = json.value("config", Json::object()).dump(),
          .data = json.value("data", ""),
          .flops_per_token = json.value("flops_per_token", int64_t{0}),
          .peak_tflops = maybe_at(json, "peak_tflops"),
          .started = json.value("started", ""),
          .host = json.value("host", ""),
          .command = json.value("command", ""),
          .versions = json.value("versions", "")};
}

void add(RunLog& log, const Json& json) {
  const std::string event = json.value("event", "");
  if (event.empty()) {
    log.steps.push_back(step_from(json));
    return;
  }
  const int64_t step = json.value("step", int64_t{0});
  if (event == "run") log.run = run_from(json);
  if (event == "run" && log.started.empty()) log.started = log.run->started;
  if (event == "run") log.end.reset();  // what ended was an earlier part of the run
  if (event == "validation") log.validations.push_back({step, number_from(json.at("loss"))});
  if (event == "checkpoint")
    log.checkpoints.push_back(
        {step, json.value("tag", ""), json.value("bytes", int64_t{0}), number_at(json, "seconds")});
  if (event == "sample") log.samples.push_back({step, json.value("prompt", ""), json.value("text", "")});
  if (event == "end") {
    log.end = RunEnd{step,
                     json.value("reason", ""),
                     number_at(json, "seconds"),
                     json.value("peak_memory_bytes_of_rank", std::vector<int64_t>()),
                     json.value("peak_resident_bytes_of_rank", std::vector<int64_t>()),
                     json.value("peak_device_bytes_of_rank", std::vector<int64_t>())};
    log.seconds += log.end->seconds;
  }
}

}  // namespace

RunLog read_metrics(const std::filesystem::path& path) {
  const std::string text = posix_file_system().read(path);
  RunLog log;
  int64_t line_number = 0;
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    ++line_number;
    const Json json = parse_plain_json(text.substr(begin, end - begin));
    if (!json.is_object())
      throw DataError(str(path.string(), ":", line_number, ": not a JSON object; was the file edited?"));
    try {
      add(log, json);
    } catch (const Json::exception& error) {
      throw DataError(str(path.string(), ":", line_number, ": ", error.what()));
    }
  }
  return log;
}

}  // namespace trireme
