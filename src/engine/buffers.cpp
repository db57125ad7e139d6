#include "engine/buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <xxhash.h>

#include <algorithm>
#include <utility>

#include "trireme/device/stream.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

constexpr int64_t kPlaceBytes = 64;  // keeps every buffer aligned within the message

int64_t place_bytes(const at::Tensor& tensor) {
  return (static_cast<int64_t>(tensor.nbytes()) + kPlaceBytes - 1) / kPlaceBytes * kPlaceBytes;
}

uint64_t fingerprint(const at::Tensor& tensor) {
  const at::Tensor contiguous = tensor.contiguous();
  return XXH3_64bits(contiguous.const_data_ptr(), contiguous.nbytes());
}

}  // namespace

Buffers::Buffers(Group& group, std::vector<NamedBuffer> buffers) : group_(group), buffers_(std::move(buffers)) {
  if (!buffers_.empty()) broadcast(std::vector<bool>(buffers_.size(), true));
}

void Buffers::follow_rank_0() {
  if (buffers_.empty() || group_.size() == 1) return;
  // To look whether one has changed, the host would have to wait for its device.
  if (!are_on_host()) return broadcast(std::vector<bool>(buffers_.size(), true));
  const auto count = static_cast<int64_t>(buffers_.size());
  at::Tensor changed = at::empty({count}, at::kInt);
  int32_t* flags = changed.mutable_data_ptr<int32_t>();
  for (size_t i = 0; i < buffers_.size(); ++i) flags[i] = fingerprint(buffers_[i].tensor) != fingerprints_[i] ? 1 : 0;
  group_.all_reduce(changed, ReduceOp::kMax).wait();
  std::vector<bool> chosen(flags, flags + count);
  if (std::find(chosen.begin(), chosen.end(), true) != chosen.end()) broadcast(chosen);
}

bool Buffers::are_on_host() const {
  return std::all_of(buffers_.begin(), buffers_.end(),
                     [](const NamedBuffer& buffer) { return is_host(buffer.tensor); });
}

std::vector<TensorSlice> Buffers::slices() const {
  std::vector<TensorSlice> slices;
  for (const NamedBuffer& buffer : buffers_)
    slices.push_back({"model." + buffer.name, buffer.tensor.sizes().vec(), 0, buffer.tensor.detach().view(-1)});
  return slices;
}

void Buffers::accept() {
  if (!are_on_host()) return;
  fingerprints_.clear();
  for (const NamedBuffer& buffer : buffers_) fingerprints_.push_back(fingerprint(buffer.tensor));
}

void Buffers::broadcast(const std::vector<bool>& chosen) {
  if (group_.size() == 1) return accept();
  const at::NoGradGuard no_grad;
  const WithoutInterception own_operators;
  int64_t bytes = 0;
  for (size_t i = 0; i < buffers_.size(); ++i) bytes += chosen[i] ? place_bytes(buffers_[i].tensor) : 0;
  const at::Tensor message =
      at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(buffers_.front().tensor.device()));
  const auto for_each_place = [&](auto visit) {
    int64_t begin = 0;
    for (size_t i = 0; i < buffers_.size(); ++i) {
      if (!chosen[i]) continue;
      at::Tensor& buffer = buffers_[i].tensor;
      const at::Tensor place = message.narrow(0, begin, static_cast<int64_t>(buffer.nbytes()));
      visit(buffer, place.view(buffer.scalar_type()).view(buffer.sizes()));
      begin += place_bytes(buffer);
    }
  };
  const bool is_root = group_.rank() == 0;
  if (is_root) for_each_place([](const at::Tensor& buffer, const at::Tensor& place) { place.copy_(buffer); });
  group_.broadcast(message, 0).wait();
  if (!is_root) for_each_place([](const at::Tensor& buffer, const at::Tensor& place) { buffer.copy_(place); });
  accept();
}

}  // namespace trireme
