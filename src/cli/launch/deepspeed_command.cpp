#include "cli/launch/deepspeed_command.h"

#include <filesystem>
#include <optional>

#include "cli/launch/rank_process.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme::cli {
namespace {

constexpr const char* kMark = "# Made by `trireme deepspeed --install`.";

// The command that was typed. Of a wheel it is a Python script, which says where it is and becomes this program.
std::filesystem::path own_command() {
  const auto command = environment("TRIREME_COMMAND");
  return command ? std::filesystem::path(*command) : std::filesystem::read_symlink("/proc/self/exe");
}

bool is_ours(const std::filesystem::path& command) {
  FileSystem& files = posix_file_system();
  return files.exists(command) && files.read(command).find(kMark) != std::string::npos;
}

std::optional<std::filesystem::path> along_path(const std::string& name) {
  try {
    return find_program(name);
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

// Inside single quotes a shell obeys nothing but their end.
std::string quoted(const std::string& text) {
  std::string result = "'";
  for (const char letter : text) result += letter == '\'' ? std::string("'\\''") : std::string(1, letter);
  return result + "'";
}

}  // namespace

std::string install_deepspeed_command() {
  const auto trireme = own_command();
  const auto made = trireme.parent_path() / "deepspeed";
  std::error_code ignored;
  const auto other = std::filesystem::exists(made, ignored) ? made : along_path("deepspeed");
  if (other && !is_ours(*other))
    throw ConfigError(
        str("--install: there is a command ", other->string(),
            " already, of DeepSpeed's own; uninstall DeepSpeed first, or type `trireme deepspeed` instead"));
  write_file_atomically(posix_file_system(), made,
                        str("#!/bin/sh\n", kMark, "\nexec ", quoted(trireme.string()), " deepspeed \"$@\"\n"));
  using std::filesystem::perms;
  std::filesystem::permissions(made, perms(0755), ignored);
  return str("made ", made.string());
}

}  // namespace trireme::cli
