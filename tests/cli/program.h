// The `trireme` program as a child process.
#pragma once

#include <sys/types.h>

#include <filesystem>
#include <map>
#include <string>
#include <vector>

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
  std::filesystem::path out_;
  std::filesystem::path err_;
  pid_t pid_ = -1;
};

/// Runs it to its end.
ProgramResult run_program(const std::vector<std::string>& arguments,
                          const std::map<std::string, std::string>& environment = {}, Output output = Output::kFiles);

/// The program under test.
std::string program_path();

/// A folder that is removed with the object.
class TemporaryFolder {
 public:
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  /// Writes a file and returns its path.
  std::string write(const std::string& name, const std::string& text) const;

 private:
  std::filesystem::path path_;
};

std::string contents_of(const std::filesystem::path& path);

}  // namespace trireme::cli
