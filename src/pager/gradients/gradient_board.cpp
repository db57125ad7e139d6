#include "pager/gradients/gradient_board.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace trireme {
namespace {

constexpr size_t kLine = 64;
constexpr size_t kSmallGradient = size_t{64} << 10;  // copied to its home instead of being born in a block
constexpr size_t kHomePage = 4096;

size_t aligned(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

}  // namespace

GradientBoard::GradientBoard(const MeshContext& context)
    : context_(context), sharing_(*context.ranks.shards.memory_sharing()) {
  const size_t parameters = context.parameters.size();
  told_ = sharing_.share(kLine + sizeof(Slot) * parameters, MemorySharing::Share::kEach);
  for (int rank = 0; rank < context.ranks.shards.size(); ++rank) {
    windows_.push_back(reinterpret_cast<std::atomic<uint64_t>*>(told_->of(rank)));
    slots_.push_back(reinterpret_cast<Slot*>(told_->of(rank) + kLine));
  }
  std::vector<size_t> bytes;
  for (size_t i = 0; i < parameters; ++i)
    bytes.push_back(static_cast<size_t>(context.parameters[i].numel) * c10::elementSize(dtype(static_cast<int>(i))));
  make_memory(bytes);
}

// Every gradient has a home: small ones are copied there, large ones only when the arena has no block for them (its
// blocks may be held by the user's graph, or cut for other sizes). So publishing never has to wait for memory. Of homes
// only what is used is ever backed by memory. The arena has room for every large gradient once: most are folded, and
// their blocks free again, before backward has come to the end.
void GradientBoard::make_memory(const std::vector<size_t>& bytes) {
  homes_.resize(bytes.size());
  std::vector<size_t> served;
  size_t block_bytes = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (!context_.has(context_.parameters[i].unit)) continue;
    const bool is_small = bytes[i] < kSmallGradient;
    homes_[i] = aligned(home_bytes_, is_small ? kLine : kHomePage);
    home_bytes_ = homes_[i] + bytes[i];
    if (is_small) continue;
    served.push_back(bytes[i]);
    block_bytes += bytes[i] + (size_t{2} << 20);
  }
  home_bytes_ = aligned(home_bytes_, kHomePage);
  memory_ = sharing_.share(std::max(home_bytes_ + block_bytes, kHomePage), MemorySharing::Share::kEach);
  std::byte* own = memory_->of(context_.ranks.shards.rank());
  arena_ = std::make_shared<GradientArena>(own + home_bytes_, block_bytes, memory_);
  for (const size_t size : served) arena_->serve(size);
  arena_scope_ = std::make_unique<ArenaScope>(arena_);
}

at::ScalarType GradientBoard::dtype(int parameter) const {
  const ManagedParameter& managed = context_.parameters[parameter];
  return wire_dtype(context_.unit(managed.unit), managed.tensor.scalar_type());
}

void GradientBoard::publish(int parameter, uint32_t round, at::Tensor& gradient) {
  const size_t offset = bring(parameter, gradient);
  Slot& slot = slots_[context_.ranks.shards.rank()][parameter];
  slot.offset.store(offset, std::memory_order_relaxed);
  slot.published.store(stamp(round), std::memory_order_release);
  sharing_.notify();
}

// The offset where `gradient` stands then.
size_t GradientBoard::bring(int parameter, at::Tensor& gradient) const {
  const size_t bytes = gradient.nbytes();
  if (arena_->contains(gradient.data_ptr(), bytes)) return home_bytes_ + arena_->offset_of(gradient.data_ptr());
  const bool is_small = bytes < kSmallGradient;
  c10::DataPtr block = is_small ? c10::DataPtr() : arena_->allocate(bytes);
  if (!block) {
    std::byte* home = memory_->of(context_.ranks.shards.rank()) + homes_[parameter];
    if (bytes > 0) std::memcpy(home, gradient.data_ptr(), bytes);
    if (!is_small) gradient = flat_view(home, gradient.numel(), gradient.scalar_type(), memory_);
    return homes_[parameter];
  }
  std::memcpy(block.get(), gradient.data_ptr(), bytes);
  auto keep = std::make_shared<c10::DataPtr>(std::move(block));
  gradient = flat_view(keep->get(), gradient.numel(), gradient.scalar_type(), keep);
  return home_bytes_ + arena_->offset_of(gradient.data_ptr());
}

void GradientBoard::tell_folded(int parameter, uint32_t round) {
  slots_[context_.ranks.shards.rank()][parameter].folded.store(stamp(round), std::memory_order_release);
  sharing_.notify();
}

void GradientBoard::announce(const std::vector<uint32_t>& rounds) {
  const int rank = context_.ranks.shards.rank();
  for (size_t i = 0; i < rounds.size(); ++i) slots_[rank][i].announced.store(rounds[i], std::memory_order_relaxed);
  windows_[rank]->store(window_, std::memory_order_release);
  sharing_.notify();
}

void* GradientBoard::gradient(int rank, int parameter, uint32_t round) const {
  const Slot& slot = slots_[rank][parameter];
  const bool is_here = slot.published.load(std::memory_order_acquire) == stamp(round);
  return is_here ? memory_->of(rank) + slot.offset.load(std::memory_order_relaxed) : nullptr;
}

bool GradientBoard::may_come(int rank, int parameter, uint32_t round) const {
  return windows_[rank]->load(std::memory_order_acquire) < window_ ||
         slots_[rank][parameter].announced.load(std::memory_order_relaxed) >= round;
}

std::optional<int> GradientBoard::awaited() const {
  for (size_t rank = 0; rank < windows_.size(); ++rank)
    if (windows_[rank]->load(std::memory_order_acquire) < window_) return static_cast<int>(rank);
  return std::nullopt;
}

uint32_t GradientBoard::rounds(int parameter) const {
  uint32_t most = 0;
  for (const Slot* of_rank : slots_)
    most = std::max(most, of_rank[parameter].announced.load(std::memory_order_relaxed));
  return most;
}

}  // namespace trireme
