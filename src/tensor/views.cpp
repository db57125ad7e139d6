// Views of tensors that are cut, and parts of them.
#include <ATen/ops/empty.h>

#include <algorithm>
#include <numeric>
#include <ranges>

#include "tensor/tensor_pass.h"
#include "trireme/base/error.h"

namespace trireme::tensor {
namespace {

int64_t product_of(at::IntArrayRef sizes) {
  return std::accumulate(sizes.begin(), sizes.end(), int64_t{1}, std::multiplies<>());
}

bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* one) { return name == std::string("aten::") + one; });
}

int64_t wrapped(int64_t dim, int64_t dims) { return dim < 0 ? dim + dims : dim; }

/// The dim that dim `cut` of `tensor` becomes by an operator that moves dims: it runs on a tensor without elements,
/// whose dims are told apart by their sizes. -1: nobody knows.
int64_t moved_dim(const OperatorCall& call, const at::Tensor& tensor, int64_t cut) {
  constexpr int64_t kMark = 7919;
  std::vector<int64_t> sizes;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) sizes.push_back(tensor.size(dim) == 1 && dim != cut ? 1 : 2);
  sizes[static_cast<size_t>(cut)] = kMark;
  const WithoutInterception unseen;
  torch::jit::Stack stack = call.arguments().vec();
  stack[0] = at::empty(sizes, at::TensorOptions().device(at::kMeta).dtype(tensor.scalar_type()));
  call.op.callBoxed(&stack);
  const at::Tensor result = stack[0].toTensor();
  int64_t found = -1;
  for (int64_t dim = 0; dim < result.dim(); ++dim)
    if (result.size(dim) == kMark) found = found < 0 ? dim : result.dim();
  return found < result.dim() ? found : -1;
}

}  // namespace

/// The local sizes of a view by sizes that the program gives, of the whole tensor or of this rank's slice. Nothing: the
/// view cuts through slices.
std::optional<TensorPass::Sized> TensorPass::sized(const CutArgument& one, const std::vector<int64_t>& asked) const {
  const std::vector<int64_t> from = whole_sizes_of(one);
  const int rank = group_.rank();
  const auto local_of = [&](std::vector<int64_t> sizes, const Cut& cut) {
    sizes[static_cast<size_t>(cut.dim)] = cut.local(rank);
    return Sized{.local = std::move(sizes), .cut = cut};
  };
  std::optional<Sized> of_whole, of_local;
  if (const auto sizes = resolved_sizes(asked, product_of(from)))
    if (const auto cut = cut_of_view(from, one.cut, *sizes)) of_whole = local_of(*sizes, *cut);
  if (takes_wholes()) return of_whole;
  // A dim of its own is meant rather than one that others went into, and one that stays in its place.
  const auto comes_before = [&](const Cut& a, const Cut& b) {
    if (a.outer != b.outer) return a.outer < b.outer;
    return std::abs(a.dim - one.cut.dim) < std::abs(b.dim - one.cut.dim);
  };
  if (const auto sizes = resolved_sizes(asked, one.tensor.numel()); sizes && one.tensor.numel() > 0)
    for (size_t dim = 0; dim < sizes->size(); ++dim) {
      std::vector<int64_t> whole = *sizes;
      if (whole[dim] * product_of(from) % one.tensor.numel() != 0) continue;
      whole[dim] = whole[dim] * product_of(from) / one.tensor.numel();
      const auto cut = cut_of_view(from, one.cut, whole);
      const bool is_it = cut && cut->dim == static_cast<int64_t>(dim) && cut->local(rank) == (*sizes)[dim];
      if (is_it && (!of_local || comes_before(*cut, of_local->cut))) of_local = local_of(std::move(whole), *cut);
    }
  if (!of_whole || !of_local) return of_whole ? of_whole : of_local;
  const bool is_same = of_whole->cut.dim == of_local->cut.dim && of_whole->cut.has_same_ranges(of_local->cut);
  return is_same || !comes_before(of_local->cut, of_whole->cut) ? of_whole : of_local;
}

void TensorPass::run_view(OperatorCall& call, Next next, const CutArguments& found) {
  const std::string& name = call.op.schema().name();
  const auto arguments = call.arguments();
  const bool of_other = is_one_of(name, {"view_as", "reshape_as", "expand_as"});
  if (found[0].index != 0) {  // a whole tensor of another one's sizes
    const std::vector<int64_t> sizes = whole_sizes_of(found[0]);
    const at::Tensor tensor = arguments[0].toTensor();
    const bool expands = name == "aten::expand_as";
    return give(call, {next.run(call, [&] { return expands ? tensor.expand(sizes) : tensor.reshape(sizes); })});
  }
  const CutArgument one = found[0];
  const auto same_dim = [&](const at::Tensor&) { return one.cut.dim; };
  if (is_one_of(name, {"detach", "detach_", "alias", "lift_fresh", "conj", "_conj", "_neg_view"})) {
    next(call);
    return add_results(call, one.cut, same_dim);
  }
  if (name == "aten::view" && arguments[1].isInt()) {  // of another dtype
    if (one.from_right() == 1) return run_whole(call, next, found);
    next(call);
    return add_results(call, one.cut, same_dim);
  }
  if (writes_first(call)) refuse(call, one.tensor, "changes the sizes in place of", "use the operator without _");
  const std::vector<int64_t> from = whole_sizes_of(one);
  const int64_t dims = one.tensor.dim();
  std::optional<std::vector<int64_t>> asked;
  if (of_other)
    asked = found.size() > 1 ? whole_sizes_of(found[1]) : arguments[1].toTensor().sizes().vec();
  else if (is_one_of(name, {"view", "reshape", "_unsafe_view", "_reshape_alias", "expand", "broadcast_to"}))
    asked = arguments[1].toIntVector();
  else if (name == "aten::ravel")
    asked = {-1};
  if (is_one_of(name, {"expand", "expand_as", "broadcast_to"})) {
    std::vector<int64_t> sizes = *asked;
    const int64_t at = one.cut.dim + static_cast<int64_t>(sizes.size()) - dims;
    if (at < 0) return run_whole(call, next, found);
    int64_t& size = sizes[static_cast<size_t>(at)];
    const bool is_known =
        size == -1 || size == one.cut.whole() || (!takes_wholes() && size == one.tensor.size(one.cut.dim));
    if (!is_known) return run_whole(call, next, found);
    size = one.tensor.size(one.cut.dim);
    const at::Tensor result = next.run(call, [&] { return one.tensor.expand(sizes); });
    add_cut(result, cut_along(one.cut, at));
    return give(call, {result});
  }
  if (name == "aten::flatten") {
    const int64_t begin = wrapped(arguments[1].toInt(), dims), end = wrapped(arguments[2].toInt(), dims);
    std::vector<int64_t> sizes(from.begin(), from.begin() + begin);
    sizes.push_back(
        product_of(at::IntArrayRef(from).slice(static_cast<size_t>(begin), static_cast<size_t>(end - begin + 1))));
    sizes.insert(sizes.end(), from.begin() + end + 1, from.end());
    asked = std::move(sizes);
  }
  if (name == "aten::unflatten") {
    const auto at = static_cast<size_t>(wrapped(arguments[1].toInt(), dims));
    std::vector<int64_t> into = arguments[2].toIntVector(), sizes = from;
    if (static_cast<int64_t>(at) == one.cut.dim && !takes_wholes()) sizes = one.tensor.sizes().vec();
    const auto open = std::find(into.begin(), into.end(), -1);
    // One size is open: so it may be in the sizes of all dims.
    if (open == into.end() && static_cast<int64_t>(at) == one.cut.dim && product_of(into) == one.cut.whole())
      sizes = from;
    sizes.erase(sizes.begin() + static_cast<int64_t>(at));
    sizes.insert(sizes.begin() + static_cast<int64_t>(at), into.begin(), into.end());
    asked = std::move(sizes);
  }
  if (asked) {
    const auto made = sized(one, *asked);
    if (!made) return run_whole(call, next, found);
    const bool copies = name != "aten::view";
    const at::Tensor result =
        next.run(call, [&] { return copies ? one.tensor.reshape(made->local) : one.tensor.view(made->local); });
    add_cut(result, made->cut);
    return give(call, {result});
  }
  if (name == "aten::squeeze" && one.tensor.size(one.cut.dim) == 1) {  // of a slice of one element
    std::vector<int64_t> asked_dims = named_dims(call, dims), squeezed;
    if (call.traits.arguments == 1)
      for (int64_t dim = 0; dim < dims; ++dim) asked_dims.push_back(dim);
    for (const int64_t dim : asked_dims)
      if (dim != one.cut.dim && one.tensor.size(dim) == 1) squeezed.push_back(dim);
    const int64_t before =
        std::count_if(squeezed.begin(), squeezed.end(), [&](int64_t dim) { return dim < one.cut.dim; });
    const at::Tensor result =
        next.run(call, [&] { return squeezed.empty() ? one.tensor.alias() : one.tensor.squeeze(squeezed); });
    add_cut(result, cut_along(one.cut, one.cut.dim - before));
    return give(call, {result});
  }
  int64_t dim = -1;
  if (is_one_of(name, {"transpose", "swapaxes", "swapdims"})) {
    const int64_t a = wrapped(arguments[1].toInt(), dims), b = wrapped(arguments[2].toInt(), dims);
    dim = one.cut.dim == a ? b : one.cut.dim == b ? a : one.cut.dim;
  } else if (name == "aten::t" || name == "aten::numpy_T") {
    dim = dims - 1 - one.cut.dim;
  } else if (name == "aten::unsqueeze") {
    dim = one.cut.dim + (wrapped(arguments[1].toInt(), dims + 1) <= one.cut.dim ? 1 : 0);
  } else if (name == "aten::view_as_real" || name == "aten::view_as_complex") {
    dim = one.from_right() == 1 && name == "aten::view_as_complex" ? -1 : one.cut.dim;
  } else {
    dim = moved_dim(call, one.tensor, one.cut.dim);
  }
  if (dim < 0) return run_whole(call, next, found);
  next(call);
  add_results(call, one.cut, [&](const at::Tensor&) { return dim; });
}

/// The stretches of the dim that a part operator along it asks for, in order. Nothing: they are not to be had of
/// slices.
std::optional<std::vector<Interval>> TensorPass::pieces_of(const OperatorCall& call, const CutArgument& one) const {
  const std::string& name = call.op.schema().name();
  const auto arguments = call.arguments();
  const int64_t whole = one.cut.whole();
  const auto at_of = [&](const c10::IValue& value, int64_t otherwise) {
    if (!value.isInt()) return otherwise;
    const int64_t at = value.toInt() < 0 ? value.toInt() + whole : value.toInt();
    return std::clamp<int64_t>(at, 0, whole);
  };
  const auto equal = [&](int64_t size) {
    std::vector<Interval> pieces;
    for (int64_t begin = 0; begin < whole && size > 0; begin += size)
      pieces.push_back({begin, std::min(begin + size, whole)});
    return pieces;
  };
  if (one.cut.outer != 1) return {};
  if (name == "aten::slice") {
    if (arguments[4].isInt() && arguments[4].toInt() != 1) return {};
    return std::vector<Interval>{{at_of(arguments[2], 0), at_of(arguments[3], whole)}};
  }
  if (name == "aten::narrow") {
    if (!arguments[2].isInt()) return {};
    const int64_t begin = at_of(arguments[2], 0);
    return std::vector<Interval>{{begin, begin + arguments[3].toInt()}};
  }
  if (is_one_of(name, {"chunk", "unsafe_chunk"})) {
    const int64_t count = arguments[1].toInt();
    return count > 0 ? std::optional(equal((whole + count - 1) / count)) : std::nullopt;
  }
  if (is_one_of(name, {"split", "unsafe_split"}) && arguments[1].isInt()) return equal(arguments[1].toInt());
  if (is_one_of(name, {"split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes"}) &&
      arguments[1].isIntList()) {
    std::vector<Interval> pieces;
    int64_t at = 0;
    for (const int64_t size : arguments[1].toIntVector()) {
      pieces.push_back({at, at + size});
      at += size;
    }
    return pieces;
  }
  return {};
}

/// slice(), select(), split() and their kin.
void TensorPass::run_part(OperatorCall& call, Next next, const CutArguments& found) {
  const CutArgument one = found[0];
  const std::string& name = call.op.schema().name();
  if (found.size() > 1 || one.index != 0) return run_whole(call, next, found);
  const std::vector<int64_t> named = named_dims(call, one.tensor.dim());
  const int64_t along = named.empty() ? 0 : named[0];
  if (along != one.cut.dim) {
    const bool drops = name == "aten::select" || name == "aten::unbind";
    next(call);
    return add_results(call, one.cut,
                       [&](const at::Tensor&) { return one.cut.dim - (drops && along < one.cut.dim ? 1 : 0); });
  }
  auto pieces = pieces_of(call, one);
  if (pieces)
    for (Interval& piece : *pieces) piece = piece_of_whole(call, one, piece);
  const bool is_list = call.op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType;
  std::vector<std::shared_ptr<const Ranges>> slices;
  if (pieces)
    for (const Interval& piece : *pieces)
      if (auto own = within(*one.cut.ranges, piece.begin, piece.end))
        slices.push_back(std::make_shared<const Ranges>(*std::move(own)));
  if (!pieces || slices.size() != pieces->size() || pieces->empty()) return run_whole(call, next, found);
  std::vector<at::Tensor> results;
  next.run(call, [&] {
    for (const Interval& piece : *pieces) {
      const Interval local = one.cut.ranges->place_of(group_.rank(), piece);
      results.push_back(one.tensor.narrow(along, local.begin, local.size()));
    }
  });
  for (size_t i = 0; i < results.size(); ++i) add_cut(results[i], {.dim = along, .outer = 1, .ranges = slices[i]});
  if (is_list) return give(call, {c10::List<at::Tensor>(results)});
  give(call, {results[0]});
}

/// The stretch of the whole that a program means, which may have read the sizes of this rank's slice: whole sections of
/// it, such as the keys of a packed projection, stand for the whole's.
Interval TensorPass::piece_of_whole(const OperatorCall& call, const CutArgument& one, const Interval& asked) {
  if (takes_wholes()) return asked;
  const Ranges& slices = *one.cut.ranges;
  const auto ranks = std::views::iota(0, slices.ranks());
  const std::vector<Interval>& own = slices.of_rank(group_.rank());
  int64_t at = 0, first = -1, last = -1;
  for (size_t i = 0; i < own.size(); at += own[i++].size()) {
    if (at == asked.begin) first = static_cast<int64_t>(i);
    if (at + own[i].size() == asked.end) last = static_cast<int64_t>(i);
  }
  const bool is_of_sections = first >= 0 && last >= first && std::ranges::all_of(ranks, [&](int rank) {
                                return slices.of_rank(rank).size() == own.size();
                              });
  if (!is_of_sections) return asked;
  Interval meant = own[static_cast<size_t>(first)];
  for (const int rank : ranks) {
    meant.begin = std::min(meant.begin, slices.of_rank(rank)[first].begin);
    meant.end = std::max(meant.end, slices.of_rank(rank)[last].end);
  }
  if (meant == asked || asked.end > slices.whole() || !within(slices, asked.begin, asked.end)) return meant;
  const Interval of_whole = slices.place_of(group_.rank(), asked);
  const bool is_section =
      std::any_of(own.begin(), own.end(), [&](const Interval& section) { return section.size() == of_whole.size(); });
  if (is_section && first != last) return asked;
  if (!is_section && first == last) return meant;
  refuse(call, one.tensor, str("takes [", asked.begin, ":", asked.end, "], of the whole or of a slice, from"),
         "use chunk() or split() with the whole's sizes");
}

}  // namespace trireme::tensor
