// The errors that Trireme throws. Every one carries an ErrorCode; bindings map codes to exception types by a table.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace trireme {

/// The kind of an error, for programs.
enum class ErrorCode {
  kConfig,       ///< a configuration key, its value or their combination
  kBatchSize,    ///< the batch triple does not multiply out
  kUnsupported,  ///< known, but not there yet; refused by name
  kShape,        ///< an argument of the wrong shape, dtype or layout
  kState,        ///< a call at the wrong moment (step() without a gradient, a released parameter's data)
  kData,         ///< a data set that cannot be read or is empty
  kIo,           ///< a file or folder
  kCheckpoint,   ///< a checkpoint that does not match or is damaged
  kTornLoad,     ///< a load that ended half-way: what it was to fill is a mixture
  kPeerLost,     ///< a rank died, left or threw
  kTimeout,      ///< a rank did not arrive in time
  kDiverged,     ///< ranks called different operations at the same point
  kInternal,     ///< our bug
};

/// The name of `code` as it is printed and documented, e.g. "ConfigError".
const char* name_of(ErrorCode code) noexcept;

/// Base of everything that Trireme throws on purpose.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

/// Thrown before the first collective; names the key, the value and the fix. Codes kConfig, kBatchSize, kUnsupported.
class ConfigError : public Error {
 public:
  explicit ConfigError(const std::string& message, ErrorCode code = ErrorCode::kConfig) : Error(code, message) {}
};

/// The caller's argument does not fit: operation, expected, got. Code kShape.
class ShapeError : public Error {
 public:
  explicit ShapeError(const std::string& message) : Error(ErrorCode::kShape, message) {}
};

/// A call at the wrong moment. Code kState.
class StateError : public Error {
 public:
  explicit StateError(const std::string& message) : Error(ErrorCode::kState, message) {}
};

/// Peer, group, operation, elapsed time; the group is unusable afterwards. Codes kPeerLost, kTimeout, kDiverged.
class CommError : public Error {
 public:
  CommError(ErrorCode code, const std::string& message) : Error(code, message) {}
};

/// Path, expected, found. Codes kCheckpoint, kTornLoad.
class CheckpointError : public Error {
 public:
  explicit CheckpointError(const std::string& message, ErrorCode code = ErrorCode::kCheckpoint)
      : Error(code, message) {}
};

/// A data set that cannot be read or is empty. Code kData.
class DataError : public Error {
 public:
  explicit DataError(const std::string& message) : Error(ErrorCode::kData, message) {}
};

/// A file operation failed: path, operation, reason. Code kIo.
class IoError : public Error {
 public:
  explicit IoError(const std::string& message) : Error(ErrorCode::kIo, message) {}
};

/// Throws the class that `code` belongs to.
[[noreturn]] void throw_error(ErrorCode code, const std::string& message);

/// str(a, b, …) joins its arguments through operator<<. A function object, so that arguments of libtorch's types do not
/// bring c10::str into play as well.
inline constexpr auto str = [](const auto&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
};

/// Throws Error(kInternal) with the failed condition and both operands: for our bugs only, never for user input.
[[noreturn]] void internal_error(const char* file, int line, const std::string& message);

#define TRIREME_CHECK(condition, ...)                                                                        \
  do {                                                                                                       \
    if (!(condition)) [[unlikely]]                                                                           \
      ::trireme::internal_error(__FILE__, __LINE__, ::trireme::str(#condition, " is false. ", __VA_ARGS__)); \
  } while (false)

}  // namespace trireme
