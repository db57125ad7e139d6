#include "cli/run_lock.h"

#include <fcntl.h>
#include <sys/file.h>

#include <cerrno>
#include <cstring>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme::cli {
namespace {

constexpr const char* kName = "lock";

// A lock of the open file, not of the process: closed on exec, so that no child holds it.
Fd open_lock(const std::filesystem::path& folder, int flags) {
  return Fd(open((folder / kName).c_str(), flags | O_CLOEXEC, 0666));
}

[[noreturn]] void refuse(const std::filesystem::path& folder, const std::string& what) {
  throw ConfigError(str("--out ", folder.string(), ": ", what));
}

}  // namespace

RunLock::RunLock(const std::filesystem::path& folder) {
  if (!lock(folder)) refuse(folder, "another run writes there; wait until it has ended, or choose another folder");
}

std::optional<RunLock> RunLock::try_lock(const std::filesystem::path& folder) {
  RunLock made;
  if (!made.lock(folder)) return std::nullopt;
  return made;
}

bool RunLock::lock(const std::filesystem::path& folder) {
  std::error_code reason, unreadable;
  std::filesystem::create_directories(folder, reason);
  if (std::filesystem::is_regular_file(folder, unreadable)) refuse(folder, "this is a file; name a folder");
  if (reason) refuse(folder, str("the folder cannot be made: ", reason.message(), "; choose another folder"));
  file_ = open_lock(folder, O_RDWR | O_CREAT);
  if (!file_.is_open())
    refuse(folder, str("no file can be written there: ", std::strerror(errno), "; choose another folder"));
  if (flock(file_.get(), LOCK_EX | LOCK_NB) == 0) return true;
  if (errno == EWOULDBLOCK) return false;
  log(LogLevel::kWarning, str("--out ", folder.string(), ": this file system has no locks (", std::strerror(errno),
                              "), so nothing keeps a second run from writing there"));
  return true;
}

bool is_locked(const std::filesystem::path& folder) {
  const Fd file = open_lock(folder, O_RDONLY);
  return file.is_open() && flock(file.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

}  // namespace trireme::cli
