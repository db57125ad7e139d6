// Operators along dims that are not cut, copies, repetitions and joins.
#include <algorithm>

#include "tensor/exchanges.h"
#include "tensor/tensor_pass.h"
#include "trireme/base/error.h"

namespace trireme::tensor {

/// The same sizes. Another tensor's dtype may be asked for.
void TensorPass::run_copy(OperatorCall& call, Next next, const CutArguments& found) {
  if (found[0].index != 0) return next(call);
  const CutArgument one = found[0];
  next(call);
  add_results(call, one.cut, [&](const at::Tensor&) { return one.cut.dim; });
}

/// Reductions and scans along dims that are not cut; the others' on whole tensors.
void TensorPass::run_along(OperatorCall& call, Next next, const CutArguments& found) {
  const CutArgument one = found[0];
  const bool names_none = value_of(call, "dim").isNone() && value_of(call, "dims").isNone();
  std::vector<int64_t> dims = named_dims(call, one.tensor.dim());
  if (const std::string& name = call.op.schema().name(); name == "aten::msort") dims = {0};
  const bool is_along = std::find(dims.begin(), dims.end(), one.cut.dim) != dims.end();
  if (found.size() == 1 && one.index == 0 && call.op.schema().name() == "aten::sum" && (is_along || dims.empty()) &&
      !one.cut.ranges->overlaps()) {  // of parts
    CutTensor sum{.local_count = 1, .whole_count = 1};
    for (int64_t dim = 0; dim < one.tensor.dim(); ++dim) {
      if (!dims.empty() && std::find(dims.begin(), dims.end(), dim) == dims.end()) continue;
      sum.local_count *= one.tensor.size(dim);
      sum.whole_count *= dim == one.cut.dim ? one.cut.whole() : one.tensor.size(dim);
    }
    next(call);
    const at::Tensor part = call.results()[0].toTensor();
    const at::Tensor result = next.run(call, [&] { return summed(part, exchanges_, name_of(call)); });
    if (!takes_wholes()) table_.add(result, std::move(sum));
    call.stack.back() = result;
    return;
  }
  if (found.size() > 1 || one.index != 0 || dims.empty() || names_none || is_along) return run_whole(call, next, found);
  if (call.traits.random) call.stream = RandomStream::kSlice;
  const int64_t dropped = std::count_if(dims.begin(), dims.end(), [&](int64_t dim) { return dim < one.cut.dim; });
  const bool is_written = writes_first(call);
  next(call);
  if (is_written) return;
  add_results(call, one.cut, [&](const at::Tensor& result) {
    const bool keeps = result.dim() == one.tensor.dim();
    if (!keeps && result.dim() + static_cast<int64_t>(dims.size()) != one.tensor.dim())
      refuse(call, one.tensor, "changes dims in a way that is not known", "gather the tensor first");
    return keeps ? one.cut.dim : one.cut.dim - dropped;
  });
}

void TensorPass::run_repeat(OperatorCall& call, Next next, const CutArguments& found) {
  const CutArgument one = found[0];
  const std::string& name = call.op.schema().name();
  if (name == "aten::repeat_interleave") {
    const c10::IValue dim = value_of(call, "dim"), repeats = value_of(call, "repeats");
    if (!dim.isInt() || !repeats.isInt() || found.size() > 1 || one.index != 0 ||
        !value_of(call, "output_size").isNone())
      return run_whole(call, next, found);
    const int64_t along = dim.toInt() < 0 ? dim.toInt() + one.tensor.dim() : dim.toInt(), count = repeats.toInt();
    next(call);
    Cut cut = one.cut;
    if (along == cut.dim) cut.ranges = std::make_shared<const Ranges>(cut.ranges->times(count));
    return add_cut(call.results()[0].toTensor(), std::move(cut));
  }
  const std::vector<int64_t> counts = call.arguments()[1].toIntVector();
  const int64_t added = static_cast<int64_t>(counts.size()) - one.tensor.dim(), at = one.cut.dim + added;
  if (at < 0 || counts[static_cast<size_t>(at)] != 1) {
    // Repeated as a whole, one behind the other: a dim of its own before it.
    if (at < 0 || added < 0 || counts[static_cast<size_t>(at)] < 1) return run_whole(call, next, found);
    Cut cut = cut_along(one.cut, at);
    cut.outer *= counts[static_cast<size_t>(at)];
    next(call);
    return add_cut(call.results()[0].toTensor(), std::move(cut));
  }
  next(call);
  add_results(call, one.cut, [&](const at::Tensor&) { return at; });
}

void TensorPass::run_cat(OperatorCall& call, Next next, const CutArguments& found, bool is_stack) {
  const CutArgument lead = found[0];
  const std::vector<at::Tensor> tensors = call.arguments()[0].toTensorVector();
  const int64_t given = call.arguments()[1].toInt(), dims = lead.tensor.dim() + is_stack;
  const int64_t along = given < 0 ? given + dims : given;
  const bool is_apart = is_stack || along != lead.cut.dim;
  bool is_aligned = is_apart;
  for (const CutArgument& one : found)
    is_aligned = is_aligned && one.cut.dim == lead.cut.dim && one.tensor.dim() == lead.tensor.dim() &&
                 one.cut.whole() == lead.cut.whole();
  for (const at::Tensor& tensor : tensors) is_aligned = is_aligned && tensor.dim() == lead.tensor.dim();
  if (!is_aligned) return run_whole(call, next, found);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) {
    const auto known =
        std::find_if(found.begin(), found.end(), [&](const CutArgument& one) { return one.tensor.is_same(tensor); });
    parts.push_back(next.run(call, [&] {
      if (known == found.end()) return beside(call, tensor, lead.from_right(), lead);
      return recut(*known, cut_along(lead.cut, known->cut.dim));
    }));
  }
  argument(call, 0) = c10::List<at::Tensor>(parts);
  next(call);
  add_results(call, lead.cut,
              [&](const at::Tensor&) { return lead.cut.dim + (is_stack && along <= lead.cut.dim ? 1 : 0); });
}

}  // namespace trireme::tensor
