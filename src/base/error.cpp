#include "trireme/base/error.h"

namespace trireme {

const char* name_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kConfig:
      return "ConfigError";
    case ErrorCode::kBatchSize:
      return "BatchSizeError";
    case ErrorCode::kUnsupported:
      return "UnsupportedError";
    case ErrorCode::kShape:
      return "ShapeError";
    case ErrorCode::kState:
      return "StateError";
    case ErrorCode::kData:
      return "DataError";
    case ErrorCode::kIo:
      return "IoError";
    case ErrorCode::kCheckpoint:
    case ErrorCode::kTornLoad:
      return "CheckpointError";
    case ErrorCode::kPeerLost:
      return "PeerLostError";
    case ErrorCode::kTimeout:
      return "TimeoutError";
    case ErrorCode::kDiverged:
      return "DivergedError";
    case ErrorCode::kInternal:
      return "InternalError";
  }
  return "Error";
}

void throw_error(ErrorCode code, const std::string& message) {
  switch (code) {
    case ErrorCode::kConfig:
    case ErrorCode::kBatchSize:
    case ErrorCode::kUnsupported:
      throw ConfigError(message, code);
    case ErrorCode::kShape:
      throw ShapeError(message);
    case ErrorCode::kState:
      throw StateError(message);
    case ErrorCode::kData:
      throw DataError(message);
    case ErrorCode::kIo:
      throw IoError(message);
    case ErrorCode::kCheckpoint:
    case ErrorCode::kTornLoad:
      throw CheckpointError(message, code);
    case ErrorCode::kPeerLost:
    case ErrorCode::kTimeout:
    case ErrorCode::kDiverged:
      throw CommError(code, message);
    case ErrorCode::kInternal:
      break;
  }
  throw Error(code, message);
}

void internal_error(const char* file, int line, const std::string& message) {
  throw Error(ErrorCode::kInternal,
              str("internal error at ", file, ":", line, ": ", message, " Please report this with the lines above."));
}

}  // namespace trireme
