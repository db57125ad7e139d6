#include "comm/backends/nccl/registered_memory.h"

#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <utility>

namespace trireme::comm {

/// Belongs to a tensor's storage. Who drops that may be the thread that ends calls when peers are gone, and must not
/// wait: so memory goes with its communicator.
class RegisteredMemory::Lease {
 public:
  Lease(std::weak_ptr<RegisteredMemory> owner, std::unique_ptr<NcclMemory> memory)
      : owner_(std::move(owner)), memory_(std::move(memory)) {}
  ~Lease() {
    const auto owner = owner_.lock();
    if (!owner) return;
    const std::lock_guard lock(owner->mutex_);
    std::erase_if(owner->held_, [this](const Range& range) { return range.begin == memory_->data(); });
    owner->dropped_.push_back(std::move(memory_));
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  NcclMemory& memory() const { return *memory_; }

 private:
  const std::weak_ptr<RegisteredMemory> owner_;
  std::unique_ptr<NcclMemory> memory_;
};

RegisteredMemory::RegisteredMemory(const NcclApi& api, std::unique_ptr<NcclComm> comm)
    : api_(api), abandoned_(std::make_shared<std::atomic<bool>>(false)), comm_(std::move(comm)) {}

RegisteredMemory::~RegisteredMemory() = default;

at::Tensor RegisteredMemory::zeros(int64_t bytes, c10::Device device) {
  auto memory = std::make_unique<NcclMemory>(api_, device, bytes, abandoned_);
  comm_->register_memory(*memory);
  const auto lease = std::make_shared<Lease>(weak_from_this(), std::move(memory));
  {
    const std::lock_guard lock(mutex_);
    held_.push_back({lease->memory().data(), bytes});
  }
  at::Tensor zeros = at::for_blob(lease->memory().data(), {bytes})
                         .options(at::TensorOptions().dtype(at::kByte).device(device))
                         .target_device(device)
                         .deleter([lease](void*) {})
                         .make_tensor();
  return zeros.zero_();
}

bool RegisteredMemory::has(const std::byte* data, int64_t bytes) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      held_, [&](const Range& range) { return data >= range.begin && data + bytes <= range.begin + range.bytes; });
}

bool RegisteredMemory::is_idle() const {
  const std::lock_guard lock(mutex_);
  return held_.empty();
}

}  // namespace trireme::comm
