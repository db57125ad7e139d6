// The error that a call throws, to be looked at.
#pragma once

#include <functional>
#include <string>

#include "trireme/base/error.h"

namespace trireme {

/// An Error of trireme's.
struct Thrown {
  ErrorCode code = ErrorCode::kInternal;
  std::string text = "nothing was thrown";
  bool has(const std::string& part) const { return text.find(part) != std::string::npos; }
};

inline Thrown thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {};
}

}  // namespace trireme
