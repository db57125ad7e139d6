// The channel on which a rank names the peer that failed it to `trireme launch`, so that no text decides which rank is
// to blame.
#pragma once

#include <optional>
#include <string>

#include "trireme/base/error.h"

namespace trireme {

/// A failure of this rank that another rank has caused.
struct PeerFailure {
  ErrorCode code = ErrorCode::kPeerLost;
  int peer = 0;  ///< its rank in the job
};

/// The environment variable by which a rank finds the channel.
inline constexpr const char* kLauncherVariable = "TRIREME_LAUNCHER";

/// The variable's value for a process that inherits `socket`: the launcher's, of AF_UNIX and SOCK_SEQPACKET.
std::string launcher_address(int socket);

/// Tells the launcher of this process. Does nothing where there is none or it listens no more; never waits.
void tell_launcher(const PeerFailure& failure) noexcept;

/// The launcher's side: the last failure that the rank at the other end of `socket` has told of. Never waits.
std::optional<PeerFailure> told_by_rank(int socket) noexcept;

}  // namespace trireme
