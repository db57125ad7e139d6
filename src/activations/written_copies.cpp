#include "activations/written_copies.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>

#include <utility>

#include "trireme/base/error.h"

namespace trireme {

std::shared_ptr<CopyOf> selected_from(const AxisPass& pass, const OperatorCall& call, const PlacedArguments& found) {
  if (found.size() != 1 || found[0].index != 0 || !gives_views(call)) return {};
  // Plain slices tell sizes of their own.
  if (!found[0].part.defined() && found[0].known->held != Held::kWithin) return {};
  const c10::IValue index = value_of(call, "index"), dim = value_of(call, "dim");
  if (!index.isInt() || !dim.isInt()) return {};
  const std::vector<int64_t> sizes =
      found[0].known->held == Held::kWithin ? found[0].tensor.sizes().vec() : pass.whole_sizes_of(found[0]);
  const auto dims = static_cast<int64_t>(sizes.size());
  auto origin = std::make_shared<CopyOf>(CopyOf{.of = found[0].part.defined() ? found[0].part : found[0].tensor,
                                                .dim = dim.toInt() < 0 ? dim.toInt() + dims : dim.toInt(),
                                                .index = index.toInt()});
  if (origin->dim < 0 || origin->dim >= dims) return {};
  if (origin->index < 0) origin->index += sizes[static_cast<size_t>(origin->dim)];
  return origin;
}

void note_origin(AxisPass& pass, const std::shared_ptr<CopyOf>& selected, const at::Tensor& result) {
  const auto known = PartTensor::of(result) == nullptr ? pass.find(result) : nullptr;
  if (known == nullptr || !known->is_copy || known->is_cut()) return;
  selected->sizes = result.sizes().vec();
  selected->copy.emplace(result.getIntrusivePtr());
  PlacedTensor returning = *known;
  returning.copy_of = selected;
  pass.add(result, std::move(returning));
}

void write_back(OperatorCall& call, Next next, const at::Tensor& copy, const CopyOf& origin) {
  at::Tensor all;
  if (auto living = origin.copy->lock())
    all = at::Tensor(std::move(living));
  else if (copy.is_view())
    all = at::Tensor(copy._base());
  if (!all.defined() || all.sizes() != at::IntArrayRef(origin.sizes))
    throw StateError(str(call.op.schema().name(), " writes into a view of a copy of other ranks' elements, ",
                         copy.sizes(), ", whose tensor is gone; keep it by a name of its own"));
  next.again(call, [&] {
    // A slice of one index would be a copy, too.
    std::vector<int64_t> along(origin.of.dim(), 1);
    along[origin.dim] = origin.of.size(origin.dim);
    const at::Tensor is_there = at::arange(along[origin.dim], origin.of.device()).eq(origin.index).view(along);
    origin.of.copy_(at::where(is_there, all.unsqueeze(origin.dim), origin.of));
  });
}

}  // namespace trireme
