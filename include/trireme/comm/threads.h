// Ranks as threads of one process: for tests, and for programs that want several ranks without a launcher.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "trireme/comm/group.h"

namespace trireme {

/// Options of make_thread_groups().
struct ThreadGroupOptions {
  std::string name = "threads";
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  enum class Memory {
    kHeap,   ///< shared memory is ordinary memory, at the same address for every rank
    kFiles,  ///< memory files that each rank maps at its own address, as the shm backend does between processes
  };
  Memory memory = Memory::kHeap;
};

/// One group per rank, in rank order; each is used by one thread.
std::vector<std::unique_ptr<Group>> make_thread_groups(int size, const ThreadGroupOptions& options = {});

}  // namespace trireme
