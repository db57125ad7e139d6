#include "observe/append_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/file_limit.h"

namespace trireme {
namespace {

[[noreturn]] void fail_to(const char* operation, const std::filesystem::path& path, int error) {
  throw IoError(str(path.string(), ": ", operation,
                    " failed: ", std::error_code(error, std::generic_category()).message(), write_error_fix(error)));
}

}  // namespace

AppendFile::AppendFile(std::filesystem::path path, Open open) : path_(std::move(path)) {
  const int flags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | (open == Open::kNew ? O_EXCL : 0);
  file_ = ::open(path_.c_str(), flags, 0666);
  if (file_ < 0) fail_to("open for writing", path_, errno);
  struct stat status {};
  if (::fstat(file_, &status) != 0) {
    const int error = errno;
    ::close(file_);
    fail_to("stat", path_, error);
  }
  bytes_ = status.st_size;
}

AppendFile::~AppendFile() { ::close(file_); }

void AppendFile::append(std::string_view record) {
  const FileLimitScope limit;
  for (std::string_view rest = record; !rest.empty();) {
    const ssize_t written = ::write(file_, rest.data(), rest.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      // The part of the record that is there goes. Where even that fails, a reader meets a torn record.
      (void)!::ftruncate(file_, bytes_);
      fail_to("write", path_, error);
    }
    rest.remove_prefix(static_cast<size_t>(written));
  }
  bytes_ += static_cast<int64_t>(record.size());
}

}  // namespace trireme
