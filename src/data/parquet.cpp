#include "data/parquet.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "data/parquet_column_text.h"
#include "trireme/base/environment.h"
#include "trireme/base/error.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

constexpr std::string_view kParquetMagic = "PAR1";
constexpr size_t kParquetProbeBytes = 8192;
constexpr size_t kMostShown = 4000;  // of an error that names columns

std::string_view as_text(std::span<const std::byte> file) {
  return {reinterpret_cast<const char*>(file.data()), file.size()};
}

/// A descriptor that is closed with the object.
class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() { close(); }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const noexcept { return fd_; }
  void close() noexcept {
    if (const int fd = std::exchange(fd_, -1); fd >= 0) ::close(fd);
  }

 private:
  int fd_;
};

struct Frame {
  char kind = 0;  ///< 0: there is none, for the process has ended
  uint64_t count = 0;
  std::vector<int64_t> offsets = {};
  std::string bytes = {};
};

}  // namespace

/// A Python that runs parquet_column.py, killed with the object: it has nothing to lose.
class ParquetReader::Process {
 public:
  Process(const std::string& python, Descriptor& theirs, int ours) : socket_(ours), log_(log_file()) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDIN_FILENO);
    posix_spawn_file_actions_adddup2(&actions, theirs.get(), STDOUT_FILENO);
    posix_spawn_file_actions_adddup2(&actions, log_.get(), STDERR_FILENO);
    posix_spawnattr_t attributes;
    posix_spawnattr_init(&attributes);
    posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);  // Ctrl-C is ours to answer
    std::string words[] = {python, "-c", kParquetColumnText};
    char* argv[] = {words[0].data(), words[1].data(), words[2].data(), nullptr};
    failure_ = posix_spawnp(&pid_, argv[0], &actions, &attributes, argv, environ);
    posix_spawnattr_destroy(&attributes);
    posix_spawn_file_actions_destroy(&actions);
    if (failure_ != 0) pid_ = -1;
    theirs.close();
  }
  ~Process() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    (void)wait();
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Empty where pyarrow is there, else the reason.
  std::string not_ready() {
    if (failure_ != 0) return std::strerror(failure_);
    const Frame frame = receive();
    if (frame.kind == 'R') return "";
    return frame.kind == 'X' ? frame.bytes : end();
  }

  void ask(const std::string& path, const std::string& column) {
    const uint64_t sizes[] = {path.size(), column.size()};
    const std::string request = std::string(reinterpret_cast<const char*>(sizes), sizeof(sizes)) + path + column;
    for (std::string_view rest = request; !rest.empty();) {
      const ssize_t sent = ::send(socket_.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno == EINTR) continue;
      if (sent <= 0) return;  // it has ended, which receive() tells
      rest.remove_prefix(static_cast<size_t>(sent));
    }
  }

  Frame receive() {
    Frame frame;
    char kind = 0;
    uint64_t sizes[2] = {};  // texts, bytes
    if (!read(&kind, 1) || !read(sizes, sizeof(sizes))) return {};
    if (std::string_view("RTEX").find(kind) == std::string_view::npos) return {};
    if (kind == 'T') {
      frame.offsets.resize(sizes[0] + 1);
      if (!read(frame.offsets.data(), frame.offsets.size() * sizeof(int64_t))) return {};
      sizes[1] -= frame.offsets.size() * sizeof(int64_t);
    }
    frame.bytes.resize(sizes[1]);
    if (!read(frame.bytes.data(), frame.bytes.size())) return {};
    frame.kind = kind;
    frame.count = sizes[0];
    return frame;
  }

  /// How the process has ended, and its last words.
  std::string end() {
    socket_.close();  // what does not speak as it should ends by this
    const int status = wait();
    const std::string how = WIFSIGNALED(status)
                                ? str("ended by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")")
                                : str("ended with status ", WEXITSTATUS(status));
    const std::string words = last_line();
    return words.empty() ? how : str(how, ": ", words);
  }

 private:
  static int log_file() {
    const int log = ::memfd_create("trireme-parquet", MFD_CLOEXEC);
    return log >= 0 ? log : ::open("/dev/null", O_RDWR | O_CLOEXEC);
  }

  bool read(void* out, size_t bytes) {
    auto* to = static_cast<char*>(out);
    while (bytes > 0) {
      const ssize_t got = ::recv(socket_.get(), to, bytes, MSG_WAITALL);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return false;
      to += got;
      bytes -= static_cast<size_t>(got);
    }
    return true;
  }

  int wait() {
    int status = 0;
    while (::waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
    }
    pid_ = -1;
    return status;
  }

  std::string last_line() const {
    char text[2048];
    const off_t end = ::lseek(log_.get(), 0, SEEK_END);
    const ssize_t got =
        ::pread(log_.get(), text, sizeof(text), std::max<off_t>(0, end - static_cast<off_t>(sizeof(text))));
    std::string_view line(text, static_cast<size_t>(std::max<ssize_t>(0, got)));
    while (line.ends_with('\n')) line.remove_suffix(1);
    return excerpt(line.substr(line.rfind('\n') + 1));
  }

  Descriptor socket_;
  Descriptor log_;  // its stderr
  pid_t pid_ = -1;  // -1: it has been waited for
  int failure_ = 0;
};

bool begins_as_parquet(std::span<const std::byte> file) {
  const std::string_view text = as_text(file.first(std::min(file.size(), kParquetProbeBytes)));
  return text.starts_with(kParquetMagic) && text.find('\0') != text.npos;
}

bool ends_as_parquet(std::span<const std::byte> file) {
  constexpr size_t kLeastBytes = 12;  // both magics, and the length of what stands between
  return file.size() >= kLeastBytes && as_text(file).ends_with(kParquetMagic);
}

ParquetReader::ParquetReader(std::string python) : python_(std::move(python)) {}
ParquetReader::~ParquetReader() = default;

std::unique_ptr<ParquetReader::Process> ParquetReader::started(const std::string& path) const {
  const std::string named = environment("TRIREME_PYTHON").value_or("");
  std::vector<std::string> pythons;
  for (const std::string& python : {python_.empty() ? named : python_, std::string("python3")})
    if (!python.empty() && std::find(pythons.begin(), pythons.end(), python) == pythons.end())
      pythons.push_back(python);
  std::string reasons;
  for (const std::string& python : pythons) {
    int pair[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
      throw IoError(str(path, ": no socket for a reader of Parquet: ", std::strerror(errno)));
    Descriptor theirs(pair[1]);
    auto process = std::make_unique<Process>(python, theirs, pair[0]);
    const std::string reason = process->not_ready();
    if (reason.empty()) return process;
    reasons += str(reasons.empty() ? "" : ", ", python, " has none (", excerpt(reason), ")");
  }
  throw DataError(str(path, ": Parquet is read by Python's package pyarrow, and ", reasons,
                      "; install it: ", pythons.front(),
                      " -m pip install pyarrow; or name a Python that has it by TRIREME_PYTHON; or "
                      "write the texts as JSON lines where pandas is: pandas.read_parquet(\"",
                      path, "\").to_json(\"data.jsonl\", orient=\"records\", lines=True)"));
}

void ParquetReader::each_text(const std::string& path, const std::string& column,
                              const std::function<void(std::string_view)>& take) {
  auto process = process_ ? std::move(process_) : started(path);  // after an error it is not used again
  process->ask(path, column);
  for (int64_t row = 0;;) {
    const Frame frame = process->receive();
    if (frame.kind == 'E') break;
    if (frame.kind == 'X')
      throw DataError(
          str(path, frame.count > 0 ? str(", row ", frame.count) : "", ": ", excerpt(frame.bytes, kMostShown)));
    if (frame.kind != 'T')
      throw DataError(str(path, ": the Python that reads it has ", process->end(),
                          "; copy or download the file again, or, where memory was short, write it with smaller row "
                          "groups"));
    for (size_t i = 0; i + 1 < frame.offsets.size(); ++i) {
      ++row;
      const auto text = std::string_view(frame.bytes)
                            .substr(static_cast<size_t>(frame.offsets[i] - frame.offsets[0]),
                                    static_cast<size_t>(frame.offsets[i + 1] - frame.offsets[i]));
      if (!is_utf8(text))
        throw DataError(str(path, ", row ", row, ": `", column, "` is not UTF-8, so it is no text; mend it, or name ",
                            "another column by --text-key"));
      if (text.find('\0') != text.npos)
        throw DataError(str(path, ", row ", row, ": `", column,
                            "` has the character \\u0000, which ends documents here; take it out"));
      if (!text.empty()) take(text);
    }
  }
  process_ = std::move(process);
}

}  // namespace trireme
