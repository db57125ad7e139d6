// The meaning of sizes and bounds in a C++ program, which may have read those of a part.
#include <algorithm>
#include <numeric>
#include <ranges>

#include "tensor/slices.h"
#include "tensor/tensor_policy.h"
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

/// The stretches of the dim that a part operator along it asks for, in order. Nothing: they are not to be had of
/// slices.
std::optional<std::vector<Interval>> pieces_of(const OperatorCall& call, const Cut& cut) {
  const auto has = [&](const char* name) { return call.op.schema().argumentIndexWithName(name).has_value(); };
  const int64_t whole = cut.whole();
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
  if (cut.outer != 1) return {};
  const c10::IValue start = value_of(call, "start");
  if (has("end")) {
    const c10::IValue step = value_of(call, "step");
    if (step.isInt() && step.toInt() != 1) return {};
    return std::vector<Interval>{{at_of(start, 0), at_of(value_of(call, "end"), whole)}};
  }
  if (has("length")) {
    if (!start.isInt()) return {};
    const int64_t begin = at_of(start, 0);
    return std::vector<Interval>{{begin, begin + value_of(call, "length").toInt()}};
  }
  if (has("chunks")) {
    const int64_t count = value_of(call, "chunks").toInt();
    return count > 0 ? std::optional(equal((whole + count - 1) / count)) : std::nullopt;
  }
  const c10::IValue sizes = value_of(call, has("split_size") ? "split_size" : "split_sizes");
  if (sizes.isInt()) return equal(sizes.toInt());
  if (sizes.isIntList()) {
    std::vector<Interval> pieces;
    int64_t at = 0;
    for (const int64_t size : sizes.toIntVector()) {
      pieces.push_back({at, at + size});
      at += size;
    }
    return pieces;
  }
  return {};
}

}  // namespace

/// The whole's sizes of a view by sizes that the program gives, of the whole tensor or of this rank's slice. Nothing:
/// the view cuts through slices.
std::optional<TensorPolicy::Sized> TensorPolicy::sized(const AxisPass& pass, const PlacedArgument& one,
                                                       const std::vector<int64_t>& asked) const {
  const std::vector<int64_t> from = pass.whole_sizes_of(one);
  const Cut& own = *cut_of(pass, one);
  const int rank = pass.group(axis_).rank();
  const auto view_of = [&](std::vector<int64_t> sizes, const Cut& cut) {
    return Sized{.whole = std::move(sizes), .cut = cut};
  };
  std::optional<Sized> of_whole, of_local;
  if (const auto sizes = resolved_sizes(asked, product_of(from)))
    if (const auto cut = cut_of_view(from, own, *sizes)) of_whole = view_of(*sizes, *cut);
  // A dim of its own is meant rather than one that others went into, and one that stays in its place.
  const auto comes_before = [&](const Cut& a, const Cut& b) {
    if (a.outer != b.outer) return a.outer < b.outer;
    return std::abs(a.dim - own.dim) < std::abs(b.dim - own.dim);
  };
  if (const auto sizes = resolved_sizes(asked, one.tensor.numel()); sizes && one.tensor.numel() > 0)
    for (size_t dim = 0; dim < sizes->size(); ++dim) {
      std::vector<int64_t> whole = *sizes;
      if (whole[dim] * product_of(from) % one.tensor.numel() != 0) continue;
      whole[dim] = whole[dim] * product_of(from) / one.tensor.numel();
      const auto cut = cut_of_view(from, own, whole);
      const bool is_it = cut && cut->dim == static_cast<int64_t>(dim) && cut->local(rank) == (*sizes)[dim];
      if (is_it && (!of_local || comes_before(*cut, of_local->cut))) of_local = view_of(std::move(whole), *cut);
    }
  if (!of_whole || !of_local) return of_whole ? of_whole : of_local;
  const bool is_same = of_whole->cut.dim == of_local->cut.dim && of_whole->cut.has_same_ranges(of_local->cut);
  return is_same || !comes_before(of_local->cut, of_whole->cut) ? of_whole : of_local;
}

/// Sizes among the arguments become the whole's; false: they are of no view that stays cut.
bool TensorPolicy::mean_wholes(AxisPass& pass, OperatorCall& call, const PlacedArgument& one) const {
  const Cut* const cut = cut_of(pass, one);
  const std::string& name = call.op.schema().name();
  if (!pass.may_read_parts() || cut == nullptr || one.index != 0 || call.traits.arguments < 2) return true;
  const int64_t dims = one.tensor.dim();
  if (is_one_of(name, {"view", "reshape", "_unsafe_view"}) && argument(call, 1).isIntList()) {
    const auto made = sized(pass, one, argument(call, 1).toIntVector());
    if (made) argument(call, 1) = made->whole;
    return made.has_value();
  }
  if (is_one_of(name, {"expand", "broadcast_to"})) {
    std::vector<int64_t> sizes = argument(call, 1).toIntVector();
    const int64_t at = cut->dim + static_cast<int64_t>(sizes.size()) - dims;
    if (at >= 0 && sizes[at] == one.tensor.size(cut->dim)) sizes[at] = cut->whole();
    argument(call, 1) = std::move(sizes);
  }
  if (is_one_of(name, {"unflatten"}) && argument(call, 1).isInt()) {
    const int64_t at = wrapped(argument(call, 1).toInt(), dims);
    const std::vector<int64_t> into = argument(call, 2).toIntVector();
    if (at != cut->dim || product_of(into) == cut->whole()) return true;
    std::vector<int64_t> sizes = one.tensor.sizes().vec();
    sizes.erase(sizes.begin() + at);
    sizes.insert(sizes.begin() + at, into.begin(), into.end());
    const auto made = sized(pass, one, sizes);
    if (made)
      argument(call, 2) =
          std::vector<int64_t>(made->whole.begin() + at, made->whole.begin() + at + static_cast<int64_t>(into.size()));
    return made.has_value();
  }
  return true;
}

/// slice(), narrow() and split() by bounds of a part, which stand for the whole's; false: they are the whole's.
bool TensorPolicy::run_part(AxisPass& pass, OperatorCall& call, Next next, const PlacedArguments& found) {
  const PlacedArgument one = found[0];
  const Cut* const cut = cut_of(pass, one);
  if (cut == nullptr || found.size() > 1 || one.index != 0) return false;
  const std::vector<int64_t> named = named_dims(call, one.tensor.dim());
  if ((named.empty() ? 0 : named[0]) != cut->dim) return false;
  const auto asked = pieces_of(call, *cut);
  if (!asked) return false;
  std::vector<Interval> meant;
  for (const Interval& piece : *asked) meant.push_back(piece_of_whole(pass, call, one, piece));
  if (meant == *asked) return false;
  std::vector<at::Tensor> results;
  for (const Interval& piece : meant) {
    const auto own = within(*cut->ranges, piece.begin, piece.end);
    if (!own) {
      pass.run_whole(call, next, found);
      return true;
    }
    const Interval local = cut->ranges->place_of(pass.group(axis_).rank(), piece);
    results.push_back(next.run(call, [&] { return one.tensor.narrow(cut->dim, local.begin, local.size()); }));
    const Cut of_piece{.axis = axis_, .dim = cut->dim, .ranges = std::make_shared<const Ranges>(*own)};
    pass.add(results.back(), pass.with_cut({.placement = one.known->placement}, of_piece));
  }
  const bool is_list = call.op.schema().returns()[0].type()->kind() == c10::TypeKind::ListType;
  give(call, {is_list ? c10::IValue(c10::List<at::Tensor>(results)) : c10::IValue(results[0])});
  return true;
}

/// The stretch of the whole that a program means, which may have read the sizes of this rank's slice: whole sections of
/// it, such as the keys of a packed projection, stand for the whole's.
Interval TensorPolicy::piece_of_whole(AxisPass& pass, const OperatorCall& call, const PlacedArgument& one,
                                      const Interval& asked) {
  const Ranges& slices = *cut_of(pass, one)->ranges;
  const int rank = pass.group(axis_).rank();
  const auto ranks = std::views::iota(0, slices.ranks());
  const std::vector<Interval>& own = slices.of_rank(rank);
  int64_t at = 0, first = -1, last = -1;
  for (size_t i = 0; i < own.size(); at += own[i++].size()) {
    if (at == asked.begin) first = static_cast<int64_t>(i);
    if (at + own[i].size() == asked.end) last = static_cast<int64_t>(i);
  }
  const bool is_of_sections = first >= 0 && last >= first && std::ranges::all_of(ranks, [&](int other) {
                                return slices.of_rank(other).size() == own.size();
                              });
  if (!is_of_sections) return asked;
  Interval meant = own[static_cast<size_t>(first)];
  for (const int other : ranks) {
    meant.begin = std::min(meant.begin, slices.of_rank(other)[first].begin);
    meant.end = std::max(meant.end, slices.of_rank(other)[last].end);
  }
  if (meant == asked || asked.end > slices.whole() || !within(slices, asked.begin, asked.end)) return meant;
  const Interval of_whole = slices.place_of(rank, asked);
  const bool is_section =
      std::any_of(own.begin(), own.end(), [&](const Interval& section) { return section.size() == of_whole.size(); });
  if (is_section && first != last) return asked;
  if (!is_section && first == last) return meant;
  pass.refuse(call, one.tensor, str("takes [", asked.begin, ":", asked.end, "], of the whole or of a slice, from"),
              "use chunk() or split() with the whole's sizes");
}

}  // namespace trireme::tensor
