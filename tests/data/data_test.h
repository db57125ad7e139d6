// Helpers that the tests of data share: a folder with files that go away, and .npy files byte by byte.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "tests/support/temporary_folder.h"

namespace trireme {

using testing::TemporaryFolder;

template <class Token>
std::string raw_tokens(const std::vector<Token>& tokens) {
  return {reinterpret_cast<const char*>(tokens.data()), tokens.size() * sizeof(Token)};
}

/// A .npy file of format `version` with `header` as its dictionary.
inline std::string npy(int version, const std::string& header, const std::string& data) {
  std::string file = "\x93NUMPY";
  file += {static_cast<char>(version), '\0'};
  const auto length = static_cast<uint32_t>(header.size());
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) file += static_cast<char>(length >> (8 * i) & 255);
  return file + header + data;
}

inline std::string npy_header(const std::string& dtype, const std::string& shape) {
  return "{'descr': '" + dtype + "', 'fortran_order': False, 'shape': " + shape + ", }\n";
}

/// Runs `statement` and expects an Exception whose message has all of `parts`.
template <class Exception, class Statement>
void expect_error(Statement statement, const std::vector<std::string>& parts) {
  try {
    statement();
    FAIL() << "nothing was thrown";
  } catch (const Exception& error) {
    for (const auto& part : parts) {
      EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << part << " is not in: " << error.what();
    }
  }
}

}  // namespace trireme
