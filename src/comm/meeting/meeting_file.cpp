#include "comm/meeting/meeting_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>

#include "trireme/base/error.h"
#include "trireme/base/format.h"

namespace trireme::comm {
namespace {

[[noreturn]] void refuse_file(const std::string& path, const std::string& problem) {
  throw ConfigError(str("the ranks would meet at ", path, ", but ", problem,
                        "; let them meet at an address: mpirun -x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=29500 …"));
}

bool others_may_write(const struct stat& about) { return (about.st_mode & (S_IWGRP | S_IWOTH)) != 0; }

std::string mode_of(const struct stat& about) { return formatted("{:04o}", about.st_mode & 07777); }

void check_folder(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path();
  struct stat about {};
  if (::stat(folder.c_str(), &about) != 0) throw IoError(str("folder ", folder, ": ", std::strerror(errno)));
  if (about.st_uid != ::geteuid() && about.st_uid != 0)
    refuse_file(path, str("folder ", folder, " is user ", about.st_uid, "'s, not user ", ::geteuid(), "'s"));
  if (others_may_write(about) && (about.st_mode & S_ISVTX) == 0)
    refuse_file(
        path, str("others may replace files in folder ", folder, " (mode ", mode_of(about), "): chmod go-w ", folder));
}

}  // namespace

void prepare_meeting_file(const std::string& path) {
  check_folder(path);
  // No link is followed, and nothing waits: a pipe would.
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
  const int error = errno;
  if (fd < 0 && error == ELOOP) refuse_file(path, "it is a link");
  struct stat about {};
  const bool is_known = (fd < 0 ? ::lstat(path.c_str(), &about) : ::fstat(fd, &about)) == 0;
  if (fd >= 0) ::close(fd);
  if (is_known && about.st_uid != ::geteuid())
    refuse_file(path, str("it is user ", about.st_uid, "'s, not user ", ::geteuid(), "'s"));
  if (fd < 0 || !is_known) throw IoError(str("file ", path, ": ", std::strerror(error)));
  if (!S_ISREG(about.st_mode)) refuse_file(path, "it is no file");
  if (about.st_nlink > 1) refuse_file(path, "it has another name, too");
  if (others_may_write(about)) refuse_file(path, str("others may write it (mode ", mode_of(about), "): remove it"));
}

}  // namespace trireme::comm
