#include "trireme/pager/storage/written_values.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>
#include <xxhash.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"

namespace trireme {

namespace {

int64_t positive(uint64_t bits) { return static_cast<int64_t>(bits >> 2) + 1; }

/// Whether all ranks have the same, of each of `values`, which are not negative.
std::vector<bool> is_same(Group& group, const std::vector<int64_t>& values) {
  const size_t count = values.size();
  const at::Tensor message = at::zeros({static_cast<int64_t>(2 * count)}, at::kLong);
  int64_t* const data = message.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < count; ++i) data[i] = values[i], data[count + i] = -values[i];
  group.all_reduce(message, ReduceOp::kMax).wait();
  std::vector<bool> same;
  for (size_t i = 0; i < count; ++i) same.push_back(data[i] == -data[count + i]);
  return same;
}

}  // namespace

int64_t digest_of(const at::Tensor& flat) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  if (is_host(flat)) return positive(XXH3_64bits(flat.const_data_ptr(), flat.nbytes()));
  const at::Tensor words = flat.view(at::kByte).to(at::kLong);
  const at::Tensor places = at::arange(1, words.numel() + 1, words.options());
  return positive(static_cast<uint64_t>((words * (places * 2654435761).remainder(2147483647)).sum().item<int64_t>()));
}

bool require_same(Group& group, const std::vector<int64_t>& digests,
                  const std::function<std::string(size_t)>& name_of) {
  const WithoutInterception own_operators;
  const bool any = std::any_of(digests.begin(), digests.end(), [](int64_t digest) { return digest != 0; });
  if (group.size() == 1) return any;
  const SubjectScope subject("values that were written in place");
  const int64_t all = any ? positive(XXH3_64bits(digests.data(), digests.size() * sizeof(int64_t))) : 0;
  if (is_same(group, {all}).front()) return any;
  const std::vector<bool> same = is_same(group, digests);
  const auto first = std::find(same.begin(), same.end(), false) - same.begin();
  throw StateError(str(CallerScope::current("use of a parameter"), ": the program has written into parameter '",
                       name_of(static_cast<size_t>(first)),
                       "' in place, and another rank has other values there, of which each would keep its own part; "
                       "write the same on every rank: seed generators alike, or broadcast the values first"));
}

}  // namespace trireme
