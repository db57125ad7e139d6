#include "pager/gradients/gradient_arena.h"

#include <c10/core/CPUAllocator.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <cstring>
#include <shared_mutex>

#include "trireme/base/error.h"

namespace trireme {
namespace {

constexpr size_t kSmallestBlock = size_t{64} << 10;  // smaller gradients are copied: cheaper than a block each
constexpr size_t kPage = 4096;
constexpr size_t kHugePage = size_t{2} << 20;

thread_local std::vector<GradientArena*> this_threads_arenas;

}  // namespace

// libtorch frees a raw allocation by its address alone, so the arena of a block is found by address. There is one CPU
// allocator per process in libtorch; hence one registry. It keeps a closed arena until its last block is freed.
class ArenaRegistry final : public c10::Allocator {
 public:
  static ArenaRegistry& instance() {
    static ArenaRegistry* registry = [] {
      auto* made =
          new ArenaRegistry(c10::GetCPUAllocator());  // never deleted: blocks may be freed while statics are destroyed
      c10::SetCPUAllocator(made, 100);
      return made;
    }();
    return *registry;
  }

  void add(std::shared_ptr<GradientArena> arena) {
    std::unique_lock lock(mutex_);
    arenas_.push_back(std::move(arena));
  }

  // No block will be cut from `arena` any more.
  void close(GradientArena& arena) {
    arena.closed_ = true;
    drop_if_idle(arena);
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes >= kSmallestBlock && !this_threads_arenas.empty() && torch::autograd::get_current_graph_task_id() != -1) {
      for (GradientArena* arena : this_threads_arenas) {
        if (!arena->serves(bytes)) continue;
        if (c10::DataPtr block = arena->allocate(bytes)) return block;
      }
    }
    return base_->allocate(bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override { return &ArenaRegistry::free; }
  void copy_data(void* target, const void* source, size_t bytes) const override { std::memcpy(target, source, bytes); }

  static void free(void* data) {
    if (data == nullptr) return;
    ArenaRegistry& registry = instance();
    if (const std::shared_ptr<GradientArena> arena = registry.find(data)) {
      arena->free(data);
      if (arena->closed_) registry.drop_if_idle(*arena);
    } else {
      registry.base_->raw_deallocate(data);
    }
  }

 private:
  explicit ArenaRegistry(c10::Allocator* base) : base_(base) {}

  std::shared_ptr<GradientArena> find(const void* data) {
    std::shared_lock lock(mutex_);
    for (const auto& arena : arenas_)
      if (arena->contains(data, 1)) return arena;
    return nullptr;
  }

  void drop_if_idle(const GradientArena& arena) {
    std::unique_lock lock(mutex_);
    if (arena.idle()) std::erase_if(arenas_, [&arena](const auto& other) { return other.get() == &arena; });
  }

  c10::Allocator* const base_;
  std::shared_mutex mutex_;
  std::vector<std::shared_ptr<GradientArena>> arenas_;  // guarded by mutex_
};

GradientArena::GradientArena(std::byte* base, size_t capacity, std::shared_ptr<void> memory)
    : base_(base), capacity_(capacity), memory_(std::move(memory)) {}

c10::DataPtr GradientArena::allocate(size_t bytes) {
  std::lock_guard lock(mutex_);
  void* data = nullptr;
  auto& blocks = free_[bytes];
  if (!blocks.empty()) {
    data = blocks.back();
    blocks.pop_back();
  } else {
    const size_t alignment = bytes >= kHugePage ? kHugePage : kPage;
    const size_t begin = (used_ + alignment - 1) / alignment * alignment;
    if (begin + bytes > capacity_) return {};
    data = base_ + begin;
    used_ = begin + bytes;
  }
  taken_.emplace(data, bytes);
  // raw_allocate() insists on context == data.
  return {data, data, &ArenaRegistry::free, c10::Device(c10::kCPU)};
}

void GradientArena::free(void* data) {
  std::lock_guard lock(mutex_);
  const auto found = taken_.find(data);
  if (found == taken_.end()) return;
  free_[found->second].push_back(data);
  taken_.erase(found);
}

bool GradientArena::contains(const void* data, size_t bytes) const {
  const auto* begin = static_cast<const std::byte*>(data);
  return begin >= base_ && begin + bytes <= base_ + capacity_;
}

bool GradientArena::idle() const {
  std::lock_guard lock(mutex_);
  return taken_.empty();
}

std::shared_ptr<GradientArena> make_private_arena(const std::vector<size_t>& sizes) {
  size_t capacity = 0;
  std::unordered_set<size_t> served;
  for (const size_t bytes : sizes)
    if (bytes >= kSmallestBlock && served.insert(bytes).second)
      capacity += (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  if (served.empty()) return nullptr;
  void* const data = ::mmap(nullptr, capacity, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return nullptr;  // malloc serves them
  const std::shared_ptr<void> memory(data, [capacity](void* mapped) { ::munmap(mapped, capacity); });
  auto arena = std::make_shared<GradientArena>(static_cast<std::byte*>(data), capacity, memory);
  for (const size_t bytes : served) arena->serve(bytes);
  return arena;
}

ArenaScope::ArenaScope(std::shared_ptr<GradientArena> arena) : arena_(std::move(arena)) {
  ArenaRegistry::instance().add(arena_);
  this_threads_arenas.push_back(arena_.get());
}

ArenaScope::~ArenaScope() {
  std::erase(this_threads_arenas, arena_.get());
  ArenaRegistry::instance().close(*arena_);
}

}  // namespace trireme
