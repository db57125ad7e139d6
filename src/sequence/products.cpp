// Matrix products, norms, lookups and attention.
#include <algorithm>

#include "sequence/attention.h"
#include "sequence/token_pass.h"
#include "trireme/base/error.h"

namespace trireme::sequence {
namespace {

/// The dim of a product of `left` and `right` that tokens run along, -1 in an argument: not sharded. Nothing where the
/// product sums over tokens or pairs tokens with tokens.
std::optional<int64_t> product_dim(const at::Tensor& left, int64_t left_dim, const at::Tensor& right,
                                   int64_t right_dim) {
  const int64_t left_sum = left.dim() - 1, right_sum = std::max<int64_t>(right.dim() - 2, 0);
  if (left_dim == left_sum || (right_dim >= 0 && right_dim == right_sum)) return {};
  if (left.dim() == 1 || right.dim() == 1) {
    if (left_dim >= 0 && right_dim >= 0) return {};
    if (left_dim >= 0) return left_dim;
    return right_dim - (right_dim == right.dim() - 1);
  }
  const int64_t dims = std::max(left.dim(), right.dim());
  const int64_t left_at = left_dim < 0 ? -1 : left_dim + dims - left.dim();
  const int64_t right_at = right_dim < 0 ? -1 : right_dim + dims - right.dim();
  if (left_at >= 0 && right_at >= 0 && left_at != right_at) return {};
  return std::max(left_at, right_at);
}

}  // namespace

void TokenPass::run_product(OperatorCall& call, Next next, const FoundArguments& found) {
  const std::string& name = call.op.schema().name();
  const size_t left = name == "aten::addmm" || name == "aten::baddbmm" ? 1 : 0;
  const at::Tensor a = call.arguments()[left].toTensor(), b = call.arguments()[left + 1].toTensor();
  const Found* of_left = nullptr;
  const Found* of_right = nullptr;
  for (const Found& one : found) {
    if (!one.sharding.is_sharded()) continue;
    if (!one.sharding.has_tokens() || one.sharding.dims.size() > 1)
      refuse(call, one, "multiplies dims that tokens went into", "keep tokens in a dim of their own");
    if (one.index == left) {
      of_left = &one;
    } else if (one.index == left + 1 && name != "aten::linear") {
      of_right = &one;
    } else {
      refuse(call, one, "takes for a weight or a bias a part");
    }
  }
  const Found& like = of_left != nullptr ? *of_left : *of_right;
  if (of_left != nullptr && of_right != nullptr) {
    const Sharding &one = of_left->sharding, &other = of_right->sharding;
    if (one.kind != other.kind || one.outer != other.outer || one.inner != other.inner ||
        !one.split->matches(*other.split))
      refuse(call, *of_right, "joins other tokens with a part");
  }
  const auto dim =
      name == "aten::linear"
          ? (of_left->sharding.dim() == a.dim() - 1 ? std::nullopt : std::optional(of_left->sharding.dim()))
          : product_dim(a, of_left != nullptr ? of_left->sharding.dim() : -1, b,
                        of_right != nullptr ? of_right->sharding.dim() : -1);
  if (!dim) refuse(call, like, "sums over tokens, or pairs tokens with tokens,");
  // Batches of the other factor may be by token, too: then they must be the same ones.
  const at::Tensor& other = of_left != nullptr ? b : a;
  if (name != "aten::linear" && (of_left == nullptr || of_right == nullptr) && other.dim() > 2) {
    const int64_t dims = std::max(a.dim(), b.dim()), at = *dim - (dims - other.dim());
    if (at >= 0 && at < other.dim() - 2 && !is_alike(other, at))
      refuse(call, like, str("joins ", other.sizes(), ", which is not sharded, with a part"),
             "pass the tensor through cut()");
  }
  const Found reference = like;
  next(call);
  add_results(call, reference, [&](const at::Tensor&) { return *dim; });
}

/// A convolution of width 1 takes each token by itself.
void TokenPass::run_convolution(OperatorCall& call, Next next, const FoundArguments& found) {
  const Found one = found[0];
  const bool is_input = one.index == 0 && found.size() == 1 && one.sharding.has_tokens();
  const int64_t dim = one.sharding.dim();
  if (!is_input || dim == 1) refuse(call, one, "mixes tokens");
  if (dim >= 2) {
    const auto arguments = call.arguments();
    const auto at = static_cast<size_t>(dim - 2);
    const auto of_dim = [&](size_t index) {
      const std::vector<int64_t> values = arguments[index].toIntVector();
      return values.size() == 1 ? values[0] : values.at(at);
    };
    if (arguments[1].toTensor().size(dim) != 1 || of_dim(3) != 1 || of_dim(4) != 0 ||
        one.sharding.outer * one.sharding.inner != 1)
      refuse(call, one, "mixes neighbouring tokens");
  }
  next(call);
  add_results(call, one, [&](const at::Tensor&) { return dim; });
}

void TokenPass::run_lookup(OperatorCall& call, Next next, const FoundArguments& found) {
  const bool is_one_hot = call.op.schema().name() == "aten::one_hot";
  const Found one = found[0];
  if (found.size() > 1 || one.index != (is_one_hot ? 0 : 1)) refuse(call, one, "takes for a table a part");
  if (!one.sharding.has_tokens() || one.sharding.dims.size() > 1)
    refuse(call, one, "looks up by dims that tokens went into");
  if (const c10::IValue counts = value_of(call, "scale_grad_by_freq"); counts.isBool() && counts.toBool())
    refuse(call, one, "scales gradients by how often (scale_grad_by_freq) an index is in a part",
           "leave scale_grad_by_freq out");
  if (is_one_hot && one.sharding.whole.defined())
    return give(call,
                {part(run_on(call, whole_arguments(call, found))[0].toTensor(), one.sharding, one.sharding.dims)});
  if (is_one_hot && call.arguments()[1].toInt() < 0) refuse(call, one, "counts the classes", "name num_classes");
  next(call);
  add_results(call, one, [&](const at::Tensor&) { return one.sharding.dim(); });
}

void TokenPass::run_norm(OperatorCall& call, Next next, const FoundArguments& found) {
  const Found one = found[0];
  const auto normalized = static_cast<int64_t>(call.arguments()[1].toIntVector().size());
  if (found.size() > 1 || one.index != 0 || !one.sharding.has_tokens() || one.sharding.dims.size() > 1 ||
      one.sharding.dim() >= one.tensor.dim() - normalized)
    refuse(call, one, "normalizes over tokens");
  next(call);
  add_results(call, one, [&](const at::Tensor&) { return one.sharding.dim(); });
}

// --- attention ---

/// Attention of tensors of this rank's length that are not known as sharded: they were, until something outside of
/// libtorch's operators copied them.
void TokenPass::check_lost(const OperatorCall& call) {
  if (!table_.has_sharded()) return;  // between batches: text that is generated, another model's samples
  for (size_t index = 0; index < 3; ++index) {
    const at::Tensor& tensor = call.arguments()[index].toTensor();
    if (tensor.dim() < 2 || !lengths_.contains(tensor.size(-2))) continue;
    throw StateError(str(
        call.op.schema().name(), ": argument ", index, " ", tensor.sizes(),
        " is as long as this rank's part of a sequence, and not known as a part: numpy(), DLPack, deepcopy or the like "
        "has copied it. Copy by clone(), or cut() the batch after the copy"));
  }
}

/// The mask of all tokens; undefined where there is none. `keys` is null where keys are not sharded.
at::Tensor TokenPass::whole_mask(const OperatorCall& call, const TokenSplit& queries, const TokenSplit* keys) {
  const c10::IValue given = call.arguments()[3];
  if (!given.isTensor() || !given.toTensor().defined()) return {};
  at::Tensor mask = given.toTensor();
  const auto sharding = table_.find(mask);
  const bool has_tokens = sharding && sharding->is_sharded();
  if (has_tokens) {
    if (!sharding->whole.defined())
      refuse(call, {3, mask, *sharding}, "has a mask that is computed from activations: a part",
             "compute it from whole tensors, without gradients");
    mask = sharding->whole;
  }
  const auto check = [&](int64_t dim, const TokenSplit& split, const char* of) {
    if (mask.dim() < -dim) return;
    const int64_t size = mask.size(dim);
    if (size == 1 || size == split.total()) return;
    if (size == split.local() && is_alike(mask, mask.dim() + dim)) {
      mask = mask.narrow(dim, 0, 1);
      return;
    }
    throw StateError(str(name_of(call), ": its mask ", given.toTensor().sizes(), " has ", size, " ", of,
                         " where there are ", split.total(), ", of which this rank has ", split.local(),
                         "; a mask is of all tokens, or computed from tensors that went through cut()"));
  };
  check(-2, queries, "queries");
  if (keys != nullptr) check(-1, *keys, "keys");
  return mask;
}

/// Queries that every rank has, of keys that are sharded: from here on each rank has its tokens of them.
Sharding TokenPass::cut_queries(OperatorCall& call, Next next) {
  const at::Tensor whole = call.arguments()[0].toTensor();
  const int64_t dim = whole.dim() - 2;
  auto split = std::make_shared<TokenSplit>();
  split->rank = group_.rank();
  for (int rank = 0; dim >= 0 && rank < group_.size(); ++rank)
    split->lengths.push_back(sequence_range(whole.size(dim), group_.size(), rank).numel());
  if (dim < 0 || *std::min_element(split->lengths.begin(), split->lengths.end()) < 2)
    throw StateError(str(name_of(call), ": queries ", whole.sizes(),
                         " of keys that are sharded along the sequence are too ", "few for ", group_.size(),
                         " ranks, two for each; use fewer ranks"));
  const Sharding sharding{.split = split, .dims = {dim}};
  const at::Tensor own = own_tokens(call, next, whole, dim, sharding);
  argument(call, 0) = own;
  return *table_.find(own);
}

void TokenPass::run_attention(OperatorCall& call, Next next) {
  const auto find = [&](size_t index) {
    auto sharding = table_.find(call.arguments()[index].toTensor());
    if (sharding && !sharding->is_sharded()) sharding.reset();
    return sharding;
  };
  auto query = find(0);
  const auto key = find(1), value = find(2);
  if (!query && key && value && takes_wholes()) query = cut_queries(call, next);
  const auto is_lost = [&](size_t index) {
    const at::Tensor& tensor = call.arguments()[index].toTensor();
    return tensor.dim() < 2 || lengths_.contains(tensor.size(-2));
  };
  const auto check = [&](size_t index, const std::optional<Sharding>& sharding) {
    const at::Tensor& tensor = call.arguments()[index].toTensor();
    if (sharding && sharding->kind == Sharding::Kind::kTokens && sharding->dim() == tensor.dim() - 2 &&
        (tensor.dim() == 3 || tensor.dim() == 4) && sharding->outer * sharding->inner == 1 &&
        sharding->dims.size() == 1)
      return;
    throw StateError(
        str(name_of(call),
            ": query, key and value must be [batch, heads, tokens, size] and sharded along their tokens; argument ",
            index, " is ", tensor.sizes(),
            sharding ? str(" and sharded along dim ", sharding->dim()) : std::string(" and not sharded")));
  };
  if (query && !key && !value && !is_lost(1) && !is_lost(2)) {  // each query attends to all keys
    check(0, query);
    if (call.arguments()[5].toBool())
      refuse(call, {0, call.arguments()[0].toTensor(), *query}, "is causal, with keys that are not sharded,");
    const at::Tensor mask = whole_mask(call, *query->split, nullptr);
    if (mask.defined() && mask.dim() >= 2 && mask.size(-2) > 1)
      argument(call, 3) = mask.narrow(-2, query->split->begin(), query->split->local());
    const Found like{0, call.arguments()[0].toTensor(), *query};
    next(call);
    return add_results(call, like, [](const at::Tensor& result) { return result.dim() - 2; });
  }
  check(0, query);
  check(1, key);
  check(2, value);
  const Found like{0, call.arguments()[0].toTensor(), *query};
  const at::Tensor &q = call.arguments()[0].toTensor(), &k = call.arguments()[1].toTensor(),
                   &v = call.arguments()[2].toTensor();
  const int64_t heads_at = q.dim() - 3;
  const bool has_batch = q.dim() == 4;
  if (k.dim() != q.dim() || v.dim() != q.dim() || k.size(heads_at) != v.size(heads_at) || k.size(-1) != q.size(-1) ||
      (has_batch && (k.size(0) != q.size(0) || v.size(0) != q.size(0))) ||
      (k.size(heads_at) != q.size(heads_at) && k.size(heads_at) != 1 &&
       (!call.arguments()[7].toBool() || q.size(heads_at) % k.size(heads_at) != 0)))
    refuse(call, like, str("broadcasts keys ", k.sizes(), " and values ", v.sizes(), " over queries"),
           "expand() them to one batch and as many heads; enable_gqa=True repeats heads of keys");
  const auto queries = query->split, keys = key->split;
  if (!keys->matches(*value->split) || keys->lengths != value->split->lengths)
    refuse(call, like, "joins keys and values of other tokens with a part");
  const at::Tensor mask = whole_mask(call, *queries, keys.get());
  if (attention_ == SequenceAttention::kRing)
    run_in_ring(call, next, *queries, *keys, mask, group_);
  else
    run_by_heads(call, next, *queries, *keys, mask, group_);
  add_results(call, like, [](const at::Tensor& result) { return result.dim() - 2; });
}

}  // namespace trireme::sequence
