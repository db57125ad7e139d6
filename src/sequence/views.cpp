// Views, copies and parts of sharded tensors.
#include <ATen/ops/ones.h>

#include <algorithm>

#include "sequence/token_pass.h"
#include "trireme/base/error.h"

namespace trireme::sequence {
namespace {

bool shares_storage(const at::Tensor& a, const at::Tensor& b) {
  return a.has_storage() && b.has_storage() && a.storage().unsafeGetStorageImpl() == b.storage().unsafeGetStorageImpl();
}

/// Operators whose arguments are sizes, which a program computes from the lengths that it sees.
bool takes_sizes(const std::string& name) {
  for (const char* one : {"view", "view_as", "reshape", "reshape_as", "_unsafe_view", "_reshape_alias", "unflatten",
                          "expand", "expand_as", "broadcast_to"})
    if (name == std::string("aten::") + one) return true;
  return false;
}

bool expands(const std::string& name) {
  return name == "aten::expand" || name == "aten::expand_as" || name == "aten::broadcast_to";
}

/// The tokens' dim in a contiguous tensor of the same elements in the same order.
std::optional<TokenDim> dim_in_copy(const at::Tensor& copy, const Found& argument) {
  int64_t stride = argument.sharding.inner;
  for (int64_t dim = argument.sharding.dim() + 1; dim < argument.tensor.dim(); ++dim)
    stride *= argument.tensor.size(dim);
  const int64_t tokens =
      argument.tensor.size(argument.sharding.dim()) / (argument.sharding.outer * argument.sharding.inner);
  return token_dim_of(copy, stride, tokens);
}

}  // namespace

/// The whole that a view of `argument` is a part of. Undefined: not to be had.
at::Tensor TokenPass::whole_view(const OperatorCall& call, const Found& argument, const at::Tensor& local) const {
  const std::string& name = call.op.schema().name();
  const at::Tensor& whole = argument.sharding.whole;
  if (!takes_sizes(name)) {
    std::vector<c10::IValue> arguments = call.arguments().vec();
    arguments[0] = whole;
    return run_on(call, std::move(arguments))[0].toTensor();
  }
  std::vector<int64_t> sizes = local.sizes().vec();
  const int64_t added = local.dim() - argument.tensor.dim();
  for (const int64_t dim : argument.sharding.dims) {
    if (expands(name)) {
      sizes[static_cast<size_t>(dim + added)] = whole.size(dim);
      continue;
    }
    const auto token =
        shares_storage(local, argument.tensor)
            ? token_dim_of(local, argument.tensor.stride(dim) * argument.sharding.inner,
                           argument.tensor.size(dim) / (argument.sharding.outer * argument.sharding.inner))
            : dim_in_copy(local, argument);
    if (!token) return {};
    sizes[static_cast<size_t>(token->dim)] = token->outer * token->inner * argument.sharding.split->total();
  }
  return expands(name) ? whole.expand(sizes) : whole.reshape(sizes);
}

void TokenPass::run_view(OperatorCall& call, Next next, const FoundArguments& found) {
  if (found[0].index != 0 || !found[0].sharding.is_sharded()) {  // of another tensor's sizes
    const std::string& name = call.op.schema().name();
    if (name == "aten::view_as" || name == "aten::reshape_as") refuse(call, found.back(), "takes the sizes");
    return next(call);
  }
  const Found one = found[0];
  if (call.op.schema().name() == "aten::squeeze" && call.traits.arguments == 1 && one.sharding.has_tokens() &&
      one.tensor.size(one.sharding.dim()) == 1) {
    // A rank that has one token keeps the dim of tokens, as others do.
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < one.tensor.dim(); ++dim)
      if (one.tensor.size(dim) == 1 && !contains(one.sharding.dims, dim)) dims.push_back(dim);
    return give(call, {next.run(call, [&] { return one.tensor.squeeze(dims); })});
  }
  const bool has_whole = is_whole(call, {one}) && one.sharding.whole.defined();
  const std::vector<c10::IValue> given = has_whole ? call.arguments().vec() : std::vector<c10::IValue>();
  if (expands(call.op.schema().name()) && call.arguments()[1].isIntList()) {
    const std::vector<int64_t> sizes = call.arguments()[1].toIntVector();
    const auto added = static_cast<int64_t>(sizes.size()) - one.tensor.dim();
    for (const int64_t dim : one.sharding.dims)
      if (const int64_t asked = added < 0 ? -1 : sizes[static_cast<size_t>(dim + added)];
          asked != -1 && asked != one.tensor.size(dim))
        refuse(call, one, str("asks for ", asked, " tokens"),
               "sizes are this rank's; take them from a tensor that went through cut()");
  }
  if (one.sharding.dims.size() > 1 && writes_first(call)) refuse(call, one, "changes the sizes in place");
  if (has_whole) {
    next(call);
    const at::Tensor local = call.results()[0].toTensor();
    if (writes_first(call)) return;  // by strides
    torch::jit::Stack asked(given.begin(), given.end());
    OperatorCall again{call.op, call.keys, call.traits, asked};
    const at::Tensor whole = whole_view(again, one, local);
    if (whole.defined()) {
      Sharding sharding{.split = one.sharding.split, .whole = whole};
      bool is_known = true;
      for (const int64_t dim : one.sharding.dims) {
        const at::Tensor& base = one.sharding.whole;
        const int64_t tokens = one.sharding.split->total();
        std::optional<TokenDim> token;
        if (shares_storage(whole, base)) {
          token = token_dim_of(whole, base.stride(dim) * one.sharding.inner, tokens);
        } else {
          Found as_whole = one;
          as_whole.tensor = base;
          as_whole.sharding.dims = {dim};
          token = dim_in_copy(whole, as_whole);
        }
        is_known = is_known && token.has_value();
        if (!token) break;
        sharding.dims.push_back(token->dim);
        sharding.outer = token->outer;
        sharding.inner = token->inner;
      }
      if (is_known) return table_.add(local, sharding);
    }
    if (one.sharding.dims.size() > 1) refuse(call, one, "merges dims");
    if (!shares_storage(local, one.tensor)) {
      if (const auto token = dim_in_copy(local, one)) {
        Sharding sharding{
            .split = one.sharding.split, .dims = {token->dim}, .outer = token->outer, .inner = token->inner};
        return table_.add(local, sharding);
      }
      table_.add(local, {.kind = Sharding::Kind::kMerged, .split = one.sharding.split});
    }
    return;
  }
  if (one.sharding.dims.size() > 1) refuse(call, one, "needs the whole");
  next(call);
  for_each_tensor(call.results(), [&](const at::Tensor& result) {
    if (shares_storage(result, one.tensor) || table_.find(result)) return;
    if (!one.sharding.has_tokens()) return table_.add(result, one.sharding);
    if (result.sizes() == one.tensor.sizes()) return add(result, one, one.sharding.dim());
    Sharding sharding{.kind = one.sharding.kind, .split = one.sharding.split};
    if (const auto token = dim_in_copy(result, one)) {
      sharding.dims = {token->dim};
      sharding.outer = token->outer;
      sharding.inner = token->inner;
    } else {
      sharding.kind = Sharding::Kind::kMerged;
    }
    table_.add(result, sharding);
  });
}

/// to(), contiguous(), clone(): the same sizes.
void TokenPass::run_copy(OperatorCall& call, Next next, const FoundArguments& found) {
  if (found[0].index != 0) return next(call);
  const Found one = found[0];
  const bool has_whole = one.sharding.whole.defined() && is_whole(call, {one});
  std::vector<c10::IValue> arguments = call.arguments().vec();
  next(call);
  const at::Tensor local = call.results()[0].toTensor();
  if (shares_storage(local, one.tensor)) return;
  if (!one.sharding.has_tokens() || !has_whole) {
    Sharding sharding = one.sharding;
    sharding.whole.reset();
    return table_.add(local, sharding);
  }
  Sharding sharding = one.sharding;
  arguments[0] = one.sharding.whole;
  sharding.whole = run_on(call, std::move(arguments))[0].toTensor();
  table_.add(local, sharding);
}

void TokenPass::run_repeat(OperatorCall& call, Next next, const FoundArguments& found) {
  const Found one = found[0];
  const auto place_in = [&](const at::Tensor& result, int64_t dim) { return dim + result.dim() - one.tensor.dim(); };
  if (is_whole(call, found)) {
    const at::Tensor whole = run_on(call, whole_arguments(call, found))[0].toTensor();
    c10::SmallVector<int64_t, 2> dims;
    for (const int64_t dim : one.sharding.dims)
      if (const int64_t at = place_in(whole, dim); at >= 0 && whole.size(at) == one.sharding.whole.size(dim))
        dims.push_back(at);
    if (dims.size() != one.sharding.dims.size()) dims.clear();
    return give(call, {part(whole, one.sharding, dims)});
  }
  if (!one.sharding.has_tokens()) refuse(call, one, "needs the tokens", "keep tokens in a dim of their own");
  const int64_t size = one.tensor.size(one.sharding.dim());
  next(call);
  add_results(call, one, [&](const at::Tensor& result) {
    const int64_t at = place_in(result, one.sharding.dim());
    if (at < 0 || result.size(at) != size) refuse(call, one, "repeats tokens");
    return at;
  });
}

/// slice(), select(), split() and their kin.
void TokenPass::run_part(OperatorCall& call, Next next, const FoundArguments& found) {
  const Found one = found[0];
  if (one.sharding.kind == Sharding::Kind::kMerged) return next(call);  // looked at where it is needed
  if (found.size() > 1) refuse(call, one, "takes a part by a sharded number");
  const std::vector<int64_t> named = named_dims(call, one.tensor.dim());
  const std::string& name = call.op.schema().name();
  const int64_t along = named.empty() ? 0 : named[0];
  if (contains(one.sharding.dims, along)) {
    if (name == "aten::slice") return run_slice(call, next, one, along);
    if (name == "aten::select") return run_select(call, next, one);
    refuse(call, one, "takes parts along the tokens", "cut() gives each rank its tokens already");
  }
  const bool has_whole = one.sharding.whole.defined() && is_whole(call, found);
  if (!has_whole && one.sharding.dims.size() > 1) refuse(call, one, "needs the whole");
  std::vector<c10::IValue> arguments = call.arguments().vec();
  next(call);
  if (!has_whole) {
    for_each_tensor(call.results(),
                    [&](const at::Tensor& result) {  // unsafe_split() and empty parts have storages of their own
                      if (!table_.find(result)) add(result, one, one.sharding.dim());
                    });
    return;
  }
  arguments[0] = one.sharding.whole;
  const std::vector<c10::IValue> wholes = run_on(call, std::move(arguments));
  std::vector<at::Tensor> list;
  for_each_tensor(wholes, [&](const at::Tensor& whole) { list.push_back(whole); });
  size_t i = 0;
  const bool drops = name == "aten::select" || name == "aten::unbind";
  for_each_tensor(call.results(), [&](const at::Tensor& local) {
    Sharding sharding = one.sharding;
    sharding.whole = list.at(i++);
    for (int64_t& dim : sharding.dims) dim -= drops && along < dim;
    table_.add(local, sharding);
  });
}

/// Of the tokens: all of them, all but the last one, or, of a tensor that is known whole, from the second one on. Other
/// numbers may come from the length that the program has seen, or from the whole one: nobody can tell.
void TokenPass::run_slice(OperatorCall& call, Next next, const Found& one, int64_t dim) {
  const auto arguments = call.arguments();
  const int64_t length = one.tensor.size(dim);
  const int64_t begin = arguments[2].isInt() ? arguments[2].toInt() : 0;
  const int64_t end = arguments[3].isInt() ? arguments[3].toInt() : length;
  const int64_t step = arguments[4].isInt() ? arguments[4].toInt() : 1;
  const bool is_open = end == length || end >= std::max(one.sharding.split->total(), int64_t{1} << 40);
  const bool is_plain = one.sharding.outer * one.sharding.inner == 1 && one.sharding.kind == Sharding::Kind::kTokens;
  if (begin == 0 && is_open && step == 1) return next(call);
  const char* const fix =
      "slices of tokens are [:], [:-1] and, of integers, [1:]; take others from the batch before cut()";
  if (!is_plain || step != 1) refuse(call, one, "takes a part of the tokens", fix);
  if (is_whole(call, {one}) && one.sharding.whole.defined()) {
    const bool is_edge = (begin == 1 && is_open) || (begin == 0 && end == -1) ||
                         (begin == 0 && end == 1 && length > 2) || (begin == -1 && is_open);
    if (!is_edge) refuse(call, one, str("takes [", begin, ":", end, "]"), fix);
    std::vector<c10::IValue> asked = arguments.vec();
    asked[0] = one.sharding.whole;
    if (is_open) asked[3] = c10::IValue();
    const at::Tensor whole = run_on(call, std::move(asked))[0].toTensor();
    if (one.sharding.dims.size() > 1) refuse(call, one, str("takes [", begin, ":", end, "]"), fix);
    const bool is_one = whole.size(dim) == 1;
    return give(call, {part(whole, one.sharding,
                            is_one ? c10::ArrayRef<int64_t>() : c10::ArrayRef<int64_t>(one.sharding.dims))});
  }
  if (begin != 0 || end != -1)
    refuse(call, one, str("takes [", begin, ":", is_open ? "" : std::to_string(end), "]"), fix);
  const std::shared_ptr<const TokenSplit> split = one.sharding.split;
  if (split->lengths.back() < 3)
    refuse(call, one, "leaves the last rank fewer than two tokens", "use longer sequences or fewer ranks");
  if (!split->is_last()) return give(call, {at::Tensor(one.tensor)});
  Found like = one;
  like.sharding.split = std::make_shared<TokenSplit>(split->with_total(split->total() - 1));
  next(call);
  add(call.results()[0].toTensor(), like, dim);
}

/// One token: the first, or the last one of the whole sequence.
void TokenPass::run_select(OperatorCall& call, Next next, const Found& one) {
  const int64_t index = call.arguments()[2].toInt(), dim = one.sharding.dim();
  const bool is_plain = one.sharding.outer * one.sharding.inner == 1 && one.sharding.dims.size() == 1 &&
                        one.sharding.kind == Sharding::Kind::kTokens;
  if (!is_plain || (index != 0 && index != -1))
    refuse(call, one, str("takes token ", index),
           "tokens 0 and -1 can be taken; take another one by an index tensor that is computed from whole tensors");
  if (is_whole(call, {one}) && one.sharding.whole.defined()) {
    std::vector<c10::IValue> arguments = call.arguments().vec();
    arguments[0] = one.sharding.whole;
    return give(call,
                {part(run_on(call, std::move(arguments))[0].toTensor(), one.sharding, {})});  // a view of the whole
  }
  const TokenSplit& split = *one.sharding.split;
  const bool is_here = index == 0 ? split.is_first() : split.is_last();
  const at::Tensor result = next.run(call, [&] {
    const at::Tensor token = one.tensor.select(dim, index);
    return total_sum(is_here ? token
                             : token.masked_fill(at::ones({}, at::TensorOptions(token.device()).dtype(at::kBool)), 0));
  });
  table_.add(result, {.kind = Sharding::Kind::kTotal, .split = one.sharding.split, .is_copy = true});
  give(call, {result});
}

}  // namespace trireme::sequence
