// Flags and configuration that a run was started with, kept in its folder: run.json has the flags, given_config.* the
// configuration file. From them `trireme train --resume --out DIR` goes on.
#pragma once

#include <filesystem>
#include <string>

namespace CLI {
class App;
}

namespace trireme::cli {

/// The flags of a run and its configuration, as they will stand in its folder.
struct RunFlags {
  std::string json;              ///< text of run.json
  std::string command;           ///< line with all flags, as a shell takes it
  std::string config_name = {};  ///< such as given_config.json; empty: no configuration was given
  std::string config_text = {};
  std::filesystem::path tokenizer = {};  ///< tokenizer.json or its folder, of which a copy goes along; empty: none
};

/// The folder in that of a run that has the copy of its tokenizer's files.
std::filesystem::path tokenizer_of_run(const std::filesystem::path& run);

/// The flags of `train` that were given, or restored. Paths are absolute, so that any folder can go on with them.
/// `config` is the configuration's path, or empty. Throws IoError.
RunFlags flags_of_run(const CLI::App& train, const std::string& config);

/// Writes both files of `flags` into the folder of the run. Throws IoError.
void write_run_flags(const RunFlags& flags, const std::filesystem::path& run);

struct Restoring {
  std::filesystem::path run;
  bool takes_ranks = true;  ///< false: a launcher has decided how many there are
  bool has_checkpoint = true;
};

/// Sets the flags of `train` that were not given to those of the run, where it has any on record.
///
/// Throws    ConfigError: a flag that was given says something else than the run's and decides over samples or first
///           weights; names flag, value and fix. The record cannot be read.
void restore_flags(CLI::App& train, const Restoring& from);

/// The command that goes on with a run, as a shell takes it: program, `train --resume --out DIR`. Of a run without a
/// checkpoint it begins anew.
std::string resume_command(const std::filesystem::path& run, bool has_checkpoint = true);

}  // namespace trireme::cli
