// The text of the error that a call must throw.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <string>

#include "trireme/base/error.h"

namespace trireme::testing {

/// Runs `call` and returns the text of the error that it throws.
template <class Thrown = std::exception, class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Thrown& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

/// The same with the name of its code in front, "CheckpointError: …"; "nothing" where nothing is thrown.
template <class Call>
std::string named_error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return str(name_of(error.code()), ": ", error.what());
  }
  return "nothing";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

}  // namespace trireme::testing
