// A file that grows by whole records.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string_view>

namespace trireme {

/// Opened for appending; it is made where there is none.
class AppendFile {
 public:
  enum class Open { kNewOrPresent, kNew };
  /// Throws IoError; kNew: also where there is such a file.
  explicit AppendFile(std::filesystem::path path, Open open = Open::kNewOrPresent);
  ~AppendFile();
  AppendFile(const AppendFile&) = delete;
  AppendFile& operator=(const AppendFile&) = delete;

  int64_t bytes() const { return bytes_; }
  /// All of `record`, or IoError and nothing of it: a reader finds no torn record before later ones.
  void append(std::string_view record);

 private:
  const std::filesystem::path path_;
  int file_ = -1;
  int64_t bytes_ = 0;
};

}  // namespace trireme
