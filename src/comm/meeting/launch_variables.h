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
  Meeting meeting = Meeting::kAlone;
  std::string host;
  uint16_t port = 0;
  bool launcher_serves = false;  ///< torchrun's agent runs the server at host:port
  std::string path;
  /// The advice for a rank whose peers never come because there are none: variables that an earlier command left in the
  /// shell. Empty where a launcher has set them for sure.
  std::string advice;
  std::string attempt = "0";  ///< of an elastic restart: keys of an earlier attempt must not be read
};

/// Throws ConfigError: a variable that is missing, is no number or does not fit the others.
LaunchVariables read_launch_variables(const Environment& environment);

/// TRIREME_COMM, else `fallback`. Throws ConfigError when it is none of auto, shm, c10d.
Transport read_transport(const Environment& environment, Transport fallback);

/// TRIREME_TIMEOUT_S, else `fallback`. Throws ConfigError when it is no positive number.
std::chrono::milliseconds read_timeout(const Environment& environment, std::chrono::milliseconds fallback);

}  // namespace trireme::comm
