#include "trireme/base/launcher_channel.h"

#include <sys/socket.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstdlib>

namespace trireme {
namespace {

// The number that tells `socket` from every other file; 0: it is no socket.
unsigned long long identity_of(int socket) noexcept {
  struct stat info {};
  return fstat(socket, &info) == 0 && S_ISSOCK(info.st_mode) ? info.st_ino : 0;
}

}  // namespace

std::string launcher_address(int socket) { return str(socket, ":", identity_of(socket)); }

void tell_launcher(const PeerFailure& failure) noexcept {
  const char* address = std::getenv(kLauncherVariable);
  int socket = -1;
  unsigned long long identity = 0;
  if (address == nullptr || std::sscanf(address, "%d:%llu", &socket, &identity) != 2) return;
  // A program may have closed what it inherited and opened a file of its own under the same number.
  if (identity == 0 || identity_of(socket) != identity) return;
  send(socket, &failure, sizeof(failure), MSG_DONTWAIT | MSG_NOSIGNAL);
}

std::optional<PeerFailure> told_by_rank(int socket) noexcept {
  std::optional<PeerFailure> last;
  PeerFailure failure;
  while (recv(socket, &failure, sizeof(failure), MSG_DONTWAIT) == sizeof(failure)) last = failure;
  return last;
}

}  // namespace trireme
