// Libraries of NVIDIA's that are opened when a GPU is used, so that nothing links them.
#pragma once

#include <filesystem>
#include <string>

namespace trireme {

/// The folder that libtorch's libraries are in.
std::filesystem::path torch_libraries();

/// The handle of `name` (such as "libnccl.so.2"): the one that the process has loaded, else where the loader finds it,
/// else from the folder `wheel` (such as "nccl") of PyPI's wheels beside libtorch. Null: nowhere; `problem` says what
/// the loader said and where it was looked for.
void* open_nvidia_library(const std::string& name, const std::string& wheel, std::string& problem);

}  // namespace trireme
