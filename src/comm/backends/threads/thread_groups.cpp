#include "trireme/comm/threads.h"

#include "comm/fabric/fabric_backend.h"
#include "comm/memory.h"
#include "trireme/base/error.h"

namespace trireme {

std::vector<std::unique_ptr<Group>> make_thread_groups(int size, const ThreadGroupOptions& options) {
  if (size < 1) throw ShapeError(str("make_thread_groups: expected at least one rank, got ", size));
  const bool heap = options.memory == ThreadGroupOptions::Memory::kHeap;
  const auto provider = heap ? comm::heap_memory() : comm::file_memory();
  const auto segment = provider->create(comm::FabricLayout(size).bytes());
  std::vector<std::unique_ptr<Group>> groups;
  for (int rank = 0; rank < size; ++rank) {
    comm::GroupInfo info{.name = options.name, .place = {rank, size}, .timeout = options.timeout};
    auto backend = std::make_unique<comm::FabricBackend>(
        provider, rank == 0 ? segment : provider->open(segment->ticket()), std::move(info));
    groups.push_back(std::make_unique<Group>(std::move(backend)));
  }
  segment->withdraw();
  return groups;
}

}  // namespace trireme
