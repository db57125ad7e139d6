// Random calls of views, pieces, and operators along dims.
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <numeric>

#include "tests/support/operators/draw.h"

namespace trireme::testing {
namespace {

using Made = std::optional<OperatorCase>;

/// The name without namespace and overload.
std::string base_of(const std::string& op) {
  const std::string name = op.substr(6);
  return name.substr(0, name.find('.'));
}

/// Sizes of as many elements, each above 1.
Sizes sizes_of_elements(Draw& draw, int64_t elements) {
  Sizes made;
  while (elements > 1) {
    Sizes divisors;
    for (int64_t d = 2; d <= elements; ++d)
      if (elements % d == 0) divisors.push_back(d);
    made.push_back(draw.of(divisors));
    elements /= made.back();
  }
  if (draw.chance(0.2)) made.insert(made.begin() + draw.between(0, static_cast<int64_t>(made.size())), 1);
  return made;
}

int64_t maybe_negative(Draw& draw, int64_t dim, int64_t dims) { return draw.chance(0.3) ? dim - dims : dim; }

Made of_view(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 4);
  const std::string name = base_of(op);
  const int64_t dims = static_cast<int64_t>(sizes.size());
  const at::Tensor x = draw.floats(sizes);
  if (name == "ravel") return call_of(op, {{"self", x}});
  const int64_t at = draw.below(dims);
  if (name == "flatten")
    return call_of(
        op, {{"self", x}, {"start_dim", at}, {"end_dim", maybe_negative(draw, draw.between(at, dims - 1), dims)}});
  Sizes to = sizes_of_elements(draw, name == "unflatten" ? sizes[at] : x.numel());
  if (to.empty()) to = {1};
  if (name.ends_with("_as")) return call_of(op, {{"self", x}, {"other", draw.floats(to)}});
  if (draw.chance(0.3)) to[draw.below(static_cast<int64_t>(to.size()))] = -1;
  if (name == "unflatten") return call_of(op, {{"self", x}, {"dim", maybe_negative(draw, at, dims)}, {"sizes", to}});
  return call_of(op, {{"self", x}, {name == "reshape" ? "shape" : "size", to}});
}

Made of_order(Draw& draw, const std::string& op, Sizes sizes) {
  const std::string name = base_of(op);
  const bool is_matrix = name == "t" || name == "matrix_H";
  if (sizes.empty()) sizes = is_matrix ? draw.sizes(2, 2) : draw.sizes(2, 4);
  const int64_t dims = static_cast<int64_t>(sizes.size());
  if (dims < 2 || (is_matrix && dims != 2)) return std::nullopt;
  Given given{{"self", draw.floats(sizes)}};
  const auto drawn_dim = [&] { return maybe_negative(draw, draw.below(dims), dims); };
  Sizes order(dims);
  std::iota(order.begin(), order.end(), 0);
  std::ranges::shuffle(order, draw.random);
  if (name == "permute") given.push_back({"dims", order});
  if (name == "transpose") given.insert(given.end(), {{"dim0", drawn_dim()}, {"dim1", drawn_dim()}});
  if (name == "swapaxes") given.insert(given.end(), {{"axis0", drawn_dim()}, {"axis1", drawn_dim()}});
  if (name == "swapdims") given.insert(given.end(), {{"dim0", drawn_dim()}, {"dim1", drawn_dim()}});
  if (op.ends_with(".int") && name.starts_with("move"))
    given.insert(given.end(), {{"source", drawn_dim()}, {"destination", drawn_dim()}});
  if (op.ends_with(".intlist")) {
    Sizes to = order;
    std::ranges::shuffle(to, draw.random);
    given.insert(given.end(), {{"source", Sizes{order[0], order[1] - dims}}, {"destination", Sizes{to[0], to[1]}}});
  }
  return call_of(op, given);
}

Made of_ones(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 4);
  const int64_t dims = static_cast<int64_t>(sizes.size());
  Given given{{"self", draw.floats(sizes)}};
  if (op.ends_with("unsqueeze")) given.push_back({"dim", draw.between(-dims - 1, dims)});
  if (op.ends_with(".dim")) given.push_back({"dim", draw.between(-dims, dims - 1)});
  if (op.ends_with(".dims")) given.push_back({"dim", dims > 1 ? Sizes{0, -1} : Sizes{0}});
  return call_of(op, given);
}

Made of_repeats(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const std::string name = base_of(op);
  const int64_t dims = static_cast<int64_t>(sizes.size());
  const at::Tensor x = draw.floats(sizes);
  Sizes lead = draw.sizes(0, 1), to = lead;
  for (const int64_t size : sizes) to.push_back(size == 1 ? draw.of<int64_t>({1, 3}) : size);
  if (name == "expand_as") return call_of(op, {{"self", x}, {"other", draw.floats(to)}});
  if (name == "expand" || name == "broadcast_to") {
    const int64_t kept = draw.below(dims);
    if (name == "expand" && to[lead.size() + kept] == sizes[kept]) to[lead.size() + kept] = -1;
    return call_of(op, {{"self", x}, {"size", to}});
  }
  Sizes times = lead;
  for (int64_t d = 0; d < dims; ++d) times.push_back(draw.of<int64_t>({1, 1, 2}));
  if (name == "tile" && draw.chance(0.3)) times.erase(times.begin());
  if (name == "tile") return call_of(op, {{"self", x}, {"dims", times}});
  if (name == "repeat") return call_of(op, {{"self", x}, {"repeats", times}});
  const c10::IValue dim = draw.chance(0.3) ? c10::IValue() : c10::IValue(draw.between(-dims, dims - 1));
  return call_of(op, {{"self", x}, {"repeats", draw.between(1, 3)}, {"dim", dim}});
}

Made of_lists(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const bool is_stack = base_of(op) == "stack";
  const int64_t dims = static_cast<int64_t>(sizes.size());
  const int64_t dim = is_stack ? draw.between(-dims - 1, dims) : draw.between(-dims, dims - 1);
  std::vector<at::Tensor> tensors{draw.floats(sizes)};
  for (int64_t more = draw.between(1, 2); more > 0; --more) {
    Sizes own = sizes;
    if (!is_stack) own[dim < 0 ? dim + dims : dim] = draw.of<int64_t>({1, 2, 3, 6});
    tensors.push_back(draw.floats(own));
  }
  return call_of(op, {{"tensors", tensors}, {"dim", dim}});
}

Made of_slice(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const std::string name = base_of(op);
  const int64_t dims = static_cast<int64_t>(sizes.size()), d = draw.below(dims), size = sizes[d];
  Given given{{"self", draw.floats(sizes)}, {"dim", maybe_negative(draw, d, dims)}};
  const int64_t begin = draw.below(size), end = draw.between(begin + 1, size);
  if (name == "select") given.push_back({"index", maybe_negative(draw, begin, size)});
  if (name == "narrow") given.insert(given.end(), {{"start", begin}, {"length", end - begin}});
  if (name == "slice") {
    if (draw.chance(0.8)) given.push_back({"start", maybe_negative(draw, begin, size)});
    if (draw.chance(0.8))
      given.push_back({"end", end == size ? draw.of<int64_t>({size, 1 << 30}) : maybe_negative(draw, end, size)});
    given.push_back({"step", draw.of<int64_t>({1, 1, 1, 2})});
  }
  return call_of(op, given);
}

Made of_split(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const int64_t dims = static_cast<int64_t>(sizes.size()), d = draw.below(dims), size = sizes[d];
  Given given{{"self", draw.floats(sizes)}, {"dim", maybe_negative(draw, d, dims)}};
  const int64_t cut = draw.between(1, size);
  Sizes parts{cut};
  if (cut < size) parts.push_back(size - cut);
  if (op.ends_with("split.Tensor")) given.push_back({"split_size", cut});
  if (op.ends_with("split.sizes")) given.push_back({"split_size", parts});
  if (op.ends_with("with_sizes")) given.push_back({"split_sizes", parts});
  if (op.ends_with("chunk")) given.push_back({"chunks", draw.between(1, 3)});
  if (op.ends_with("sections")) given.push_back({"sections", draw.between(1, size)});
  if (op.ends_with("indices")) given.push_back({"indices", Sizes{cut}});
  return call_of(op, given);
}

Made of_shift(Draw& draw, const std::string& op, Sizes sizes) {
  const std::string name = base_of(op);
  if (sizes.empty()) sizes = draw.sizes(name == "fliplr" ? 2 : 1, 3);
  const int64_t dims = static_cast<int64_t>(sizes.size());
  Given given{{"self", draw.floats(sizes)}};
  Sizes along(dims);
  std::iota(along.begin(), along.end(), -dims);
  std::ranges::shuffle(along, draw.random);
  along.resize(draw.between(1, std::min<int64_t>(dims, 2)));
  if (name == "flip") given.push_back({"dims", along});
  if (name == "roll") {
    Sizes shifts;
    for (size_t i = 0; i < along.size(); ++i) shifts.push_back(draw.between(-3, 7));
    if (draw.chance(0.1)) along.clear(), shifts.resize(1);
    given.insert(given.end(), {{"shifts", shifts}, {"dims", along}});
  }
  if (name == "constant_pad_nd" || name == "pad") {
    Sizes pads;
    for (int64_t i = 0, count = draw.between(1, dims); i < count; ++i) {
      const int64_t size = sizes[dims - 1 - i], before = draw.between(size > 2 ? -1 : 0, 2);
      pads.insert(pads.end(), {before, draw.between(size > 2 ? -1 : 0, 2)});
    }
    given.push_back({"pad", pads});
  }
  return call_of(op, given);
}

Made of_reduction(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 4);
  const std::string name = base_of(op);
  const int64_t dims = static_cast<int64_t>(sizes.size());
  const bool is_of_bools = name == "any" || name == "all" || name.starts_with("_is_");
  const at::Tensor x = draw.floats(sizes);
  Given given{{"self", is_of_bools ? x > 0.7 : name == "count_nonzero" ? x * (x > 0.8) : x}};
  const c10::FunctionSchema& schema =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow(op.substr(0, op.find('.')).c_str(),
                             op.find('.') == op.npos ? "" : op.substr(op.find('.') + 1).c_str())
          .schema();
  if (const auto at = schema.argumentIndexWithName("dim")) {
    const std::string type = schema.arguments()[*at].type()->str();
    const int64_t one = draw.between(-dims, dims - 1);
    if (type.starts_with("int[]")) {
      Sizes along(dims);
      std::iota(along.begin(), along.end(), -dims);
      std::ranges::shuffle(along, draw.random);
      along.resize(draw.between(1, dims));
      given.push_back({"dim", along});
    } else if (!type.ends_with('?') || draw.chance(0.6)) {
      given.push_back({"dim", one});
    }
  }
  if (schema.argumentIndexWithName("keepdim")) given.push_back({"keepdim", draw.chance(0.5)});
  for (const char* const count : {"k"})
    if (schema.argumentIndexWithName(count)) given.push_back({count, 1});
  if (schema.argumentIndexWithName("p")) given.push_back({"p", 2});
  if (op.ends_with("quantile.scalar")) given.push_back({"q", 0.3});
  if (op.ends_with("quantile")) given.push_back({"q", draw.floats({2}).sigmoid()});
  if (op.ends_with(".stable")) given.push_back({"stable", true});
  if (schema.argumentIndexWithName("half_to_float")) given.push_back({"half_to_float", false});
  return call_of(op, given);
}

Made of_resize(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const std::string name = base_of(op);
  const int64_t dims = static_cast<int64_t>(sizes.size()), d = draw.below(dims);
  if (sizes[d] % 2) sizes[d] += 1;
  Given given{{name == "glu" ? "self" : "self", draw.floats(sizes)},
              {name == "unfold" ? "dimension" : "dim", maybe_negative(draw, d, dims)}};
  if (name == "topk") given.push_back({"k", draw.between(1, sizes[d])});
  if (name == "unfold") given.insert(given.end(), {{"size", draw.between(1, 2)}, {"step", draw.between(1, 2)}});
  if (name == "diff" && draw.chance(0.5)) {
    sizes[d] = draw.between(1, 3);
    given.push_back({draw.chance(0.5) ? "prepend" : "append", draw.floats(sizes)});
  }
  return call_of(op, given);
}

Made of_loss(Draw& draw, const std::string& op, Sizes sizes) {
  if (sizes.empty()) sizes = draw.sizes(1, 3);
  const std::string name = base_of(op);
  Given given{{name == "poisson_nll_loss" ? "input" : "self", draw.floats(sizes) * 0.6},
              {"target", draw.floats(sizes) * 0.6},
              {"reduction", draw.between(0, 2)}};
  if (name == "poisson_nll_loss") given.insert(given.end(), {{"log_input", true}, {"full", false}, {"eps", 1e-8}});
  if (name.starts_with("binary") && draw.chance(0.5)) given.push_back({"weight", draw.floats(draw.broadcast(sizes))});
  return call_of(op, given);
}

}  // namespace

std::vector<MakerOfNames> makers_of_dims() {
  return {
      {of_view, "view view_as reshape reshape_as _unsafe_view flatten.using_ints ravel unflatten.int"},
      {of_order,
       "permute transpose.int t numpy_T mT mH adjoint matrix_H swapaxes swapdims movedim.int movedim.intlist "
       "moveaxis.int "
       "moveaxis.intlist"},
      {of_ones, "squeeze squeeze.dim squeeze.dims unsqueeze atleast_1d atleast_2d atleast_3d"},
      {of_repeats, "expand expand_as broadcast_to repeat tile repeat_interleave.self_int"},
      {of_lists, "stack cat concat concatenate"},
      {of_slice, "slice.Tensor narrow select.int"},
      {of_split,
       "split.Tensor split.sizes split_with_sizes chunk unbind.int tensor_split.sections tensor_split.indices "
       "unsafe_chunk "
       "unsafe_split.Tensor unsafe_split_with_sizes"},
      {of_shift, "roll flip fliplr flipud constant_pad_nd pad"},
      {of_reduction,
       "sum sum.dim_IntList mean mean.dim any any.dim any.dims all all.dim all.dims _is_all_true _is_any_true amax "
       "amin max "
       "max.dim min min.dim argmax argmin aminmax logsumexp prod prod.dim_int norm.Scalar norm.ScalarOpt_dim "
       "linalg_vector_norm var var.dim var.correction std std.dim std.correction var_mean.correction "
       "std_mean.correction "
       "nansum nanmean median median.dim nanmedian nanmedian.dim mode count_nonzero count_nonzero.dim_IntList kthvalue "
       "quantile quantile.scalar nanquantile nanquantile.scalar "
       "softmax.int log_softmax.int _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp sort "
       "sort.stable argsort argsort.stable msort"},
      {of_resize, "topk glu diff unfold"},
      {of_loss,
       "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits "
       "soft_margin_loss poisson_nll_loss"},
  };
}

}  // namespace trireme::testing
