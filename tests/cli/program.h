// The `trireme` program as a child process.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace trireme::cli {

struct ProgramResult {
  int exit_code = -1;  ///< 128 + signal when a signal ended it
  std::string out;
  std::string err;

  std::string last_line() const;  ///< of out
};

/// Where a program's stdout and stderr go.
enum class Output {
  kFiles,
  kClosedPipe,  ///< a pipe that nobody reads any more, as behind `| head`
  kFullDisk,    ///< stdout is /dev/full, where no write succeeds; stderr a file
};

/// A running `trireme ARGUMENTS`, or another program when the first argument is a path. Killed by the destructor if it
/// still runs.
class Program {
 public:
  explicit Program(const std::vector<std::string>& arguments,
                   const std::map<std::string, std::string>& environment = {}, Output output = Output::kFiles);
  ~Program();
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  std::string err() const;  ///< so far
  void signal(int number) const;
  ProgramResult wait();

 private:
  const testing::TemporaryFolder folder_;
  const std::filesystem::path out_ = folder_ / "out";
  const std::filesystem::path err_ = folder_ / "err";
  pid_t pid_ = -1;
};

/// Runs it to its end.
ProgramResult run_program(const std::vector<std::string>& arguments,
                          const std::map<std::string, std::string>& environment = {}, Output output = Output::kFiles);

/// The program under test.
std::string program_path();

/// Its paths are texts, as words of a command line.
class TemporaryFolder : public testing::TemporaryFolder {
 public:
  std::string operator/(const std::string& name) const { return (path() / name).string(); }
};

std::string contents_of(const std::filesystem::path& path);

}  // namespace trireme::cli
