#include "trireme/activations/sharding.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace trireme {
namespace {

/// The elements of its storage that a tensor lies in: [first, last + 1).
std::pair<int64_t, int64_t> elements_of(const at::Tensor& tensor) {
  int64_t last = tensor.storage_offset();
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    last += std::max<int64_t>(tensor.size(dim) - 1, 0) * tensor.stride(dim);
  return {tensor.storage_offset(), last + 1};
}

}  // namespace

int64_t TokenSplit::before(int rank) const {
  return std::accumulate(lengths.begin(), lengths.begin() + rank, int64_t{0});
}

bool TokenSplit::matches(const TokenSplit& other) const {
  return lengths.size() == other.lengths.size() && !lengths.empty() &&
         std::equal(lengths.begin(), lengths.end() - 1, other.lengths.begin());
}

TokenSplit TokenSplit::with_total(int64_t total) const {
  TokenSplit result = *this;
  result.lengths.back() += total - this->total();
  return result;
}

at::Tensor part_of(const at::Tensor& whole, const Sharding& sharding) {
  at::Tensor part = whole;
  const TokenSplit& split = *sharding.split;
  for (const int64_t dim : sharding.dims) {
    if (sharding.outer == 1 && sharding.inner == 1) {
      part = part.narrow(dim, split.begin(), split.local());
      continue;
    }
    part = part.unflatten(dim, {sharding.outer, split.total(), sharding.inner})
               .narrow(dim + 1, split.begin(), split.local())
               .flatten(dim, dim + 2);
  }
  return part.clone(at::MemoryFormat::Contiguous);
}

std::optional<TokenDim> token_dim_of(at::IntArrayRef sizes, at::IntArrayRef strides, int64_t stride, int64_t tokens) {
  for (int64_t dim = 0; dim < static_cast<int64_t>(sizes.size()); ++dim) {
    const int64_t step = strides[static_cast<size_t>(dim)], size = sizes[static_cast<size_t>(dim)];
    if (tokens <= 1) {  // then strides alone tell
      if (step == stride && size == tokens) return TokenDim{dim, 1, 1};
      continue;
    }
    if (size <= 1 || step <= 0 || step > stride || step * size <= stride) continue;
    const int64_t inner = stride / step;
    if (inner * step != stride || size % (inner * tokens) != 0) return {};
    return TokenDim{dim, size / (inner * tokens), inner};
  }
  return {};
}

bool ShardingTable::has_sharded() const {
  using Kind = Sharding::Kind;
  return storages_.any_of([](const Storage& storage) {
    return !storage.wholes.empty() ||
           std::any_of(storage.layouts.begin(), storage.layouts.end(), [](const Layout& one) {
             return one.kind == Kind::kTokens || one.kind == Kind::kSelected || one.kind == Kind::kMerged ||
                    one.kind == Kind::kWithin;
           });
  });
}

std::optional<Sharding> ShardingTable::find(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  c10::StorageImpl* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const Storage* found = storage != nullptr ? storages_.find(storage) : nullptr;
  if (found == nullptr) return {};
  for (const Known& known : found->wholes)
    if (tensor.storage_offset() == known.offset && tensor.sizes() == at::IntArrayRef(known.sizes) &&
        tensor.strides() == at::IntArrayRef(known.strides))
      return known.sharding;
  const auto [begin, end] = elements_of(tensor);
  std::optional<Sharding> result;
  for (const Layout& layout : found->layouts) {
    if (end <= layout.begin || begin >= layout.end) continue;
    const bool is_inside = begin >= layout.begin && end <= layout.end;
    Sharding one = derive(tensor, layout);
    if (layout.kind == Sharding::Kind::kCounting && one.kind != layout.kind) continue;  // some of its numbers
    const bool is_known = one.kind != Sharding::Kind::kMerged;
    if (!result || (result->kind == Sharding::Kind::kMerged && is_known)) {
      result = std::move(one);
    } else if (is_known && is_inside) {
      const bool is_same = one.kind == result->kind && one.dims == result->dims && one.outer == result->outer &&
                           one.inner == result->inner && one.split->matches(*result->split) &&
                           one.selector.is_same(result->selector);
      const bool is_within = one.kind == Sharding::Kind::kWithin || result->kind == Sharding::Kind::kWithin;
      if (!is_same)
        result = Sharding{.kind = is_within ? Sharding::Kind::kWithin : Sharding::Kind::kMerged, .split = one.split};
    }
  }
  return result;
}

Sharding ShardingTable::derive(const at::Tensor& tensor, const Layout& layout) {
  Sharding result{.kind = layout.kind,
                  .split = layout.split,
                  .selector = layout.selector,
                  .counts = layout.counts,
                  .is_copy = layout.is_copy};
  if (layout.selected.defined() && tensor.sizes().slice(1) == layout.selected.sizes().slice(1) &&
      tensor.is_contiguous() && elements_of(tensor) == std::pair(layout.begin, layout.end))
    result.selected = layout.selected;
  for (const int64_t stride : layout.strides) {
    const auto token = token_dim_of(tensor, stride, layout.tokens);
    if (!token && layout.kind == Sharding::Kind::kWithin) return {.kind = layout.kind, .split = layout.split};
    if (!token) return {.kind = Sharding::Kind::kMerged, .split = layout.split, .selector = layout.selector};
    result.dims.push_back(token->dim);
    result.outer = token->outer;
    result.inner = token->inner;
  }
  // Two dims are only known with their whole.
  if (result.dims.size() > 1) return {.kind = Sharding::Kind::kMerged, .split = layout.split};
  return result;
}

void ShardingTable::add(const at::Tensor& tensor, const Sharding& sharding) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  auto [begin, end] = elements_of(tensor);
  if (sharding.kind == Sharding::Kind::kWithin) {  // what else is there all ranks have
    begin = 0;
    end = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
  }
  Layout layout{.begin = begin,
                .end = end,
                .kind = sharding.kind,
                .split = sharding.split,
                .strides = {},
                .tokens = 0,
                .selector = sharding.selector,
                .selected = sharding.selected,
                .counts = sharding.counts,
                .is_copy = sharding.is_copy};
  for (const int64_t dim : sharding.dims) layout.strides.push_back(tensor.stride(dim) * sharding.inner);
  if (!sharding.dims.empty()) layout.tokens = tensor.size(sharding.dim()) / (sharding.outer * sharding.inner);
  Storage* known = storages_.find(tensor.storage().unsafeGetStorageImpl());
  Storage& storage = known != nullptr ? *known : storages_.set(tensor.storage(), {});
  const bool is_known = std::any_of(storage.layouts.begin(), storage.layouts.end(), [&](const Layout& one) {
    return one.kind == layout.kind && one.strides == layout.strides && one.tokens == layout.tokens &&
           one.begin <= begin && one.end >= end && one.split->lengths == layout.split->lengths &&
           one.selector.is_same(layout.selector) && one.selected.is_same(layout.selected);
  });
  if (!is_known) storage.layouts.push_back(std::move(layout));
  std::erase_if(storage.wholes, [&](const Known& one) {
    return one.offset == tensor.storage_offset() && at::IntArrayRef(one.sizes) == tensor.sizes() &&
           at::IntArrayRef(one.strides) == tensor.strides();
  });
  if (!sharding.whole.defined()) return;
  storage.wholes.push_back({tensor.storage_offset(), tensor.sizes().vec(), tensor.strides().vec(), sharding});
  std::vector<WeakTensor>* parts = parts_.find(sharding.whole.storage().unsafeGetStorageImpl());
  if (parts == nullptr) parts = &parts_.set(sharding.whole.storage(), {});
  std::erase_if(*parts, [](const WeakTensor& part) { return part.expired(); });
  parts->emplace_back(tensor.getIntrusivePtr());
}

void ShardingTable::forget_made(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return;
  if (Storage* const storage = storages_.find(tensor.storage().unsafeGetStorageImpl()))
    std::erase_if(storage->layouts, [](const Layout& layout) {
      return layout.kind == Sharding::Kind::kConstant || layout.kind == Sharding::Kind::kCounting;
    });
}

void ShardingTable::refresh(const at::Tensor& whole) {
  std::vector<WeakTensor>* parts = parts_.find(whole.storage().unsafeGetStorageImpl());
  if (parts == nullptr) return;
  const at::NoGradGuard no_grad;
  for (const WeakTensor& weak : *parts) {
    const auto held = weak.lock();
    if (held == nullptr) continue;
    const at::Tensor part(held);
    if (const auto sharding = find(part); sharding && sharding->whole.defined() && sharding->whole.is_alias_of(whole))
      part.copy_(part_of(sharding->whole, *sharding));
  }
}

}  // namespace trireme
