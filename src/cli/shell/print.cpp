#include "cli/shell/print.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "trireme/base/error.h"

namespace trireme::cli {

int write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const auto bytes = write(fd, text.data(), text.size());
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes < 0 && errno == EAGAIN) {  // stdout may be a pipe that its other end made non-blocking
      pollfd wait{fd, POLLOUT, 0};
      poll(&wait, 1, -1);
      continue;
    }
    if (bytes < 0) return errno;
    text.remove_prefix(static_cast<size_t>(bytes));
  }
  return 0;
}

void print_result(const std::string& text) {
  const int error = write_all(STDOUT_FILENO, text);
  if (error != 0 && error != EPIPE) throw IoError(lost_output(error));
}

std::string lost_output(int error) {
  return str("stdout: ", std::strerror(error), "; not all of the output was written: send it elsewhere");
}

}  // namespace trireme::cli
