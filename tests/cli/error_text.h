// The message of the Error that a call throws.
#pragma once

#include <string>

#include "trireme/base/error.h"

namespace trireme::cli {

template <class Call>
std::string error_text(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "(no error)";
}

}  // namespace trireme::cli
