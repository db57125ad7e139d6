#include "trireme/operators/rules.h"

#include <algorithm>
#include <array>
#include <sstream>
#include <string>
#include <string_view>

#include "trireme/operators/row.h"

namespace trireme {
namespace {

struct RuleOfNames {
  OperatorRule rule;
  const char* operators;  ///< names without "aten::", or overloads
};

constexpr RuleOfNames kRows[] = {
    {{OperatorRole::kNone},
     "requires_grad_ retain_grad retains_grad is_leaf output_nr _version is_floating_point is_complex is_signed "
     "is_conj is_neg is_inference is_pinned is_set_to result_type can_cast promote_types size stride "
     "sym_size sym_stride sym_numel sym_storage_offset sym_is_contiguous record_stream set_data is_distributed "
     "_has_compatible_shallow_copy_type _is_zerotensor _debug_has_internal_overlap _assert_tensor_metadata"},
    {{OperatorRole::kEach}, "max.other min.other"},
    {{OperatorRole::kFind}, "isin bucketize searchsorted"},
    {{OperatorRole::kCopy},
     "clone contiguous to _to_copy type_as _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int "
     "_cast_Long "
     "_cast_Short _autocast_to_full_precision _autocast_to_reduced_precision pin_memory resolve_conj resolve_neg"},
    {{OperatorRole::kView},
     "view view_as reshape reshape_as _unsafe_view _reshape_alias flatten ravel unflatten expand expand_as "
     "broadcast_to permute transpose "
     "t numpy_T mT mH adjoint matrix_H swapaxes swapdims movedim moveaxis squeeze unsqueeze detach alias lift_fresh "
     "atleast_1d atleast_2d atleast_3d squeeze_ unsqueeze_ transpose_ t_ swapaxes_ swapdims_ detach_ view_as_real "
     "view_as_complex conj _conj _neg_view"},
    {{OperatorRole::kRepeat}, "repeat tile repeat_interleave.self_int"},
    {{OperatorRole::kPart},
     "slice narrow select split split_with_sizes chunk unbind tensor_split unsafe_chunk unsafe_split "
     "unsafe_split_with_sizes"},
    {{OperatorRole::kReduction, /*sums=*/true}, "sum mean any all _is_all_true _is_any_true"},
    {{OperatorRole::kReduction},
     "amax amin max max.dim min min.dim argmax argmin aminmax logsumexp prod norm linalg_vector_norm var std var_mean "
     "std_mean "
     "nansum nanmean median median.dim nanmedian mode mode.dim count_nonzero count_nonzero.dim_IntList kthvalue "
     "quantile nanquantile"},
    {{OperatorRole::kScan},
     "softmax log_softmax _softmax _log_softmax _safe_softmax cumsum cumsum_ cumprod cumprod_ cummax cummin "
     "logcumsumexp sort argsort "
     "msort topk flip fliplr flipud roll diff rot90 glu unfold"},
    {{OperatorRole::kSet},
     "vander linalg_vander _shape_as_tensor diagflat fill_diagonal_ histogramdd "
     "unique_dim unique_consecutive _unique _unique2 bincount histc masked_scatter"},
    {{OperatorRole::kCat}, "cat concat concatenate"},
    {{OperatorRole::kStack}, "stack"},
    {{OperatorRole::kPad}, "pad constant_pad_nd"},
    {{OperatorRole::kProduct}, "linear matmul mm bmm mv addmm baddbmm"},
    {{OperatorRole::kConvolution}, "convolution"},
    {{OperatorRole::kLookup}, "embedding one_hot"},
    {{OperatorRole::kNorm}, "layer_norm native_layer_norm rms_norm _fused_rms_norm"},
    {{OperatorRole::kAttention}, "scaled_dot_product_attention"},
    {{OperatorRole::kClassLoss}, "cross_entropy_loss nll_loss nll_loss_nd nll_loss2d"},
    {{OperatorRole::kEachLoss},
     "mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits "
     "soft_margin_loss poisson_nll_loss"},
    {{OperatorRole::kIndex}, "index _unsafe_index"},
    {{OperatorRole::kSelectIndex}, "index_select"},
    {{OperatorRole::kGather}, "gather take_along_dim"},
    {{OperatorRole::kMaskedSelect}, "masked_select"},
    {{OperatorRole::kNonzero}, "nonzero argwhere"},
    {{OperatorRole::kPut}, "index_put index_put_ _index_put_impl_"},
    {{OperatorRole::kScatter},
     "scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ index_add index_add_ index_copy "
     "index_copy_ index_fill index_fill_"},
    {{OperatorRole::kTriangle}, "tril triu tril_ triu_"},
    {{OperatorRole::kNew}, "new_empty new_zeros new_ones new_full new_empty_strided"},
    {{OperatorRole::kRead}, "item is_same_size _local_scalar_dense is_nonzero equal allclose"},
};

/// Results whose sizes depend on values, beside what libtorch tags and what roles say; "where.": the default overload.
constexpr std::array<std::string_view, 5> kSizedByValues = {
    "aten::nonzero_numpy", "aten::combinations", "aten::ctc_loss", "aten::repeat_interleave", "aten::where."};

/// Without a row: what is not cheap.
constexpr std::array<std::string_view, 18> kCostly = {
    "addbmm", "addmv", "bilinear", "cdist",      "chain_matmul", "dot",      "einsum", "gru",       "inner",
    "kron",   "lstm",  "outer",    "multi_head", "rnn_relu",     "rnn_tanh", "vdot",   "tensordot", "istft"};

/// Without a row, by the beginnings of names: convolutions, attention kernels, decompositions, Fourier transforms,
/// 16-bit and quantized products.
constexpr std::array<std::string_view, 13> kCostlyPrefixes = {"conv",
                                                              "_conv",
                                                              "scaled_dot_product",
                                                              "_scaled_dot_product",
                                                              "_flash",
                                                              "_efficient_attention",
                                                              "linalg_",
                                                              "fft_",
                                                              "_fft",
                                                              "_native_multi_head",
                                                              "_transformer",
                                                              "_scaled_",
                                                              "_sparse"};

using Table = std::unordered_map<std::string, const OperatorRule*>;

const Table& table() {
  static const Table rows = [] {
    Table made;
    for (const RuleOfNames& row : kRows) {
      std::istringstream names(row.operators);
      for (std::string name; names >> name;) made["aten::" + name] = &row.rule;
    }
    return made;
  }();
  return rows;
}

bool writes_out(const c10::FunctionSchema& schema) {
  return std::any_of(schema.arguments().begin(), schema.arguments().end(),
                     [](const c10::Argument& argument) { return argument.is_out(); });
}

}  // namespace

const OperatorRule* rule_of(const c10::OperatorHandle& op) {
  static constexpr OperatorRule kEach{OperatorRole::kEach};
  const c10::FunctionSchema& schema = op.schema();
  if (writes_out(schema)) return nullptr;
  const std::string& name = schema.name();
  const Table& rows = table();
  if (const auto found = rows.find(name + "." + schema.overload_name()); found != rows.end()) return found->second;
  if (const auto found = rows.find(name); found != rows.end()) return found->second;
  const OperatorRow* const row = row_of(op);
  return row != nullptr && row->is_each() ? &kEach : nullptr;
}

ResultSizes result_sizes_of(const c10::OperatorHandle& op) {
  const OperatorRule* const rule = rule_of(op);
  const OperatorRole role = rule != nullptr ? rule->role : OperatorRole::kNone;
  if (role == OperatorRole::kIndex) return ResultSizes::kByMasks;
  const std::string &name = op.schema().name(), overload = name + "." + op.schema().overload_name();
  const bool is_named =
      std::ranges::count(kSizedByValues, name) > 0 || std::ranges::count(kSizedByValues, overload) > 0;
  const bool is_by_values = is_named || op.hasTag(at::Tag::dynamic_output_shape) || role == OperatorRole::kSet ||
                            role == OperatorRole::kNonzero || role == OperatorRole::kMaskedSelect;
  return is_by_values ? ResultSizes::kByValues : ResultSizes::kBySizes;
}

OperatorCost cost_of(const c10::OperatorHandle& op) {
  if (const OperatorRule* const rule = rule_of(op)) switch (rule->role) {
      case OperatorRole::kProduct:  // those with dtypes of their own have no row, and no known multiply-adds
        return row_of(op) != nullptr ? OperatorCost::kProduct : OperatorCost::kCostly;
      case OperatorRole::kConvolution:
      case OperatorRole::kAttention:
      case OperatorRole::kPut:
        return OperatorCost::kCostly;
      case OperatorRole::kLookup:
        return op.schema().name() == "aten::embedding" ? OperatorCost::kCostly : OperatorCost::kCheap;
      default:
        return OperatorCost::kCheap;
    }
  std::string_view name = op.schema().name();
  constexpr std::string_view kNamespace = "aten::";
  if (!name.starts_with(kNamespace)) return OperatorCost::kCostly;
  name.remove_prefix(kNamespace.size());
  if (std::find(kCostly.begin(), kCostly.end(), name) != kCostly.end()) return OperatorCost::kCostly;
  // In training it moves the running statistics, of which its schema says nothing.
  if (name.find("batch_norm") != name.npos) return OperatorCost::kCostly;
  const bool is_costly = std::any_of(kCostlyPrefixes.begin(), kCostlyPrefixes.end(),
                                     [&](std::string_view prefix) { return name.starts_with(prefix); });
  return is_costly ? OperatorCost::kCostly : OperatorCost::kCheap;
}

size_t left_factor_index(const c10::OperatorHandle& op) {
  const std::string& name = op.schema().name();
  return name == "aten::addmm" || name == "aten::baddbmm" ? 1 : 0;
}

}  // namespace trireme
