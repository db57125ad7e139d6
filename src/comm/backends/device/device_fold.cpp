#include "comm/backends/device/device_fold.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>

#include <algorithm>

namespace trireme::comm {
namespace {

at::ScalarType accumulator_of(at::ScalarType input) {
  return input == at::kBFloat16 || input == at::kHalf ? at::kFloat : input;
}

/// Where the sums grow: in `output` itself where nothing that is still to be read lies there.
at::Tensor accumulator_for(const FoldKind& kind, const at::Tensor& output, const std::vector<at::Tensor>& sources) {
  const auto dtype = accumulator_of(kind.input);
  const bool is_read_later = std::any_of(sources.begin() + 1, sources.end(), [&](const at::Tensor& source) {
    return source.const_data_ptr() == output.const_data_ptr();
  });
  if (output.scalar_type() == dtype && !is_read_later) return output;
  return at::empty(output.sizes(), output.options().dtype(dtype));
}

// As fold.cpp compares: a NaN stays, of equals the later one is taken.
void select(const at::Tensor& sums, const at::Tensor& next, bool larger) {
  const at::Tensor keeps = (larger ? sums.gt(next) : sums.lt(next)).logical_or_(sums.ne(sums));
  sums.copy_(at::where(keeps, sums, next.to(sums.scalar_type())));
}

}  // namespace

void fold_on_device(const FoldKind& kind, const at::Tensor& output, const std::vector<at::Tensor>& sources) {
  const at::Tensor sums = accumulator_for(kind, output, sources);
  if (sums.const_data_ptr() != sources[0].const_data_ptr()) sums.copy_(sources[0]);
  for (size_t rank = 1; rank < sources.size(); ++rank) {
    if (kind.op == ReduceOp::kMax || kind.op == ReduceOp::kMin)
      select(sums, sources[rank], kind.op == ReduceOp::kMax);
    else
      sums.add_(sources[rank]);  // 16-bit numbers are widened by the same kernel
  }
  if (kind.op == ReduceOp::kMean) {
    const double scale = 1.0 / static_cast<double>(sources.size());
    sums.mul_(sums.scalar_type() == at::kDouble ? scale : static_cast<double>(static_cast<float>(scale)));
  }
  if (sums.const_data_ptr() != output.const_data_ptr()) output.copy_(sums);
}

}  // namespace trireme::comm
