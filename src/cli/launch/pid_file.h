// The file by which a program that starts jobs finds their launcher.
#pragma once

#include <filesystem>

namespace trireme::cli {

/// /tmp/PID.ds with this process's number in it, as DeepSpeed's --save_pid makes it; gone with the object.
///
/// Throws    ConfigError: something is there already, or it cannot be written.
class PidFile {
 public:
  PidFile();
  ~PidFile();
  PidFile(const PidFile&) = delete;
  PidFile& operator=(const PidFile&) = delete;

 private:
  std::filesystem::path path_;
};

}  // namespace trireme::cli
