#include "trireme/step/buffers.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/base/state_names.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

constexpr int64_t kPlaceBytes = 64;  // keeps every buffer aligned within the message
constexpr int64_t kUnseen = 0;

int64_t place_bytes(const at::Tensor& tensor) {
  return (static_cast<int64_t>(tensor.nbytes()) + kPlaceBytes - 1) / kPlaceBytes * kPlaceBytes;
}

int64_t fingerprint(const at::Tensor& tensor) {
  return digest_of({static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()});
}

/// Buffers of one signature can be copied from rank to rank.
int64_t signature(const NamedBuffer& buffer) {
  return digest_of(str(buffer.name, " ", buffer.tensor.scalar_type(), " ", buffer.tensor.sizes()));
}

std::vector<int64_t> signatures_of(const std::vector<NamedBuffer>& buffers) {
  std::vector<int64_t> signatures;
  for (const NamedBuffer& buffer : buffers) signatures.push_back(signature(buffer));
  return signatures;
}

std::vector<bool> all_of(const std::vector<NamedBuffer>& buffers) { return std::vector<bool>(buffers.size(), true); }

}  // namespace

Buffers::Buffers(Group& group, c10::Device device, Source source, IsPart is_part)
    : group_(group), is_on_host_(is_host(device)), source_(std::move(source)), is_part_(std::move(is_part)) {
  const std::vector<NamedBuffer> present = source_();
  if (group_.size() == 1) return;
  agree(present);
  const std::vector<NamedBuffer> all = shared(present);
  broadcast(all, all_of(all));
}

void Buffers::follow_rank_0() {
  if (group_.size() == 1 || are_apart_) return;
  const SubjectScope subject("buffers");
  const std::vector<NamedBuffer> present = source_();
  refuse_parts(present);
  bool has_others = signatures_of(present) != known_;
  // To look whether one has changed, the host would have to wait for its device. There every rank's module changes its
  // buffers at the same step.
  std::vector<bool> chosen(agreed_.size(), true);
  if (is_on_host_) {
    at::Tensor flags = at::zeros({static_cast<int64_t>(agreed_.size()) + 1}, at::kInt);
    int32_t* changed = flags.mutable_data_ptr<int32_t>();
    changed[0] = has_others ? 1 : 0;
    const std::vector<NamedBuffer> mine = has_others ? std::vector<NamedBuffer>{} : shared(present);
    for (size_t i = 0; i < mine.size(); ++i) changed[i + 1] = fingerprint(mine[i].tensor) != fingerprints_[i] ? 1 : 0;
    group_.all_reduce(flags, ReduceOp::kMax).wait();
    has_others = changed[0] != 0;
    for (size_t i = 0; i < chosen.size(); ++i) chosen[i] = changed[i + 1] != 0;
  }
  if (has_others) {
    agree(present);
    chosen.assign(agreed_.size(), true);
  }
  if (std::find(chosen.begin(), chosen.end(), true) != chosen.end()) broadcast(shared(present), chosen);
}

void Buffers::agree(const std::vector<NamedBuffer>& present) {
  known_ = signatures_of(present);
  at::Tensor count = at::zeros({1}, at::kLong);
  count.mutable_data_ptr<int64_t>()[0] = static_cast<int64_t>(known_.size());
  group_.broadcast(count, 0).wait();
  at::Tensor list = at::zeros({count.const_data_ptr<int64_t>()[0]}, at::kLong);
  int64_t* const of_rank_0 = list.mutable_data_ptr<int64_t>();
  if (group_.rank() == 0) std::copy(known_.begin(), known_.end(), of_rank_0);
  if (list.numel() > 0) group_.broadcast(list, 0).wait();
  at::Tensor has = at::zeros({list.numel()}, at::kInt);
  int32_t* const flags = has.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < list.numel(); ++i)
    flags[i] = std::find(known_.begin(), known_.end(), of_rank_0[i]) != known_.end() ? 1 : 0;
  if (list.numel() > 0) group_.all_reduce(has, ReduceOp::kMin).wait();
  agreed_.clear();
  for (int64_t i = 0; i < list.numel(); ++i)
    if (flags[i] != 0) agreed_.push_back(of_rank_0[i]);
  tell_others(present);
}

void Buffers::tell_others(const std::vector<NamedBuffer>& present) {
  if (has_told_) return;
  for (const NamedBuffer& buffer : present) {
    if (std::find(agreed_.begin(), agreed_.end(), signature(buffer)) != agreed_.end()) continue;
    has_told_ = true;
    return log(
        LogLevel::kWarning,
        str("buffer '", buffer.name, "' of shape ", buffer.tensor.sizes(), " on rank ", group_.rank(),
            " is missing on another rank, or of another shape or dtype there: it stays each rank's own, and rank "
            "0's is saved; give it the same shape on every rank, or register it with persistent=False"));
  }
}

void Buffers::refuse_parts(const std::vector<NamedBuffer>& present) const {
  if (is_part_ == nullptr) return;
  for (const NamedBuffer& buffer : present)
    if (is_part_(buffer.tensor))
      throw StateError(str("buffer '", buffer.name, "' ", buffer.tensor.sizes(),
                           " is a part of a tensor that is cut over ranks, and a buffer is the same on all of them; "
                           "write into a whole buffer (buffer.copy_(...)), assign engine.gather(...) of the part, or "
                           "keep the part in an attribute that is no buffer"));
}

std::vector<NamedBuffer> Buffers::shared(const std::vector<NamedBuffer>& present) const {
  std::unordered_map<int64_t, const NamedBuffer*> by_signature;
  for (const NamedBuffer& buffer : present) by_signature.emplace(signature(buffer), &buffer);
  std::vector<NamedBuffer> result;
  for (const int64_t wanted : agreed_) result.push_back(*by_signature.at(wanted));
  return result;
}

std::vector<TensorSlice> Buffers::slices() const {
  std::vector<TensorSlice> slices;
  const std::vector<NamedBuffer> present = source_();
  refuse_parts(present);
  for (const NamedBuffer& buffer : present) {
    TensorSlice& slice = slices.emplace_back();
    slice.name = weight_name(buffer.name);
    slice.part.shape = buffer.tensor.sizes().vec();
    slice.data = buffer.tensor.detach().view(-1);
  }
  return slices;
}

void Buffers::accept() {
  if (group_.size() == 1) return;
  // Where a module has other buffers than ranks agreed on, the next step finds that out.
  const std::vector<NamedBuffer> present = source_();
  if (signatures_of(present) == known_) remember(shared(present));
}

void Buffers::remember(const std::vector<NamedBuffer>& shared) {
  fingerprints_.assign(shared.size(), kUnseen);
  if (!is_on_host_) return;
  for (size_t i = 0; i < shared.size(); ++i) fingerprints_[i] = fingerprint(shared[i].tensor);
}

void Buffers::broadcast(const std::vector<NamedBuffer>& shared, const std::vector<bool>& chosen) {
  if (shared.empty()) return;
  const at::NoGradGuard no_grad;
  const WithoutInterception own_operators;
  int64_t bytes = 0;
  for (size_t i = 0; i < shared.size(); ++i) bytes += chosen[i] ? place_bytes(shared[i].tensor) : 0;
  const at::Tensor message =
      at::empty({bytes}, at::TensorOptions().dtype(at::kByte).device(shared.front().tensor.device()));
  const auto for_each_place = [&](auto visit) {
    int64_t begin = 0;
    for (size_t i = 0; i < shared.size(); ++i) {
      if (!chosen[i]) continue;
      const at::Tensor buffer = shared[i].tensor.detach();  // a module may keep one that is part of a graph
      const at::Tensor place = message.narrow(0, begin, static_cast<int64_t>(buffer.nbytes()));
      visit(buffer, place.view(buffer.scalar_type()).view(buffer.sizes()));
      begin += place_bytes(buffer);
    }
  };
  const bool is_root = group_.rank() == 0;
  if (is_root) for_each_place([](const at::Tensor& buffer, const at::Tensor& place) { place.copy_(buffer); });
  group_.broadcast(message, 0).wait();
  if (!is_root) for_each_place([](const at::Tensor& buffer, const at::Tensor& place) { buffer.copy_(place); });
  remember(shared);
}

}  // namespace trireme
