// The script that lies beside checkpoints, for people who know DeepSpeed's.
#pragma once

#include <filesystem>

namespace trireme {

class FileSystem;

inline constexpr char kZeroToFp32Name[] = "zero_to_fp32.py";

/// Writes zero_to_fp32.py, which the build embeds, into the folder of checkpoints, atomically, where it is not there or
/// another. Throws IoError.
void write_zero_to_fp32(FileSystem& files, const std::filesystem::path& directory);

}  // namespace trireme
