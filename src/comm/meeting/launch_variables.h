// Reads what launchers put into the environment. Pure: the environment is an argument.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "trireme/comm/world.h"

namespace trireme::comm {

using Environment = std::function<std::optional<std::string>(const std::string&)>;

/// The environment of this process.
Environment process_environment();

enum class Meeting {
  kAlone,    ///< a world of one: there is nobody to meet
  kAddress,  ///< a key-value server at host:port
  kFile,     ///< a file in a folder of the job (OpenMPI's session folder), removed with it
};

struct LaunchVariables {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  bool all_here = false;  ///< the launcher says that all ranks run on this host
  Meeting meeting = Meeting::kAlone;
  std::string host;
  uint16_t port = 0;
  bool launcher_serves = false;  ///< torchrun's agent runs the server at host:port
  std::string path;
  /// The advice for a rank whose peers never come because there are none: variables that an earlier command left in the
  /// shell. Empty where a launcher has set them for sure.
  std::string advice;
  std::string token;          ///< read_token()
  std::string attempt = "0";  ///< of an elastic restart: keys of an earlier attempt must not be read

  /// Where the ranks look for the server. Ranks of one host meet at its loopback address, whatever MASTER_ADDR says:
  /// nobody else need reach them.
  std::string meeting_host() const;
  /// Whether this rank runs the server.
  bool serves() const { return meeting == Meeting::kAddress && rank == 0 && !launcher_serves; }
};

/// Throws ConfigError: a variable that is missing, is no number or does not fit the others.
LaunchVariables read_launch_variables(const Environment& environment);

/// TRIREME_COMM, else `fallback`. Throws ConfigError when it is none of auto, shm, c10d.
Transport read_transport(const Environment& environment, Transport fallback);

/// TRIREME_TOKEN, the secret of the job; empty: there is none. Throws ConfigError when it is set, and empty.
std::string read_token(const Environment& environment);

/// How long a rank waits, and for what.
struct WaitLimits {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);    ///< for a peer that is alive but does not come
  std::chrono::milliseconds resolve = std::chrono::seconds(60);    ///< for the name in MASTER_ADDR to be known
  std::chrono::milliseconds warn_after = std::chrono::minutes(1);  ///< for a peer, until it is named
};

/// TRIREME_TIMEOUT_S, else `timeout`; TRIREME_RESOLVE_TIMEOUT_S, TRIREME_WARN_AFTER_S. Throws ConfigError: one that is
/// no positive number.
WaitLimits read_limits(const Environment& environment, std::chrono::milliseconds timeout);

}  // namespace trireme::comm
