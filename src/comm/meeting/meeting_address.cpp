#include "comm/meeting/meeting_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <thread>
#include <vector>

#include "trireme/base/error.h"

namespace trireme::comm {
namespace {

constexpr std::chrono::seconds kAskEvery{1};

struct Endpoint {
  sockaddr_storage storage{};
  socklen_t length = 0;

  const sockaddr* generic() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
};

Endpoint endpoint_of(const std::string& address, bool is_ipv6, uint16_t port) {
  Endpoint made;
  if (is_ipv6) {
    auto& to = reinterpret_cast<sockaddr_in6&>(made.storage);
    to.sin6_family = AF_INET6;
    to.sin6_port = htons(port);
    if (!address.empty()) ::inet_pton(AF_INET6, address.c_str(), &to.sin6_addr);
    made.length = sizeof(to);
  } else {
    auto& to = reinterpret_cast<sockaddr_in&>(made.storage);
    to.sin_family = AF_INET;
    to.sin_port = htons(port);
    if (!address.empty()) ::inet_pton(AF_INET, address.c_str(), &to.sin_addr);
    made.length = sizeof(to);
  }
  return made;
}

/// One attempt to listen.
struct Listening {
  int fd = -1;
  int error = 0;
};

Listening try_to_listen(const Endpoint& endpoint) {
  const int fd = ::socket(endpoint.family(), SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return {.error = errno};
  const int one = 1;
  const int zero = 0;
  ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  // All addresses of IPv6 are those of IPv4, too.
  if (endpoint.family() == AF_INET6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &zero, sizeof(zero));
  if (::bind(fd, endpoint.generic(), endpoint.length) == 0 && ::listen(fd, SOMAXCONN) == 0) return {.fd = fd};
  const int error = errno;
  ::close(fd);
  return {.error = error};
}

/// The sockets that listen at a port, as /proc/net/tcp and tcp6 have them: address in hexadecimal, and owner.
struct ListeningSocket {
  std::string address;
  uid_t owner;
};

std::vector<ListeningSocket> sockets_at(const char* table, uint16_t port) {
  std::vector<ListeningSocket> found;
  std::ifstream file(table);
  std::string line;
  std::getline(file, line);  // the names of the columns
  while (std::getline(file, line)) {
    std::string number, local, remote, state, queues, timer, retransmits;
    uid_t owner = 0;
    if (!(std::istringstream(line) >> number >> local >> remote >> state >> queues >> timer >> retransmits >> owner))
      continue;
    const auto colon = local.rfind(':');
    const bool listens = state == "0A";
    if (listens && colon != std::string::npos && std::stoul(local.substr(colon + 1), nullptr, 16) == port)
      found.push_back({local.substr(0, colon), owner});
  }
  return found;
}

/// As the kernel prints an address in those tables: words of 32 bits, each as the machine reads it.
std::string kernel_text(const HostAddress& address) {
  uint32_t words[4] = {};
  ::inet_pton(address.is_ipv6 ? AF_INET6 : AF_INET, address.text.c_str(), words);
  std::string text;
  for (int word = 0; word < (address.is_ipv6 ? 4 : 1); ++word) {
    char digits[9];
    std::snprintf(digits, sizeof(digits), "%08X", words[word]);
    text += digits;
  }
  return text;
}

}  // namespace

bool HostAddress::is_loopback() const { return is_ipv6 ? text == "::1" : text.starts_with("127."); }

Resolved resolve(const std::string& host) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int status = ::getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (status != 0) return {{}, ::gai_strerror(status)};
  Resolved resolved;
  for (const addrinfo* each = found; each; each = each->ai_next) {
    const bool is_ipv6 = each->ai_family == AF_INET6;
    if (!is_ipv6 && each->ai_family != AF_INET) continue;
    char text[INET6_ADDRSTRLEN] = "";
    const void* from = is_ipv6
                           ? static_cast<const void*>(&reinterpret_cast<const sockaddr_in6*>(each->ai_addr)->sin6_addr)
                           : &reinterpret_cast<const sockaddr_in*>(each->ai_addr)->sin_addr;
    if (::inet_ntop(each->ai_family, from, text, sizeof(text))) resolved.addresses.push_back({text, is_ipv6});
  }
  ::freeaddrinfo(found);
  if (resolved.addresses.empty()) resolved.problem = "it has no address of IPv4 or IPv6";
  return resolved;
}

std::vector<HostAddress> resolve_within(const std::string& host, std::chrono::milliseconds limit,
                                        const Resolver& resolver) {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (true) {
    const Resolved found = resolver(host);
    if (!found.addresses.empty()) return found.addresses;
    const auto left = end - std::chrono::steady_clock::now();
    if (left <= left.zero())
      throw IoError(str("the name ", host, " is not known (", found.problem, ") after ",
                        std::chrono::duration<double>(limit).count(),
                        " s. Correct MASTER_ADDR; where the name comes later, as in Kubernetes, raise "
                        "TRIREME_RESOLVE_TIMEOUT_S"));
    std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(left, kAskEvery));
  }
}

bool says_loopback(const std::string& host) {
  in_addr ipv4{};
  return host == "localhost" || host == "::1" ||
         (host.starts_with("127.") && ::inet_pton(AF_INET, host.c_str(), &ipv4) == 1);
}

std::vector<HostAddress> places_to_listen(const std::string& host, const std::vector<HostAddress>& addresses) {
  const bool loopback = says_loopback(host);
  std::vector<HostAddress> places;
  for (const bool is_ipv6 : {false, true})
    for (const HostAddress& address : addresses)
      if (address.is_ipv6 == is_ipv6 && address.is_loopback() == loopback) places.push_back(address);
  if (loopback) return places;
  places.push_back({"", true});
  places.push_back({"", false});
  return places;
}

std::optional<int> listen_on(const std::vector<HostAddress>& places, uint16_t port) {
  for (const HostAddress& place : places) {
    const Listening attempt = try_to_listen(endpoint_of(place.text, place.is_ipv6, port));
    if (attempt.fd >= 0) return attempt.fd;
    if (attempt.error == EADDRINUSE || attempt.error == EACCES) return std::nullopt;
    // The next place is tried: this host does not have the address, or has no IPv6.
  }
  return std::nullopt;
}

std::optional<uid_t> owner_of_listener(const HostAddress& address, uint16_t port) {
  const std::string exact = kernel_text(address);
  const std::string all_ipv4(8, '0');
  const std::string all_ipv6(32, '0');
  // As the kernel chooses: who listens on that one address comes before who listens on all.
  for (const auto& [table, wanted] : {std::pair(address.is_ipv6 ? "/proc/net/tcp6" : "/proc/net/tcp", exact),
                                      std::pair("/proc/net/tcp", all_ipv4), std::pair("/proc/net/tcp6", all_ipv6)}) {
    if (address.is_ipv6 && wanted == all_ipv4) continue;
    for (const ListeningSocket& each : sockets_at(table, port))
      if (each.address == wanted) return each.owner;
  }
  return std::nullopt;
}

void check_listener(const HostAddress& address, uint16_t port, uid_t own) {
  const auto owner = owner_of_listener(address, port);
  if (!owner || *owner == own || *owner == 0) return;
  throw IoError(str("a process of user ", *owner, " listens at ", address.text, ":", port, ", where rank 0 of user ",
                    own, " should; set MASTER_PORT to another port"));
}

}  // namespace trireme::comm
