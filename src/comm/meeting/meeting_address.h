// The address at which ranks meet: whether its name is known, where rank 0 listens, and whose server answers there.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace trireme::comm {

/// An address of IPv4 or IPv6 as text, "10.0.0.5" or "fd00::5".
struct HostAddress {
  std::string text;
  bool is_ipv6 = false;

  /// 127.x.x.x or ::1
  bool is_loopback() const;
};

/// Addresses of a name. None: it is not known, and `problem` has the resolver's word.
struct Resolved {
  std::vector<HostAddress> addresses;
  std::string problem = {};
};
using Resolver = std::function<Resolved(const std::string& host)>;

/// The system's resolver, asked once.
Resolved resolve(const std::string& host);

/// Asks until the name is known: names of containers come seconds after the containers.
///
/// Throws    IoError: it is not within `limit`; says how to give it longer.
std::vector<HostAddress> resolve_within(const std::string& host, std::chrono::milliseconds limit,
                                        const Resolver& resolver = resolve);

/// Whether `host` says by itself that it is this host alone: localhost, 127.x.x.x or ::1.
bool says_loopback(const std::string& host);

/// Where rank 0 listens so that who looks for `host` finds it, best first, IPv4 first. Of a host that says loopback its
/// loopback addresses. Else the addresses that other hosts see, and last, with an empty text, all addresses of this
/// host: where the name has only a loopback address in this host's own table (127.0.1.1), or one that somebody else
/// hands on to this host (a service of Kubernetes).
std::vector<HostAddress> places_to_listen(const std::string& host, const std::vector<HostAddress>& addresses);

/// A socket that listens on the first of `places` that this host has; nullopt: the port is taken there.
std::optional<int> listen_on(const std::vector<HostAddress>& places, uint16_t port);

/// The user whose socket a connection to `address` reaches; nullopt: nobody listens there, or the system does not say.
std::optional<uid_t> owner_of_listener(const HostAddress& address, uint16_t port);

/// Throws    IoError: a user who is neither `own` nor root listens there; both are named.
void check_listener(const HostAddress& address, uint16_t port, uid_t own);

}  // namespace trireme::comm
