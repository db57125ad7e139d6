// Helpers that the tests of data share: a folder with files that go away, and .npy files byte by byte.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace trireme {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> counter = 0;
    path_ = std::filesystem::temp_directory_path() /
            ("trireme_data_" + std::to_string(::getpid()) + "_" + std::to_string(counter++));
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  /// Writes a file, with its folders, and returns its path.
  std::string write(const std::string& relative, const std::string& bytes) const {
    const auto path = path_ / relative;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path, std::ios::binary) << bytes;
    return path.string();
  }

  std::string path(const std::string& relative = "") const { return (path_ / relative).string(); }

 private:
  std::filesystem::path path_;
};

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
