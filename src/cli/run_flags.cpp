#include "cli/run_flags.h"

#include <unistd.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string_view>
#include <system_error>

#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/utf8.h"
#include "trireme/base/version.h"
#include "trireme/base/words.h"

namespace trireme::cli {
namespace {

using Path = std::filesystem::path;

constexpr const char* kRecord = "run.json";
constexpr const char* kTokenizer = "tokenizer";

// Flags of one start: which run, from which of its checkpoints, and what is shown of it.
bool is_of_one_start(const std::string& flag) {
  constexpr std::array<std::string_view, 6> kFlags{"--resume", "--resume-if-there", "--out",
                                                   "--tag",    "--quiet",           "--help"};
  return std::ranges::find(kFlags, flag) != kFlags.end();
}

// Flags whose values are in each sample and in the first weights. --data, --model and --tokenizer are compared by their
// contents (check_resume()), for files may have moved.
bool must_stay(const std::string& flag) {
  constexpr std::array<std::string_view, 7> kFlags{"--seq",     "--seed",      "--data-format", "--text-key",
                                                   "--exclude", "--eos-token", "--init-from"};
  return std::ranges::find(kFlags, flag) != kFlags.end();
}

// The flags --steps and --epochs: the one that was given takes the other's place.
bool has_other_length(const CLI::App& train, const std::string& flag) {
  return (flag == "--steps" && train.count("--epochs") > 0) || (flag == "--epochs" && train.count("--steps") > 0);
}

std::string name_of(const CLI::Option& option) { return "--" + option.get_lnames().front(); }

// A path as it is from any folder. Of --model only what is a file: others are names.
std::string absolute_path(const std::string& flag, const std::string& value) {
  std::error_code unreadable;
  const bool is_path = flag == "--data" || flag == "--tokenizer" || flag == "--init-from" ||
                       (flag == "--model" && std::filesystem::exists(value, unreadable));
  return is_path ? std::filesystem::absolute(value).lexically_normal().string() : value;
}

// As given. Of a flag that was repeated and takes one value the last counts.
std::vector<std::string> given_values(const CLI::Option& option) {
  std::vector<std::string> values = option.results();
  if (option.get_items_expected_max() <= 1 && values.size() > 1) values.erase(values.begin(), values.end() - 1);
  return values;
}

std::vector<std::string> values_of(const CLI::Option& option) {
  std::vector<std::string> values = given_values(option);
  for (std::string& value : values) value = absolute_path(name_of(option), value);
  return values;
}

std::string quoted(const std::string& word) {
  constexpr const char* kPlain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./+,:@%=";
  if (!word.empty() && word.find_first_not_of(kPlain) == std::string::npos) return word;
  std::string text = "'";
  for (const char letter : word) text += letter == '\'' ? "'\\''" : std::string(1, letter);
  return text + "'";
}

// `trireme` where a shell finds this program by that name, otherwise its path.
std::string program_name() {
  std::error_code unreadable;
  const Path self = std::filesystem::read_symlink("/proc/self/exe", unreadable);
  std::istringstream words(environment("PATH").value_or(""));
  for (std::string folder; std::getline(words, folder, ':');) {
    const Path found = Path(folder) / "trireme";
    if (::access(found.c_str(), X_OK) == 0)
      return std::filesystem::equivalent(found, self, unreadable) ? "trireme" : self.string();
  }
  return self.empty() ? "trireme" : self.string();
}

Json read_record(const Path& run) {
  const Path path = run / kRecord;
  std::error_code unreadable;
  if (!std::filesystem::exists(path, unreadable)) return Json::object();
  try {
    const Json record = read_json(path);
    if (record.is_object() && record.value("flags", Json()).is_object()) return record["flags"];
  } catch (const Error& error) {
    throw ConfigError(str("--resume: ", error.what(), "; remove the file, and give the run's flags again"));
  }
  throw ConfigError(str("--resume: ", path.string(),
                        ": this is no record of a run; remove the file, and give the run's flags again"));
}

// Both files of a tokenizer, as a folder in Hugging Face's form has them.
void copy_tokenizer(const Path& file_or_folder, const Path& to) {
  FileSystem& files = posix_file_system();
  std::error_code unreadable;
  const bool is_folder = std::filesystem::is_directory(file_or_folder, unreadable);
  const Path from = is_folder ? file_or_folder / "tokenizer.json" : file_or_folder;
  const std::string tokenizer = files.read(from);  // which may lie where the copy goes
  const Path beside = from.parent_path() / "tokenizer_config.json";
  files.create_directories(to);
  if (files.exists(beside)) write_file_atomically(files, to / "tokenizer_config.json", files.read(beside));
  write_file_atomically(files, to / "tokenizer.json", tokenizer);
}

}  // namespace

RunFlags flags_of_run(const CLI::App& train, const std::string& config) {
  Json flags = Json::object();
  RunFlags kept{.json = "", .command = quoted(program_name()) + " train", .config_name = "", .config_text = ""};
  for (const CLI::Option* option : train.get_options()) {
    if (option->count() == 0 || option->get_lnames().empty() || is_of_one_start(name_of(*option))) continue;
    const std::vector<std::string> values = values_of(*option);
    for (const std::string& value : values)
      if (!is_utf8(value))
        throw ConfigError(str(name_of(*option), " '", excerpt(value),
                              "': not UTF-8, as which the run's folder keeps it; "
                              "rename the file"));
    flags[name_of(*option)] = values;
    const bool has_value = option->get_items_expected_max() > 0;
    if (!has_value) kept.command += " " + name_of(*option);
    for (const std::string& value : values)
      if (has_value) kept.command += " " + name_of(*option) + " " + quoted(value);
  }
  if (!config.empty()) {
    kept.config_name = str("given_config", Path(config).extension().string());
    kept.config_text = read_config_text(config);
    flags["--config"] = std::vector<std::string>{kept.config_name};
  }
  if (flags.contains("--tokenizer")) {
    kept.tokenizer = flags["--tokenizer"][0].get<std::string>();
    flags["--tokenizer"] = std::vector<std::string>{kTokenizer};
  }
  kept.json = Json{{"trireme", kVersion}, {"flags", flags}}.dump(2) + "\n";
  return kept;
}

Path tokenizer_of_run(const Path& run) { return run / kTokenizer; }

void write_run_flags(const RunFlags& flags, const Path& run) {
  if (!flags.tokenizer.empty()) copy_tokenizer(flags.tokenizer, tokenizer_of_run(run));
  if (!flags.config_name.empty())
    write_file_atomically(posix_file_system(), run / flags.config_name, flags.config_text);
  write_file_atomically(posix_file_system(), run / kRecord, flags.json);
}

void restore_flags(CLI::App& train, const Restoring& from) {
  const Json record = read_record(from.run);
  for (CLI::Option* option : train.get_options()) {
    if (record.empty() || option->get_lnames().empty()) continue;
    const std::string flag = name_of(*option);
    if (is_of_one_start(flag)) continue;
    std::vector<std::string> values;
    for (const Json& value : record.value(flag, Json::array())) values.push_back(value.get<std::string>());
    if (option->count() > 0) {
      if (values.empty() && !option->get_default_str().empty()) values.push_back(option->get_default_str());
      if (must_stay(flag) && values_of(*option) != values)
        throw ConfigError(str(flag, " ", joined(given_values(*option), " "), ": the run in ", from.run.string(),
                              " was started with ",
                              values.empty() ? str("no ", flag) : str(flag, " ", joined(values, " ")),
                              "; leave the flag out, or choose another --out"));
      continue;
    }
    const bool is_left = (flag == "--ranks" && !from.takes_ranks) || (flag == "--init-from" && from.has_checkpoint) ||
                         has_other_length(train, flag);
    if (values.empty() || is_left) continue;
    if (flag == "--config" || flag == "--tokenizer") values.front() = (from.run / values.front()).string();
    option->add_result(values);
    option->run_callback();
  }
}

std::string resume_command(const Path& run, bool has_checkpoint) {
  return str(quoted(program_name()), " train ", has_checkpoint ? "--resume" : "--resume-if-there", " --out ",
             quoted(run.string()));
}

}  // namespace trireme::cli
