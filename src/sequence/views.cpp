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

bool takes_sizes(const std::string& name) {
  for (const char* one : {"view", "view_as", "reshape", "reshape_as", "_unsafe_view", "_reshape_alias", "unflatten",
                          "expand", "expand_as", "broadcast_to"})
    if (name == std::string("aten::") + one) return true;
  return false;
}

bool expands(const std::string& name) {
  return name == "aten::expand" || name == "aten::expand_as" || name == "aten::broadcast_to";
}

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
  const std::string& name = call.op.schema().name();
  if (found[0].index != 0 || !found[0].sharding.is_sharded()) {  // of another tensor's sizes
    if (takes_wholes()) {
      const at::Tensor tensor = call.arguments()[0].toTensor();
      const std::vector<int64_t> sizes = sizes_of(found.back());
      return give(call, {next.run(call, [&] { return of_sizes(name, tensor, sizes); })});
    }
    if (name == "aten::view_as" || name == "aten::reshape_as") refuse(call, found.back(), "takes the sizes");
    return next(call);
  }
  const Found one = found[0];
  const bool is_dtype = name == "aten::view" && call.arguments()[1].isInt();
  if (takes_wholes() && takes_sizes(name) && !is_dtype) return run_sized_view(call, next, one);
  if (name == "aten::squeeze" && call.traits.arguments == 1 && one.sharding.has_tokens() &&
      one.tensor.size(one.sharding.dim()) == 1) {
    // A rank that has one token keeps the dim of tokens, as others do.
    std::vector<int64_t> dims;
    for (int64_t dim = 0; dim < one.tensor.dim(); ++dim)
      if (one.tensor.size(dim) == 1 && !contains(one.sharding.dims, dim)) dims.push_back(dim);
    return give(call, {next.run(call, [&] { return one.tensor.squeeze(dims); })});
  }
  const bool has_whole = is_whole(call, {one}) && one.sharding.whole.defined();
  const std::vector<c10::IValue> given = has_whole ? call.arguments().vec() : std::vector<c10::IValue>();
  if (expands(name) && call.arguments()[1].isIntList()) {
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
    if (name == "aten::slice" || name == "aten::narrow") return run_slice(call, next, one, along);
    if (name == "aten::select") return run_select(call, next, one);
    if (takes_wholes() && one.sharding.whole.defined() && is_whole(call, found)) {
      std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
      for_each_tensor(results, [&](const at::Tensor& whole) { part(whole, one.sharding, {}); });
      return give(call, std::move(results));
    }
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

/// A slice takes all tokens, or all but the last one; of a tensor that is known whole any. A program that reads a
/// part's sizes gives numbers that may be a part's or the whole's, nobody can tell: of a whole it takes the first or
/// last one, or leaves it out.
void TokenPass::run_slice(OperatorCall& call, Next next, const Found& one, int64_t dim) {
  const auto arguments = call.arguments();
  const TokenSplit& split = *one.sharding.split;
  const bool is_narrow = call.op.schema().name() == "aten::narrow";
  const int64_t length = takes_wholes() ? sizes_of(one)[static_cast<size_t>(dim)] : one.tensor.size(dim);
  const int64_t given_begin = arguments[2].isInt() ? arguments[2].toInt() : 0;
  const int64_t given_end = is_narrow              ? given_begin + arguments[3].toInt()
                            : arguments[3].isInt() ? arguments[3].toInt()
                                                   : length;
  const int64_t step = is_narrow || !arguments[4].isInt() ? 1 : arguments[4].toInt();
  const auto from_front = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + length : at, 0, length); };
  const bool is_open = given_end == length || given_end >= std::max(split.total(), int64_t{1} << 40) ||
                       (takes_wholes() && given_end > length);
  const int64_t begin = from_front(given_begin), end = is_open ? length : from_front(given_end);
  const bool is_plain = one.sharding.outer * one.sharding.inner == 1 && one.sharding.kind == Sharding::Kind::kTokens;
  if (begin == 0 && is_open && step == 1) return give(call, {next.run(call, [&] { return one.tensor.alias(); })});
  const std::string asked = str("takes [", given_begin, ":", is_open ? "" : std::to_string(given_end),
                                step != 1 ? str(":", step) : std::string(), "]");
  const char* const fix =
      "slices of tokens are [:], [:-1] and, of integers, [1:]; take others from the batch before cut()";
  if (is_whole(call, {one}) && one.sharding.whole.defined()) {
    const bool leaves_one =
        (begin == 1 && is_open) || (begin == 0 && (takes_wholes() || given_end == -1) && end == length - 1);
    const bool takes_one = (given_begin == 0 && given_end == 1 && length > 2) || (given_begin == -1 && is_open);
    const bool is_known = is_plain && step == 1 && one.sharding.dims.size() == 1 && (leaves_one || takes_one);
    if (!is_known && !takes_wholes()) refuse(call, one, asked, fix);
    const at::Tensor whole = is_known && is_open ? one.sharding.whole.slice(dim, given_begin)
                                                 : one.sharding.whole.slice(dim, begin, std::max(begin, end), step);
    const bool is_part = is_known && leaves_one;
    return give(call, {part(whole, one.sharding,
                            is_part ? c10::ArrayRef<int64_t>(one.sharding.dims) : c10::ArrayRef<int64_t>())});
  }
  if (takes_wholes() && is_plain && step == 1 && end == begin + 1) {  // the rank that has the token gives it to all
    const at::Tensor result = next.run(call, [&] { return token_at(one, begin).unsqueeze(dim); });
    table_.add(result, {.kind = Sharding::Kind::kTotal, .split = one.sharding.split, .is_copy = true});
    return give(call, {result});
  }
  const bool leaves_last = begin == 0 && end == length - 1 && (takes_wholes() || given_end == -1);
  if (!is_plain || step != 1 || !leaves_last) refuse(call, one, asked, fix);
  if (split.lengths.back() < 3)
    refuse(call, one, "leaves the last rank fewer than two tokens", "use longer sequences or fewer ranks");
  const auto shorter = std::make_shared<TokenSplit>(split.with_total(split.total() - 1));
  const at::Tensor result = next.run(call, [&] {
    return in_own_storage(split.is_last() ? one.tensor.narrow(dim, 0, split.local() - 1) : one.tensor);
  });
  table_.add(result, {.split = shorter, .dims = {dim}, .is_copy = true});
  give(call, {result});
}

/// Token `place` of all, on every rank, without its dim.
at::Tensor TokenPass::token_at(const Found& one, int64_t place) {
  const TokenSplit& split = *one.sharding.split;
  const int64_t local = place - split.begin();
  const bool is_here = local >= 0 && local < split.local();
  const at::Tensor token = one.tensor.select(one.sharding.dim(), is_here ? local : 0);
  const auto a_bool = at::TensorOptions(token.device()).dtype(at::kBool);
  return total_sum(is_here ? token : token.masked_fill(at::ones({}, a_bool), 0));
}

/// One token: the first, or the last one of the whole sequence; where the program speaks of wholes any.
void TokenPass::run_select(OperatorCall& call, Next next, const Found& one) {
  const int64_t index = call.arguments()[2].toInt();
  const TokenSplit& split = *one.sharding.split;
  const bool has_whole = is_whole(call, {one}) && one.sharding.whole.defined();
  const bool is_plain = one.sharding.outer * one.sharding.inner == 1 && one.sharding.dims.size() == 1 &&
                        one.sharding.kind == Sharding::Kind::kTokens;
  if (takes_wholes() ? !is_plain && !has_whole : !is_plain || (index != 0 && index != -1))
    refuse(call, one, str("takes token ", index),
           "tokens 0 and -1 can be taken; take another one by an index tensor that is computed from whole tensors");
  if (has_whole) {
    std::vector<c10::IValue> arguments = call.arguments().vec();
    arguments[0] = one.sharding.whole;
    return give(call,
                {part(run_on(call, std::move(arguments))[0].toTensor(), one.sharding, {})});  // a view of the whole
  }
  const int64_t place = index < 0 ? index + split.total() : index;
  if (place < 0 || place >= split.total())
    throw ShapeError(str(name_of(call), ": there is no token ", index, " among ", split.total()));
  const at::Tensor result = next.run(call, [&] { return token_at(one, place); });
  table_.add(result, {.kind = Sharding::Kind::kTotal, .split = one.sharding.split, .is_copy = true});
  give(call, {result});
}

}  // namespace trireme::sequence
