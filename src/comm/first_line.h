// The first line of libtorch's errors, for ours.
#pragma once

#include <exception>
#include <string>

namespace trireme::comm {

/// The first line of an error of libtorch: the rest is a stack trace.
inline std::string first_line(const std::exception& error) {
  const std::string text = error.what();
  return text.substr(0, text.find('\n'));
}

}  // namespace trireme::comm
