// Operators on elements, and along dims that tokens do not run along.
#include <ATen/ops/arange.h>

#include <algorithm>
#include <set>

#include "sequence/token_pass.h"
#include "trireme/base/error.h"
#include "trireme/base/pattern.h"

namespace trireme::sequence {
namespace {

constexpr const char* kMadeByLength =
    "{} joins {}, sharded along the sequence in dim {}, with {}, which is not: the model made it by the length that it "
    "has seen, so it is that of the first tokens on every rank. Pass it through cut(), or give the model position_ids "
    "that are";

at::Tensor counting(int64_t tokens, const at::Tensor& like, int64_t dim) {
  std::vector<int64_t> sizes(static_cast<size_t>(like.dim()), 1);
  sizes[static_cast<size_t>(dim)] = tokens;
  return at::arange(tokens, like.options()).view(sizes);
}

}  // namespace

/// Whether it does not matter which row along `dim` a token gets. Values do not tell: a window is full as long as the
/// part is short.
bool TokenPass::is_alike(const at::Tensor& other, int64_t dim) {
  if (other.size(dim) == 1) return true;
  if (takes_wholes()) return false;  // what a program makes by a length is as long as the whole
  if (other.stride(dim) == 0) return true;
  const auto sharding = table_.find(other);
  return sharding && sharding->kind == Sharding::Kind::kConstant;
}

/// Whether the program has made `other` as 0, 1, 2, … along `dim`.
bool TokenPass::counts(const at::Tensor& other, int64_t dim) {
  const auto sharding = table_.find(other);
  return sharding && sharding->kind == Sharding::Kind::kCounting && sharding->dim() == dim &&
         sharding->outer * sharding->inner == 1;
}

/// Every sharded argument has the same tokens at the same place; returns one that says where.
const Found& TokenPass::check_aligned(const OperatorCall& call, const FoundArguments& found) const {
  const Found* lead = nullptr;
  for (const Found& one : found)
    if (one.sharding.has_tokens() && one.sharding.dims.size() == 1 &&
        (lead == nullptr || !one.sharding.whole.defined()))
      lead = &one;
  for (const Found& one : found) {
    if (!one.sharding.is_sharded()) continue;
    if (one.sharding.kind == Sharding::Kind::kMerged)
      refuse(call, one, "needs the tokens", "keep tokens in a dim of their own");
    if (lead == nullptr || one.sharding.dims.size() > 1)
      refuse(call, one, "joins activations with a mask of this rank's queries by its keys, a part");
    const Sharding &a = one.sharding, &b = lead->sharding;
    if (a.kind != b.kind || from_right(one) != from_right(*lead) || a.outer != b.outer || a.inner != b.inner)
      refuse(call, one, str("pairs tokens with tokens: it joins ", lead->tensor.sizes(), " with a part"));
    if (!is_same_selection(a, b))
      refuse(call, one, str("joins ", lead->tensor.sizes(), ", tokens that another mask selected, with those"),
             "select both by one mask");
    if (!a.split->matches(*b.split) || a.split->total() != b.split->total())
      refuse(call, one, str("joins ", lead->tensor.sizes(), ", ", b.split->total(), " tokens, with a part"),
             "shift labels, not activations: tokens of both must be the same ones");
  }
  return *lead;
}

/// A tensor of this rank's length that is not sharded was made by the model itself, of lengths that it has seen.
void TokenPass::check_unsharded(OperatorCall& call, const Found& lead) {
  const int64_t place = from_right(lead), size = lead.tensor.size(lead.sharding.dim());
  const bool overwrites =
      call.op.schema().name() == "aten::copy_" || call.traits.overwrites || (takes_wholes() && writes_first(call));
  for (size_t i = overwrites ? 1 : 0; i < call.traits.arguments; ++i) {
    if (!argument(call, i).isTensor() || !argument(call, i).toTensor().defined()) continue;
    const at::Tensor other = argument(call, i).toTensor();
    const auto sharding = table_.find(other);
    if (other.dim() < place || (sharding && sharding->is_sharded())) continue;
    const int64_t dim = other.dim() - place;
    if (other.size(dim) != size && other.size(dim) != 1)
      refuse(call, lead, str("joins ", other.sizes(), ", which is not sharded, with a part"),
             "pass the tensor through cut()");
    if (is_alike(other, dim)) continue;
    if (takes_wholes())
      refuse(call, lead, str("joins ", other.sizes(), ", which is not sharded and no longer, with a part"),
             "pass the tensor through cut(), or make it as long as the whole");
    if (lead.sharding.kind == Sharding::Kind::kTokens && lead.sharding.outer * lead.sharding.inner == 1 &&
        counts(other, dim)) {
      argument(call, i) = other + lead.sharding.split->begin();
      continue;
    }
    throw StateError(
        filled(kMadeByLength, {name_of(call), str(lead.tensor.sizes()), str(lead.sharding.dim()), str(other.sizes())}));
  }
}

void TokenPass::run_each(OperatorCall& call, Next next, const FoundArguments& found) {
  check_number(call, found);
  if (is_whole(call, found)) return run_each_whole(call, found);
  const Found& lead = check_aligned(call, found);
  check_unsharded(call, lead);
  const int64_t place = from_right(lead), size = lead.tensor.size(lead.sharding.dim());
  if (takes_wholes() && writes_first(call) && found[0].index != 0 && lead.sharding.kind == Sharding::Kind::kTokens) {
    const at::Tensor written = call.arguments()[0].toTensor();
    const bool is_whole_size = written.dim() >= place && lead.sharding.outer * lead.sharding.inner == 1 &&
                               written.size(written.dim() - place) == lead.sharding.split->total();
    if (is_whole_size) return run_written_within(call, next, lead, written);
    refuse(call, lead, str("writes into ", written.sizes(), ", which is not sharded, a part"));
  }
  next(call);
  add_results(call, lead, [&](const at::Tensor& result) -> int64_t {
    const int64_t dim = result.dim() - place;
    if (dim < 0 || result.size(dim) != size) refuse(call, lead, "mixes tokens");
    return dim;
  });
}

void TokenPass::run_each_whole(OperatorCall& call, const FoundArguments& found) {
  const Found* lead = nullptr;
  std::set<int64_t> places;
  for (const Found& one : found) {
    if (!one.sharding.whole.defined()) continue;
    if (lead != nullptr && (one.sharding.outer != lead->sharding.outer || one.sharding.inner != lead->sharding.inner))
      refuse(call, one, str("joins ", lead->tensor.sizes(), " with a part"));
    if (lead == nullptr) lead = &one;
    for (const int64_t dim : one.sharding.dims) places.insert(one.tensor.dim() - dim);
  }
  const Sharding& like = lead->sharding;
  const int64_t local = lead->tensor.size(like.dim()), all = like.whole.size(like.dim());
  std::vector<c10::IValue> arguments = whole_arguments(call, found);
  bool is_new = false;  // a tensor that is written becomes sharded
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (!arguments[i].isTensor() || !arguments[i].toTensor().defined()) continue;
    if (std::any_of(found.begin(), found.end(),
                    [&](const Found& one) { return one.index == i && one.sharding.whole.defined(); }))
      continue;
    at::Tensor other = arguments[i].toTensor();
    const bool is_written = i == 0 && writes_first(call);
    for (const int64_t place : places) {
      const int64_t dim = other.dim() - place;
      if (dim < 0 || other.size(dim) == 1 || other.size(dim) == all) continue;
      if (other.size(dim) == local && is_alike(other, dim)) {
        other = other.narrow(dim, 0, 1);
        if (is_written) {
          std::vector<int64_t> sizes = other.sizes().vec();
          sizes[static_cast<size_t>(dim)] = all;
          other = other.expand(sizes);
        }
      } else if (other.size(dim) == local && like.outer * like.inner == 1 && !is_written && counts(other, dim)) {
        other = counting(all, other, dim);
      } else {
        refuse(call, *lead, str("joins ", other.sizes(), ", which is not sharded, with a part"),
               "pass the tensor through cut(): the model made it by the length that it has seen");
      }
    }
    if (is_written && !takes_wholes()) other = other.clone(at::MemoryFormat::Contiguous), is_new = true;
    arguments[i] = other;
  }
  const at::Tensor written = writes_first(call) ? call.arguments()[0].toTensor() : at::Tensor();
  std::vector<c10::IValue> results = run_on(call, arguments);
  const auto dims_of = [&](const at::Tensor& whole) {
    c10::SmallVector<int64_t, 2> dims;
    for (auto place = places.rbegin(); place != places.rend(); ++place)
      if (const int64_t dim = whole.dim() - *place; dim >= 0 && whole.size(dim) == all) dims.push_back(dim);
    return dims;
  };
  if (written.defined()) {
    const at::Tensor whole = arguments[0].toTensor();
    Sharding sharding{
        .split = like.split, .dims = dims_of(whole), .outer = like.outer, .inner = like.inner, .whole = whole};
    if (is_new) {
      written.copy_(sharding.dims.empty() ? whole : part_of(whole, sharding));
      if (!sharding.dims.empty()) table_.add(written, sharding);
    }
    table_.refresh(whole);
    return give(call, {written});
  }
  for (c10::IValue& result : results) {
    if (!result.isTensor() || !result.toTensor().defined()) continue;
    const at::Tensor whole = result.toTensor();
    result = part(whole, like, dims_of(whole));
  }
  give(call, std::move(results));
}

/// Elements that are looked for in another tensor: tokens may run along the former, and not along the latter.
void TokenPass::run_find(OperatorCall& call, Next next, const FoundArguments& found) {
  const auto is_query = [&](const Found& one) {
    const std::string& name = call.op.schema().arguments()[one.index].name();
    return name == "self" || name == "elements";
  };
  const auto query = std::find_if(found.begin(), found.end(), is_query);
  if (is_whole(call, found)) {
    const at::Tensor whole = run_on(call, whole_arguments(call, found))[0].toTensor();
    const bool is_part = query != found.end() && query->sharding.whole.defined();
    return give(call, {part(whole, is_part ? query->sharding : found[0].sharding,
                            is_part ? c10::ArrayRef<int64_t>(query->sharding.dims) : c10::ArrayRef<int64_t>())});
  }
  for (const Found& one : found)
    if (!is_query(one)) refuse(call, one, "looks for elements in all tokens", "look in a tensor that is not sharded");
  const Found one = *query;
  if (!one.sharding.has_tokens()) refuse(call, one, "needs the tokens", "keep tokens in a dim of their own");
  const c10::IValue sorted = value_of(call, "sorted_sequence");
  if (sorted.isTensor() && sorted.toTensor().dim() > 1 && one.sharding.dim() != one.tensor.dim() - 1)
    refuse(call, one, "looks for each token's elements in elements of its own", "give it one sorted sequence for all");
  next(call);
  add_results(call, one, [&](const at::Tensor&) { return one.sharding.dim(); });
}

void TokenPass::run_triangle(OperatorCall& call, Next next, const FoundArguments& found) {
  const Found& one = found[0];
  if (is_whole(call, found)) {
    const bool is_in_place = writes_first(call);
    std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
    if (!is_in_place) return give(call, {part(results[0].toTensor(), one.sharding, one.sharding.dims)});
    table_.refresh(one.sharding.whole);
    return give(call, {one.tensor});
  }
  if (!one.sharding.has_tokens() || one.sharding.dim() >= one.tensor.dim() - 2)
    refuse(call, one, "goes by the places of tokens");
  run_each(call, next, found);
}

/// cat() and stack() along a dim that tokens do not run along; of wholes, along any.
void TokenPass::run_cat(OperatorCall& call, Next next, const FoundArguments& found, bool is_stack) {
  const Found* lead = &found[0];
  for (const Found& one : found)
    if (one.sharding.has_tokens() && (!lead->sharding.has_tokens() || !one.sharding.whole.defined())) lead = &one;
  if (!lead->sharding.has_tokens()) refuse(call, *lead, "needs the tokens", "keep tokens in a dim of their own");
  const std::vector<at::Tensor> tensors = call.arguments()[0].toTensorVector();
  const int64_t along = named_dims(call, lead->tensor.dim() + is_stack).at(0);
  const auto is_empty = [](const at::Tensor& tensor) { return tensor.dim() == 1 && tensor.numel() == 0; };
  const bool along_tokens = !is_stack && contains(lead->sharding.dims, along);
  const auto shifted = [&](int64_t dim) { return dim + (is_stack && along <= dim); };
  if (is_whole(call, found)) {
    const Sharding& like = lead->sharding;
    c10::List<at::Tensor> wholes;
    for (const at::Tensor& tensor : tensors) {
      const auto sharding = table_.find(tensor);
      if (sharding && sharding->whole.defined()) {
        wholes.push_back(sharding->whole);
        continue;
      }
      at::Tensor other = tensor;
      for (const int64_t dim : like.dims) {
        if (is_empty(other)) continue;
        const int64_t size = other.size(dim), local = lead->tensor.size(dim), all = like.whole.size(dim);
        if (size != local) continue;
        if (dim == along && !is_stack)
          refuse(call, *lead, str("joins ", other.sizes(), ", which is not sharded, with a part"));
        if (!is_alike(other, dim))
          refuse(call, *lead, str("joins ", other.sizes(), ", which is not sharded, with a part"),
                 "pass the tensor through cut()");
        std::vector<int64_t> sizes = other.sizes().vec();
        sizes[static_cast<size_t>(dim)] = all;
        other = other.narrow(dim, 0, 1).expand(sizes);
      }
      wholes.push_back(other);
    }
    std::vector<c10::IValue> arguments = call.arguments().vec();
    arguments[0] = std::move(wholes);
    const at::Tensor whole = run_on(call, std::move(arguments))[0].toTensor();
    c10::SmallVector<int64_t, 2> dims;
    for (const int64_t dim : like.dims) dims.push_back(shifted(dim));
    // Along tokens the parts have the places of the whole result, of which one more or less is the last rank's.
    if (along_tokens &&
        (like.outer * like.inner != 1 || like.dims.size() > 1 || std::abs(whole.size(along) - like.split->total()) > 1))
      dims.clear();
    return give(call, {part(whole, like, dims)});
  }
  const Found reference = *lead;
  for (const at::Tensor& tensor : tensors) {
    if (is_empty(tensor) && !is_stack) continue;
    const auto sharding = table_.find(tensor);
    if (sharding && sharding->is_sharded()) {
      const Sharding &a = *sharding, &b = reference.sharding;
      if (!is_same_selection(a, b) || a.dims != b.dims || a.outer != b.outer || a.inner != b.inner ||
          !a.split->matches(*b.split))
        refuse(call, reference, "joins other tokens with a part");
      if (along_tokens && !tensor.is_same(reference.tensor))
        refuse(call, reference, "joins tokens behind one another, a part");
    } else if (along_tokens || !is_alike(tensor, reference.sharding.dim())) {
      refuse(call, reference, str("joins ", tensor.sizes(), ", which is not sharded, with a part"));
    }
  }
  next(call);
  add_results(call, reference, [&](const at::Tensor&) { return shifted(reference.sharding.dim()); });
}

void TokenPass::run_pad(OperatorCall& call, Next next, const FoundArguments& found) {
  const Found& one = found[0];
  if (is_whole(call, found))
    return give(call,
                {part(run_on(call, whole_arguments(call, found))[0].toTensor(), one.sharding, one.sharding.dims)});
  if (!one.sharding.has_tokens()) refuse(call, one, "needs the tokens", "keep tokens in a dim of their own");
  const std::vector<int64_t> pad = call.arguments()[1].toIntVector();
  const auto at = static_cast<size_t>(2 * (one.tensor.dim() - 1 - one.sharding.dim()));
  if (at < pad.size() && (pad[at] != 0 || pad[at + 1] != 0))
    refuse(call, one, "adds tokens at the ends of a part", "pad the batch before cut()");
  run_each(call, next, found);
}

/// Along a dim: of wholes any, else one that tokens do not run along.
void TokenPass::run_scan(OperatorCall& call, Next next, const FoundArguments& found) {
  const Found& one = found[0];
  std::vector<int64_t> named = named_dims(call, one.tensor.dim());
  if (is_whole(call, found)) {
    const bool is_in_place = writes_first(call);
    std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
    if (is_in_place) {
      table_.refresh(one.sharding.whole);
      return give(call, {one.tensor});
    }
    for (c10::IValue& result : results) {
      const at::Tensor whole = result.toTensor();
      const bool keeps = whole.dim() == one.tensor.dim() &&
                         std::all_of(one.sharding.dims.begin(), one.sharding.dims.end(), [&](int64_t dim) {
                           return whole.size(dim) == one.sharding.whole.size(dim) ||
                                  (one.sharding.outer * one.sharding.inner == 1 && one.sharding.dims.size() == 1 &&
                                   whole.size(dim) + 1 == one.sharding.whole.size(dim));
                         });
      result = part(whole, one.sharding, keeps ? c10::ArrayRef<int64_t>(one.sharding.dims) : c10::ArrayRef<int64_t>());
    }
    return give(call, std::move(results));
  }
  if (found.size() > 1 || !one.sharding.has_tokens() || named.empty() || contains(named, one.sharding.dim()))
    refuse(call, one, "mixes tokens");
  const int64_t dim = one.sharding.dim(), size = one.tensor.size(dim);
  const Found like = one;
  next(call);
  add_results(call, like, [&](const at::Tensor& result) {
    if (result.dim() <= dim || result.size(dim) != size) refuse(call, like, "mixes tokens");
    return dim;
  });
}

}  // namespace trireme::sequence
