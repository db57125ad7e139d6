// The facts that `trireme env` tells of an installation and its machine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/base/json.h"
#include "trireme/device/device.h"

namespace trireme::cli {

/// Bytes of a file system in memory.
struct ShmFacts {
  int64_t bytes = 0;
  int64_t free_bytes = 0;
};

/// A limit of this process; nothing: there is none.
struct LimitFacts {
  std::optional<int64_t> soft;
  std::optional<int64_t> hard;
};

struct MachineFacts {
  /// Versions of trireme, torch, cuda and so on; empty: not found.
  std::vector<std::pair<std::string, std::string>> versions;
  GpuList gpus;
  bool has_infiniband = false;
  int64_t memory_bytes = 0;
  int64_t free_memory_bytes = 0;
  int cores = 0;                ///< that this process may use
  std::optional<ShmFacts> shm;  ///< of /dev/shm
  LimitFacts open_files;
  LimitFacts locked_bytes;
  /// Variables of docs/environment.md that are set. Of a secret, no value.
  std::vector<std::pair<std::string, std::string>> variables;
};

/// Looks. Loads neither libtorch's CUDA half nor a driver's context; runs `python --version` and `mpirun --version`.
MachineFacts machine_facts();

/// The `facts` that will hinder training, each as a sentence with the fix. Pure.
std::vector<std::string> hindrances(const MachineFacts& facts);

/// Pure, both of them.
std::string text_of(const MachineFacts& facts);
Json json_of(const MachineFacts& facts);

/// The first line that `command` writes to stdout; empty where there is no such program or it writes nothing.
std::string first_line_of(const std::vector<std::string>& command);

}  // namespace trireme::cli
