#include "trireme/base/launcher_channel.h"

#include <sys/socket.h>
#include <sys/stat.h>

#include <cstdio>
#include <cstring>

#include "trireme/base/environment.h"

namespace trireme {
namespace {

// The number that tells `socket` from every other file; 0: it is no socket.
unsigned long long identity_of(int socket) noexcept {
  struct stat info {};
  return fstat(socket, &info) == 0 && S_ISSOCK(info.st_mode) ? info.st_ino : 0;
}

// A message is one of these letters, and a PeerFailure or a text.
constexpr char kFailure = 'F';
constexpr char kRefusal = 'R';
constexpr size_t kMostBytes = 64 * 1024;

bool tell(const std::string& message) noexcept {
  const auto address = environment(kLauncherVariable);
  int socket = -1;
  unsigned long long identity = 0;
  if (!address || std::sscanf(address->c_str(), "%d:%llu", &socket, &identity) != 2) return false;
  // A program may have closed what it inherited and opened a file of its own under the same number.
  if (identity == 0 || identity_of(socket) != identity) return false;
  const ssize_t sent = send(socket, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  return sent == static_cast<ssize_t>(message.size());
}

}  // namespace

std::string launcher_address(int socket) { return str(socket, ":", identity_of(socket)); }

void tell_launcher(const PeerFailure& failure) noexcept {
  std::string message(1 + sizeof(failure), kFailure);
  std::memcpy(message.data() + 1, &failure, sizeof(failure));
  tell(message);
}

bool leave_to_launcher(std::string_view text) noexcept {
  return text.size() < kMostBytes && tell(kRefusal + std::string(text));
}

RankReport told_by_rank(int socket) {
  RankReport report;
  std::string message(kMostBytes, '\0');
  while (true) {
    const ssize_t bytes = recv(socket, message.data(), message.size(), MSG_DONTWAIT);
    if (bytes <= 0) return report;
    if (message[0] == kRefusal) report.refusal.assign(message, 1, static_cast<size_t>(bytes) - 1);
    if (message[0] != kFailure || bytes != 1 + static_cast<ssize_t>(sizeof(PeerFailure))) continue;
    std::memcpy(&report.failure.emplace(), message.data() + 1, sizeof(PeerFailure));
  }
}

}  // namespace trireme
