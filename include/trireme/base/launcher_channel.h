// The channel on which a rank tells `trireme launch` why it ends: the peer that failed it, so that no text decides
// which rank is to blame; or what it refuses, so that of several ranks' same words one is shown.
#pragma once

#include <optional>
#include <string>
#include <string_view>

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

/// Leaves it to the launcher to show why this process ends with an error of its user's. False, and nothing is told:
/// there is no launcher, it listens no more, or `text` is longer than 64 KiB. Never waits.
bool leave_to_launcher(std::string_view text) noexcept;

/// Words of a rank to its launcher.
struct RankReport {
  std::optional<PeerFailure> failure = {};  ///< the last one
  std::string refusal = {};                 ///< the last text that was left to the launcher
};

/// The launcher's side: what the rank at the other end of `socket` has told since the last call. Never waits.
RankReport told_by_rank(int socket);

}  // namespace trireme
