// The text of the error that a call must throw.
#pragma once

#include <gtest/gtest.h>

#include <string>

namespace trireme::testing {

/// Runs `call` and returns the text of the error that it throws.
template <class Thrown, class Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const Thrown& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

}  // namespace trireme::testing
