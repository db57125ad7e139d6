// The child process behind the tests of the program, and the test that it is there at all.
#include "tests/cli/program.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>

namespace trireme::cli {
namespace {

// In the child: the write end of a pipe without a reader.
int closed_pipe() {
  int ends[2];
  if (pipe(ends) != 0) _exit(127);
  close(ends[0]);
  return ends[1];
}

}  // namespace

// ctest says where the program is; by hand it lies beside the folder of the tests.
std::string program_path() {
  if (const char* path = std::getenv("TRIREME_PROGRAM")) return path;
  const auto self = std::filesystem::read_symlink("/proc/self/exe");
  return (self.parent_path().parent_path() / "bin" / "trireme").string();
}

std::string contents_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string ProgramResult::last_line() const {
  const std::string text = out.ends_with('\n') ? out.substr(0, out.size() - 1) : out;
  const auto newline = text.rfind('\n');
  return newline == std::string::npos ? text : text.substr(newline + 1);
}

Program::Program(const std::vector<std::string>& arguments, const std::map<std::string, std::string>& environment,
                 Output output) {
  std::vector<std::string> words;
  if (!arguments[0].starts_with("/")) words.push_back(program_path());
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (auto& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = fork();
  if (pid_ != 0) return;
  for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
  const bool is_closed = output == Output::kClosedPipe;
  const char* out = output == Output::kFullDisk ? "/dev/full" : out_.c_str();
  dup2(is_closed ? closed_pipe() : open(out, O_WRONLY | O_CREAT, 0600), STDOUT_FILENO);
  dup2(is_closed ? closed_pipe() : open(err_.c_str(), O_WRONLY | O_CREAT, 0600), STDERR_FILENO);
  ::signal(SIGPIPE, SIG_DFL);  // as a shell starts programs, whatever this test was started by
  execv(argv[0], argv.data());
  _exit(127);
}

Program::~Program() {
  if (pid_ > 0) {
    signal(SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
}

std::string Program::err() const { return contents_of(err_); }

void Program::signal(int number) const { kill(pid_, number); }

ProgramResult Program::wait() {
  int status = 0;
  waitpid(pid_, &status, 0);
  pid_ = -1;
  return {WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status), contents_of(out_), contents_of(err_)};
}

ProgramResult run_program(const std::vector<std::string>& arguments,
                          const std::map<std::string, std::string>& environment, Output output) {
  return Program(arguments, environment, output).wait();
}

TEST(Program, PrintsItsVersion) {
  const auto done = run_program({"--version"});
  EXPECT_EQ(done.exit_code, 0);
  EXPECT_EQ(done.out, "trireme 0.1.0\n");
}

}  // namespace trireme::cli
