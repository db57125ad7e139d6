#include "cli/launch/pid_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "cli/launch/rank_process.h"
#include "cli/shell/print.h"
#include "trireme/base/error.h"

namespace trireme::cli {

// A link or a file that somebody else has put there is not written through.
PidFile::PidFile() : path_(str("/tmp/", getpid(), ".ds")) {
  const Fd file(open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0644));
  const int error = file.is_open() ? write_all(file.get(), std::to_string(getpid())) : errno;
  if (error == 0) return;
  throw ConfigError(
      str("--save_pid: ", path_.string(), ": ", std::strerror(error), "; remove it, or leave the flag out"));
}

PidFile::~PidFile() {
  std::error_code ignored;
  std::filesystem::remove(path_, ignored);
}

}  // namespace trireme::cli
