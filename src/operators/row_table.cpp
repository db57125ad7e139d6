// The table: which family makes the row of an operator, and which function gives its arguments their meaning here.
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <unordered_map>

#include "operators/families.h"

namespace trireme {
namespace {

struct RowOfNames {
  OperatorRow operators;
  const char*
      names;  ///< without "aten::" and without the "_" of what writes in place; or overloads; "view.": the default
};

constexpr RowOfNames kTable[] = {
    {{rows::each, nullptr, "each"},
     // With the pointwise tag in some overloads only, or in none.
     "add sub subtract mul multiply div divide true_divide floor_divide rsub eq ne gt ge lt le greater "
     "greater_equal less less_equal not_equal __and__ __or__ __xor__ __iand__ __ior__ __ixor__ __lshift__ "
     "__rshift__ __ilshift__ __irshift__ logical_and logical_or logical_not logical_xor absolute abs negative "
     "arccos arcsin arctan arctanh arccosh arcsinh arctan2 fix leaky_relu elu gelu mish hardswish hardsigmoid "
     "hardtanh threshold log_sigmoid log_sigmoid_forward _prelu_kernel rrelu relu6 selu celu copysign heaviside "
     "lcm gcd xlogy masked_fill where.self where.ScalarSelf where.ScalarOther where.Scalar dropout "
     "native_dropout alpha_dropout bernoulli normal.Tensor_Tensor complex polar isclose isreal max.other "
     "min.other maximum minimum conj_physical real imag positive lerp square nan_to_num resolve_conj "
     "resolve_neg conj _conj _neg_view _cast_Byte _cast_Char _cast_Double _cast_Float "
     "_cast_Half _cast_Int _cast_Long _cast_Short _to_copy silu softplus addcmul addcdiv clamp clip clamp_min "
     "clamp_max"},
    {{rows::each, nullptr, "each", false, Elements::kAlias}, "detach alias lift_fresh"},
    {{rows::each, nullptr, "each", false, Elements::kSame},
     "contiguous to _autocast_to_full_precision _autocast_to_reduced_precision"},
    {{rows::each, nullptr, "each", false, Elements::kCopied}, "clone pin_memory"},
    {{rows::each, nullptr, "each", false, Elements::kFresh},
     "empty_like zeros_like ones_like full_like rand_like randn_like randint_like zero fill copy uniform random "
     "exponential cauchy log_normal geometric normal_ bernoulli_ bernoulli.p"},
    {{rows::of_first, nullptr, "each"}, "type_as"},
    {{rows::of_first, nullptr, "each", false, Elements::kSame}, "to.other"},
    {{rows::channel_wise, nullptr, "features"}, "prelu"},
    {{rows::find, nullptr, "find"}, "isin bucketize searchsorted"},
    {{rows::loss_of_each, nullptr, "losses"},
     "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits "
     "soft_margin_loss poisson_nll_loss"},
    {{rows::view, rows::localise_view, "views"}, "view. view_as _unsafe_view unflatten.int"},
    {{rows::view, rows::localise_view, "views", false, Elements::kSame}, "reshape reshape_as flatten.using_ints ravel"},
    {{rows::moved, nullptr, "views"},
     "permute transpose.int transpose_ t numpy_T mT mH adjoint matrix_H swapaxes swapdims movedim moveaxis"},
    {{rows::squeezed, rows::localise_squeezed, "views"}, "squeeze unsqueeze atleast_1d. atleast_2d. atleast_3d."},
    {{rows::expanded, rows::localise_expanded, "views"}, "expand expand_as broadcast_to"},
    {{rows::repeated, rows::localise_repeated, "views"}, "repeat tile"},
    {{rows::interleaved, rows::localise_interleaved, "views"}, "repeat_interleave.self_int"},
    {{rows::stacked, nullptr, "views"}, "stack"},
    {{rows::of_bits, nullptr, "views"}, "view.dtype"},
    {{rows::of_pairs, nullptr, "views"}, "view_as_real view_as_complex"},
    {{rows::slice, rows::localise_slice, "pieces"}, "slice.Tensor narrow. select.int"},
    {{rows::split, rows::localise_split, "pieces"},
     "split.Tensor split.sizes split_with_sizes chunk unbind.int tensor_split.sections tensor_split.indices "
     "unsafe_chunk "
     "unsafe_split.Tensor unsafe_split_with_sizes"},
    {{rows::cat, nullptr, "pieces"}, "cat. concat. concatenate."},
    {{rows::roll, rows::localise_roll, "pieces"}, "roll"},
    {{rows::flip, nullptr, "pieces"}, "flip fliplr flipud"},
    {{rows::pad, rows::localise_pad, "pieces"}, "constant_pad_nd pad"},
    {{rows::reduction, nullptr, "reductions"},
     "sum mean any all _is_all_true _is_any_true amax amin max min max.dim min.dim argmax argmin aminmax logsumexp "
     "prod "
     "norm linalg_vector_norm var std var_mean std_mean nansum nanmean median nanmedian mode count_nonzero kthvalue "
     "quantile nanquantile"},
    {{rows::scan, nullptr, "scans"},
     "softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumprod cummax cummin logcumsumexp sort argsort "
     "msort "
     "renorm cross linalg_cross"},
    {{rows::resized, nullptr, "scans"}, "topk glu diff unfold"},
    {{rows::product, nullptr, "products", true}, "mm bmm mv dot vdot outer ger inner matmul linalg_matmul"},
    {{rows::linear, nullptr, "products", true}, "linear bilinear"},
    {{rows::added_product, rows::localise_added_product, "products", true}, "addmm. baddbmm. addmv"},
    {{rows::einsum, nullptr, "products", true}, "einsum."},
    {{rows::tensordot, nullptr, "products", true}, "tensordot"},
    {{rows::layer_norm, nullptr, "features", true}, "layer_norm native_layer_norm rms_norm _fused_rms_norm"},
    {{rows::group_norm, rows::localise_group_norm, "features", true}, "group_norm native_group_norm"},
    {{rows::batch_norm, nullptr, "features", true}, "batch_norm instance_norm"},
    {{rows::convolution, rows::localise_convolution, "features", true},
     "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d"},
    {{rows::embedding, rows::localise_embedding, "places", true}, "embedding"},
    {{rows::one_hot, rows::localise_one_hot, "places"}, "one_hot"},
    {{rows::gather, rows::localise_gather, "places"}, "gather take_along_dim"},
    {{rows::index_select, rows::localise_index_select, "places"}, "index_select"},
    {{rows::index, rows::localise_index, "places"}, "index.Tensor"},
    {{rows::index_write, rows::localise_index_write, "places"}, "index_add index_copy index_fill"},
    {{rows::scatter, rows::localise_scatter, "places"}, "scatter scatter_add scatter_reduce"},
    {{rows::triangle, rows::localise_triangle, "positions"}, "tril triu"},
    {{rows::attention, rows::localise_attention, "positions", true}, "scaled_dot_product_attention"},
};

/// By name, or by name and overload: "max", "max.dim", "view.".
const std::map<std::string, const OperatorRow*, std::less<>>& rows_by_name() {
  static const std::map<std::string, const OperatorRow*, std::less<>> rows = [] {
    std::map<std::string, const OperatorRow*, std::less<>> made;
    for (const RowOfNames& row : kTable) {
      std::istringstream names(row.names);
      for (std::string name; names >> name;) made[name] = &row.operators;
    }
    return made;
  }();
  return rows;
}

/// Tensors in, tensors out, none given to be written as `out=`, dims by number.
bool can_have_row(const c10::FunctionSchema& schema) {
  const auto is_tensors = [](const c10::TypePtr& type) {
    return type->isSubtypeOf(*c10::TensorType::get()) || type->isSubtypeOf(*c10::ListType::ofTensors());
  };
  const auto takes = [&](const c10::Argument& argument) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    return is_tensors(argument.type()) || (optional && is_tensors(optional->getElementType()));
  };
  return std::ranges::any_of(schema.arguments(), takes) &&
         std::ranges::none_of(schema.arguments(), [](const c10::Argument& one) { return one.is_out(); }) &&
         !schema.returns().empty() &&
         std::ranges::all_of(schema.returns(), [&](const c10::Argument& one) { return is_tensors(one.type()); }) &&
         schema.overload_name().find("name") == std::string::npos &&
         schema.overload_name().find("Dimname") == std::string::npos;
}

}  // namespace

const OperatorRow* row_of(const c10::OperatorHandle& op) {
  static constexpr OperatorRow kPointwise{rows::each, nullptr, "each"};
  const c10::FunctionSchema& schema = op.schema();
  std::string_view name = schema.name();
  if (!name.starts_with("aten::") || !can_have_row(schema)) return nullptr;
  name.remove_prefix(6);
  const auto& rows = rows_by_name();
  const std::string overload = "." + schema.overload_name();
  const auto find_named = [&](const std::string& base) -> const OperatorRow* {
    if (const auto found = rows.find(base + overload); found != rows.end()) return found->second;
    const auto found = rows.find(base);
    return found == rows.end() ? nullptr : found->second;
  };
  if (const OperatorRow* const found = find_named(std::string(name))) return found;
  if (name.ends_with('_') && !name.ends_with("__"))
    if (const OperatorRow* const found = find_named(std::string(name.substr(0, name.size() - 1)))) return found;
  return op.hasTag(at::Tag::pointwise) && !name.ends_with("_backward") ? &kPointwise : nullptr;
}

std::vector<std::string_view> names_with_rows() {
  std::vector<std::string_view> names;
  for (const auto& [name, row] : rows_by_name()) names.push_back(name);
  return names;
}

}  // namespace trireme
