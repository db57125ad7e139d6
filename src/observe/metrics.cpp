#include "trireme/observe/metrics.h"

#include <fcntl.h>
#include <torch/version.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>
#include <string_view>
#include <system_error>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/file_limit.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/version.h"

namespace trireme {
namespace {

[[noreturn]] void fail(const std::filesystem::path& path, const char* operation) {
  throw IoError(str(path.string(), ": ", operation,
                    " failed: ", std::error_code(errno, std::generic_category()).message(), write_error_fix(errno)));
}

ssize_t write_some(int file, std::string_view text) {
  const FileLimitScope limit;
  return ::write(file, text.data(), text.size());
}

int open_for_append(const std::filesystem::path& path, int flags) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | flags, 0666);
  if (file < 0) fail(path, "open for writing");
  return file;
}

/// JSON has no word for numbers that are not finite, and a diverged loss must not look like a missing one.
Json number(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

Json parse_object(const std::string& text, std::string_view what) {
  Json json = parse_plain_json(text);
  if (!json.is_object())
    throw StateError(str("metrics: ", what, " must be the text of a JSON object, got ", text.substr(0, 100)));
  return json;
}

/// The lines that stay when training continues after `resumed_step`.
std::string lines_up_to(const std::string& text, int64_t resumed_step) {
  std::string kept;
  for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
    const std::string line = text.substr(begin, end - begin + 1);
    const Json json = parse_plain_json(line);
    if (!json.is_object()) continue;  // torn by an earlier crash
    const bool later = json.contains("step") && json["step"].is_number() && json["step"].get<int64_t>() > resumed_step;
    if (!later) kept += line;
  }
  return kept;
}

}  // namespace

MemoryUse memory_use() {
  MemoryUse use;
  std::FILE* file = std::fopen("/proc/self/smaps_rollup", "re");
  if (!file) return use;
  char line[256];
  while (std::fgets(line, sizeof line, file)) {
    long long kilobytes = 0;
    if (std::sscanf(line, "Rss: %lld kB", &kilobytes) == 1) use.rss_bytes = kilobytes * 1024;
    if (std::sscanf(line, "Pss: %lld kB", &kilobytes) == 1) use.pss_bytes = kilobytes * 1024;
  }
  std::fclose(file);
  return use;
}

// getrusage() would also count what the program that forked this one had resident.
int64_t peak_resident_bytes() {
  std::FILE* file = std::fopen("/proc/self/status", "re");
  if (!file) return 0;
  char line[256];
  long long kilobytes = 0;
  while (std::fgets(line, sizeof line, file))
    if (std::sscanf(line, "VmHWM: %lld kB", &kilobytes) == 1) break;
  std::fclose(file);
  return kilobytes * 1024;
}

std::string utc_now() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char text[64];
  std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts);
  return text;
}

std::string software_versions() { return str("Trireme ", kVersion, ", torch ", TORCH_VERSION); }

std::string host_name() {
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "";
}

MetricsWriter::MetricsWriter(const std::filesystem::path& path) : path_(path), file_(open_for_append(path, O_TRUNC)) {}

MetricsWriter::MetricsWriter(const std::filesystem::path& path, int64_t resumed_step) : path_(path) {
  FileSystem& files = posix_file_system();
  if (files.exists(path)) write_file_atomically(files, path, lines_up_to(files.read(path), resumed_step));
  file_ = open_for_append(path, 0);
}

MetricsWriter::~MetricsWriter() { ::close(file_); }

void MetricsWriter::write_line(const std::string& line) {
  const std::string text = line + '\n';
  for (size_t done = 0; done < text.size();) {
    const ssize_t written = write_some(file_, std::string_view(text).substr(done));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail(path_, "write");
    done += static_cast<size_t>(written);
  }
}

void MetricsWriter::run(const RunInfo& info) {
  Json fields = {{"model", info.model}, {"parameters", info.parameters},
                 {"ranks", info.ranks}, {"zero_stage", info.zero_stage},
                 {"dtype", info.dtype}, {"total_steps", info.total_steps},
                 {"data", info.data},   {"config", parse_object(info.config, "the configuration")}};
  if (info.flops_per_token > 0) fields["flops_per_token"] = info.flops_per_token;
  if (info.peak_tflops) fields["peak_tflops"] = number(*info.peak_tflops);
  const std::pair<const char*, const std::string&> origin[] = {
      {"started", info.started}, {"host", info.host}, {"command", info.command}, {"versions", info.versions}};
  for (const auto& [key, value] : origin)
    if (!value.empty()) fields[key] = value;
  // A path need not be UTF-8.
  event("run", info.first_step, fields.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void MetricsWriter::step(const StepMetrics& metrics) {
  Json json = {{"step", metrics.step}};
  if (metrics.samples > 0) json["samples"] = metrics.samples;
  if (metrics.tokens > 0) json["tokens"] = metrics.tokens;
  if (metrics.loss) json["loss"] = number(*metrics.loss);
  json["lr"] = number(metrics.learning_rate);
  if (metrics.grad_norm) json["grad_norm"] = number(*metrics.grad_norm);
  json["step_ms"] = number(metrics.step_ms);
  if (metrics.tokens_per_s != 0) json["tokens_per_s"] = number(metrics.tokens_per_s);
  if (metrics.tflops_per_rank) json["tflops_per_rank"] = number(*metrics.tflops_per_rank);
  if (metrics.mfu) json["mfu"] = number(*metrics.mfu);
  if (const auto& disk = metrics.disk)
    json["disk"] = {{"bytes", disk->bytes},
                    {"read_bytes", disk->read_bytes},
                    {"written_bytes", disk->written_bytes},
                    {"wait_ms", number(disk->wait_ms)}};
  if (metrics.memory.pss_bytes > 0) json["pss_bytes"] = metrics.memory.pss_bytes;
  if (metrics.memory.rss_bytes > 0) json["rss_bytes"] = metrics.memory.rss_bytes;
  json["skipped_steps"] = metrics.skipped_steps;
  if (metrics.loss_scale) json["loss_scale"] = number(*metrics.loss_scale);
  write_line(json.dump());
}

void MetricsWriter::validation(int64_t step, double loss) {
  event("validation", step, Json{{"loss", number(loss)}}.dump());
}

void MetricsWriter::checkpoint(const CheckpointEvent& saved) {
  event("checkpoint", saved.step,
        Json{{"tag", saved.tag}, {"bytes", saved.bytes}, {"seconds", number(saved.seconds)}}.dump());
}

void MetricsWriter::sample(int64_t step, const std::string& prompt, const std::string& text) {
  // A byte-level model may well produce bytes that are no UTF-8: they become U+FFFD.
  event("sample", step, Json{{"prompt", prompt}, {"text", text}}.dump(-1, ' ', false, Json::error_handler_t::replace));
}

void MetricsWriter::end(const RunEnd& end) {
  event("end", end.step,
        Json{{"reason", end.reason},
             {"seconds", number(end.seconds)},
             {"peak_memory_bytes_of_rank", end.peak_memory_bytes_of_rank},
             {"peak_resident_bytes_of_rank", end.peak_resident_bytes_of_rank},
             {"peak_device_bytes_of_rank", end.peak_device_bytes_of_rank}}
            .dump(-1, ' ', false, Json::error_handler_t::replace));
}

void MetricsWriter::event(std::string_view name, int64_t step, const std::string& fields) {
  Json json = {{"event", name}, {"step", step}};
  const Json more = parse_object(fields, name);
  for (const auto& [key, value] : more.items()) json[key] = value;
  write_line(json.dump());
}

}  // namespace trireme
