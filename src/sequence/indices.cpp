// Operators that take or write elements by indices.
#include <ATen/ops/ones.h>

#include <algorithm>

#include "sequence/token_pass.h"
#include "trireme/base/error.h"

namespace trireme::sequence {
namespace {

constexpr const char* kFix =
    "index tokens by a mask, or by numbers that are computed from whole tensors (lengths from an attention_mask that "
    "went through cut())";

bool is_plain(const Sharding& sharding) { return sharding.outer * sharding.inner == 1 && sharding.dims.size() == 1; }

/// The indices of index() and index_put_().
struct Indices {
  explicit Indices(const c10::IValue& list) {
    for (const std::optional<at::Tensor>& tensor : list.toOptionalTensorList()) {
      const at::Tensor index = tensor.value_or(at::Tensor());
      tensors.push_back(index);
      const bool is_mask = index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
      const int64_t covered = is_mask ? index.dim() : 1;
      if (index.defined()) {
        if (first < 0) first = dims;
        is_adjacent = is_adjacent && (last < 0 || last == dims);
        last = dims + covered;
        has_mask = has_mask || is_mask;
        ++count;
        result_dims = std::max(result_dims, is_mask ? int64_t{1} : index.dim());
      }
      dims += covered;
    }
  }
  std::vector<at::Tensor> tensors;
  int64_t first = -1, last = -1;  ///< the dims that are indexed: [first, last)
  int64_t dims = 0, result_dims = 0;
  int count = 0;
  bool is_adjacent = true, has_mask = false;
};

}  // namespace

/// The tokens at `places`, numbers of all tokens: each from the rank that has it. `pick` takes them from this rank's,
/// and has the dims of `places` from dim `at` on.
at::Tensor TokenPass::picked(const Found& argument, const at::Tensor& places, int64_t at,
                             const std::function<at::Tensor(const at::Tensor&)>& pick) {
  const TokenSplit& split = *argument.sharding.split;
  const at::Tensor counted = at::where(places.lt(0), places + split.total(), places) - split.begin();
  const at::Tensor is_here = counted.ge(0).logical_and(counted.lt(split.local()));
  at::Tensor taken = pick(counted.clamp(0, split.local() - 1));
  at::Tensor missing = is_here.logical_not();
  while (missing.dim() < taken.dim() - at) missing = missing.unsqueeze(-1);
  return total_sum(taken.masked_fill(missing, 0));
}

/// Numbers of tokens are those of the whole sequence where they were computed from wholes, or are single ones.
void TokenPass::check_places(const OperatorCall& call, const Found& own, const at::Tensor& places) {
  if (!places.defined() || places.numel() <= 1) return;
  const auto sharding = table_.find(places);
  if (!is_of_all(sharding) && !(sharding && sharding->whole.defined()))
    refuse(call, own, "takes tokens by numbers", kFix);
}

void TokenPass::run_index(OperatorCall& call, Next next, const FoundArguments& found) {
  const Indices indices(call.arguments()[1]);
  const auto self = table_.find(call.arguments()[0].toTensor());
  const bool has_self = self && self->is_sharded();
  const Found like = found[0];
  if (is_whole(call, found)) {
    if (has_self && !indices.has_mask)
      for (const int64_t dim : self->dims)
        if (dim < static_cast<int64_t>(indices.tensors.size()))
          check_places(call, {0, call.arguments()[0].toTensor(), *self}, indices.tensors[static_cast<size_t>(dim)]);
    const at::Tensor whole = run_on(call, whole_arguments(call, found))[0].toTensor();
    c10::SmallVector<int64_t, 2> dims;
    const Sharding* shape = &like.sharding;
    if (!indices.has_mask && indices.is_adjacent) {
      if (has_self && self->dims.size() == 1 && (self->dim() < indices.first || self->dim() >= indices.last)) {
        dims.push_back(self->dim() < indices.first
                           ? self->dim()
                           : self->dim() - (indices.last - indices.first) + indices.result_dims);
        shape = &*self;
      }
      for (const Found& one : found)
        if (one.index == 1 && one.sharding.has_tokens() && one.sharding.dims.size() == 1) {
          if (!dims.empty()) {  // in two ways: everybody has all of it
            dims.clear();
            break;
          }
          dims.push_back(indices.first + one.sharding.dim() + indices.result_dims - one.tensor.dim());
          shape = &one.sharding;
          break;
        }
    }
    if (has_self && indices.has_mask && indices.count == 1 && self->kind == Sharding::Kind::kTokens &&
        self->dims.size() == 1 && self->dim() >= indices.first && self->dim() < indices.last)
      return give_selected(call, whole, indices.first, found);
    return give(call, {part(whole, *shape, dims)});
  }
  for (const Found& one : found)
    if (one.sharding.kind == Sharding::Kind::kMerged || one.sharding.dims.size() > 1)
      refuse(call, one, "indexes dims that tokens went into", kFix);
  if (!indices.is_adjacent) refuse(call, like, "indexes several dims apart", kFix);
  if (!has_self) {  // rows of a table
    for (const Found& one : found)
      if (one.index == 1 && one.sharding.has_tokens()) {
        if (indices.has_mask)
          refuse(call, one, "takes elements of a tensor that is not sharded by a mask, a part", kFix);
        const Found& lead = check_aligned(call, found);
        const int64_t from_right = lead.tensor.dim() - lead.sharding.dim();
        for (const at::Tensor& index : indices.tensors)
          if (index.defined() && !table_.find(index) && index.dim() >= from_right &&
              !is_alike(index, index.dim() - from_right))
            refuse(call, lead, str("joins ", index.sizes(), ", which is not sharded, with a part"), kFix);
        const Found reference = lead;
        const int64_t dim = indices.first + indices.result_dims - from_right;
        next(call);
        return add_results(call, reference, [&](const at::Tensor&) { return dim; });
      }
    return next(call);
  }
  const Found own{0, call.arguments()[0].toTensor(), *self};
  const int64_t dim = self->dim();
  std::vector<const Found*> sharded;
  for (const Found& one : found)
    if (one.index == 1 && one.sharding.has_tokens()) sharded.push_back(&one);
  if (dim < indices.first || dim >= indices.last) {
    if (!sharded.empty()) refuse(call, own, "indexes by a part", kFix);
    const int64_t at = dim < indices.first ? dim : dim - (indices.last - indices.first) + indices.result_dims;
    next(call);
    return add_results(call, own, [&](const at::Tensor&) { return at; });
  }
  // A mask of the tokens: this rank's own.
  if (indices.has_mask) {
    const bool fits = indices.count == 1 && sharded.size() == 1 && indices.first + sharded[0]->sharding.dim() == dim &&
                      sharded[0]->sharding.kind == self->kind && sharded[0]->sharding.outer == self->outer &&
                      sharded[0]->sharding.inner == self->inner && sharded[0]->sharding.split->matches(*self->split);
    if (!fits) refuse(call, own, "takes by a mask of other tokens a part", kFix);
  } else {
    const bool by_selection =
        !sharded.empty() &&
        std::all_of(sharded.begin(), sharded.end(),
                    [](const Found* one) {
                      return one->sharding.kind == Sharding::Kind::kSelected && one->tensor.dim() == 1;
                    }) &&
        indices.result_dims == 1 && static_cast<int>(sharded.size()) == indices.count;
    if (!by_selection) {
      // Numbers of all tokens, the same on every rank.
      const at::Tensor places = indices.tensors[static_cast<size_t>(dim)];
      const auto of_places = table_.find(places);
      if (!sharded.empty() || !is_of_all(of_places) || !is_plain(*self) || self->kind != Sharding::Kind::kTokens ||
          (indices.first != 0 && indices.count > 1))
        refuse(call, own, "takes tokens by numbers", kFix);
      const at::Tensor result = next.run(call, [&] {
        const auto shaped = [&](const at::Tensor& local) {
          c10::List<std::optional<at::Tensor>> list;
          for (size_t i = 0; i < indices.tensors.size(); ++i)
            list.push_back(static_cast<int64_t>(i) == dim ? std::optional(local)
                           : indices.tensors[i].defined() ? std::optional(indices.tensors[i])
                                                          : std::nullopt);
          return at::index(own.tensor, list);
        };
        return picked(own, places, indices.first, shaped);
      });
      return give_total(call, result, own);
    }
  }
  const at::Tensor selector = sharded[0]->sharding.kind == Sharding::Kind::kSelected && !indices.has_mask
                                  ? sharded[0]->sharding.selector
                                  : selector_of(*sharded[0]);
  if (indices.has_mask && !is_same_selection(sharded[0]->sharding, *self))
    refuse(call, own, "takes by a mask of other tokens a part", kFix);
  const Found selecting = *sharded[0];
  next(call);
  const at::Tensor result = call.results()[0].toTensor();
  const std::shared_ptr<const TokenSplit> split =
      indices.has_mask ? selected_split(selecting, result.size(indices.first)) : selecting.sharding.split;
  table_.add(result,
             {.kind = Sharding::Kind::kSelected, .split = split, .dims = {indices.first}, .selector = selector});
}

/// The result of a mask: selected of all tokens, and beside it of this rank's.
void TokenPass::give_selected(OperatorCall& call, const at::Tensor& whole, int64_t dim, const FoundArguments& found) {
  const auto mask = std::find_if(found.begin(), found.end(), [](const Found& one) { return one.index == 1; });
  const at::Tensor own = run_on(call, call.arguments().vec())[0].toTensor();
  Sharding total{.kind = Sharding::Kind::kTotal, .split = found[0].sharding.split};
  if (mask != found.end() && mask->sharding.has_tokens() && dim == 0) {
    table_.add(own, {.kind = Sharding::Kind::kSelected,
                     .split = selected_split(*mask, own.size(0)),
                     .dims = {dim},
                     .selector = selector_of(*mask)});
    total.selected = own;
  }
  table_.add(whole, total);
  give(call, {whole});
}

TokenPass::ByPlaces TokenPass::by_places(const OperatorCall& call) {
  const bool broadcasts = call.op.schema().name() == "aten::take_along_dim";
  ByPlaces by{.tensor = call.arguments()[0].toTensor(), .places = call.arguments()[broadcasts ? 1 : 2].toTensor()};
  by.self = table_.find(by.tensor);
  by.of_places = table_.find(by.places);
  by.has_self = by.self && by.self->is_sharded();
  by.has_places = by.of_places && by.of_places->is_sharded();
  const std::vector<int64_t> named = named_dims(call, by.tensor.dim());
  by.along = named.empty() ? -1 : named[0];
  return by;
}

void TokenPass::run_select_index(OperatorCall& call, Next next, const FoundArguments& found) {
  const auto [tensor, places, self, of_places, has_self, has_places, along] = by_places(call);
  if (is_whole(call, found)) {
    if (has_self && contains(self->dims, along)) check_places(call, {0, tensor, *self}, places);
    const at::Tensor whole = run_on(call, whole_arguments(call, found))[0].toTensor();
    c10::SmallVector<int64_t, 2> dims;
    if (has_self && !has_places && self->dims.size() == 1 && self->dim() != along) dims.push_back(self->dim());
    if (has_places && !has_self) dims.push_back(along);
    return give(call, {part(whole, has_self ? *self : *of_places, dims)});
  }
  for (const Found& one : found)
    if (one.sharding.kind == Sharding::Kind::kMerged || one.sharding.dims.size() > 1)
      refuse(call, one, "indexes dims that tokens went into", kFix);
  if (!has_self) {
    const Found like{2, places, *of_places};
    next(call);
    return add_results(call, like, [&](const at::Tensor&) { return along; });
  }
  const Found own{0, tensor, *self};
  if (self->dim() != along) {
    if (has_places) refuse(call, own, "indexes by a part", kFix);
    next(call);
    return add_results(call, own, [&](const at::Tensor&) { return self->dim(); });
  }
  if (has_places && of_places->kind == Sharding::Kind::kSelected) {
    next(call);
    return table_.add(call.results()[0].toTensor(), {.kind = Sharding::Kind::kSelected,
                                                     .split = of_places->split,
                                                     .dims = {along},
                                                     .selector = of_places->selector});
  }
  if (has_places || !is_of_all(of_places) || !is_plain(*self)) refuse(call, own, "takes tokens by numbers", kFix);
  const at::Tensor result = next.run(call, [&] {
    return picked(own, places, along, [&](const at::Tensor& local) { return tensor.index_select(along, local); });
  });
  give_total(call, result, own);
}

void TokenPass::run_gather(OperatorCall& call, Next next, const FoundArguments& found) {
  const auto [tensor, places, self, of_places, has_self, has_places, along] = by_places(call);
  const bool broadcasts = call.op.schema().name() == "aten::take_along_dim";
  if (along < 0 && !is_whole(call, found)) refuse(call, found[0], "takes elements out of all of them, a part");
  if (is_whole(call, found)) {
    if (has_self && contains(self->dims, along)) check_places(call, {0, tensor, *self}, places);
    const at::Tensor whole = run_on(call, whole_arguments(call, found))[0].toTensor();
    c10::SmallVector<int64_t, 2> dims;
    const Sharding& like = has_places ? *of_places : *self;
    if (has_places) dims.assign(of_places->dims.begin(), of_places->dims.end());
    if (!has_places && self->dims.size() == 1 && self->dim() != along &&
        whole.size(self->dim()) == self->whole.size(self->dim()))
      dims.push_back(self->dim());
    return give(call, {part(whole, like, dims)});
  }
  if (!has_self) {  // rows of a table
    const Found like{2, places, *of_places};
    if (!like.sharding.has_tokens() || like.sharding.dims.size() > 1)
      refuse(call, like, "indexes dims that tokens went into", kFix);
    if (like.sharding.dim() != along && !is_alike(tensor, like.sharding.dim()))
      refuse(call, like, str("joins ", tensor.sizes(), ", which is not sharded, with a part"),
             "pass the tensor through cut()");
    next(call);
    return add_results(call, like, [&](const at::Tensor&) { return like.sharding.dim(); });
  }
  const Found own{0, tensor, *self};
  if (!self->has_tokens() || self->dims.size() > 1) refuse(call, own, "indexes dims that tokens went into", kFix);
  if (self->dim() != along) {
    if (has_places) {
      check_aligned(call, found);
    } else if ((places.size(self->dim()) != tensor.size(self->dim()) && !broadcasts) ||
               !is_alike(places, self->dim())) {
      refuse(call, own, str("indexes by ", places.sizes(), ", which is not sharded, a part"), kFix);
    }
    next(call);
    return add_results(call, own, [&](const at::Tensor&) { return self->dim(); });
  }
  if (has_places || !is_of_all(of_places) || !is_plain(*self) || self->kind != Sharding::Kind::kTokens)
    refuse(call, own, "takes tokens by numbers", kFix);
  const at::Tensor result = next.run(call, [&] {
    return picked(own, places, 0, [&](const at::Tensor& local) {
      return broadcasts ? tensor.take_along_dim(local, along) : tensor.gather(along, local);
    });
  });
  give_total(call, result, own);
}

void TokenPass::run_masked_select(OperatorCall& call, Next next, const FoundArguments& found) {
  if (is_whole(call, found))
    return give(call, {part(run_on(call, whole_arguments(call, found))[0].toTensor(), found[0].sharding, {})});
  const Found like = check_aligned(call, found);
  check_unsharded(call, like);
  const auto mask = std::find_if(found.begin(), found.end(), [](const Found& one) { return one.index == 1; });
  Found selecting = mask == found.end() ? like : *mask;
  if (mask == found.end() || mask->tensor.sizes() != call.arguments()[0].toTensor().sizes())
    selecting.sharding.whole.reset();
  const at::Tensor selector = mask == found.end() ? at::Tensor() : selector_of(*mask);
  next(call);
  const at::Tensor result = call.results()[0].toTensor();
  table_.add(result, {.kind = Sharding::Kind::kSelected,
                      .split = selected_split(selecting, result.size(0)),
                      .dims = {0},
                      .selector = selector});
}

void TokenPass::run_nonzero(OperatorCall& call, Next next, const FoundArguments& found) {
  if (is_whole(call, found))
    return give(call, {part(run_on(call, whole_arguments(call, found))[0].toTensor(), found[0].sharding, {})});
  const Found like = found[0];
  if (!like.sharding.has_tokens() || like.sharding.dims.size() > 1)
    refuse(call, like, "counts in dims that tokens went into", kFix);
  const at::Tensor selector = selector_of(like);
  next(call);
  const at::Tensor result = call.results()[0].toTensor();
  table_.add(result, {.kind = Sharding::Kind::kSelected,
                      .split = selected_split(like, result.size(0)),
                      .dims = {0},
                      .selector = selector});
}

/// Into a tensor that is as whole as what is written.
void TokenPass::run_written(OperatorCall& call, const FoundArguments& found) {
  const at::Tensor self = call.arguments()[0].toTensor();
  std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
  if (!writes_first(call)) return give(call, {part(results[0].toTensor(), found[0].sharding, {})});
  table_.refresh(self);
  give(call, {self});
}

/// x[mask] = value, x[tokens] = values of the same tokens.
void TokenPass::run_put(OperatorCall& call, Next next, const FoundArguments& found) {
  const at::Tensor self_tensor = call.arguments()[0].toTensor(), values = call.arguments()[2].toTensor();
  const auto self = table_.find(self_tensor);
  const Found like = found[0];
  if ((!self || !self->is_sharded()) && takes_wholes() && is_whole(call, found)) return run_written(call, found);
  if (!self || !self->is_sharded()) refuse(call, like, "writes into a tensor that is not sharded by a part", kFix);
  const Found own{0, self_tensor, *self};
  if (is_whole(call, found)) {
    std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
    if (!writes_first(call)) return give(call, {part(results[0].toTensor(), *self, self->dims)});
    table_.refresh(self->whole);
    return give(call, {self_tensor});
  }
  const Indices indices(call.arguments()[1]);
  if (!self->has_tokens() || self->dims.size() > 1 || !indices.is_adjacent)
    refuse(call, own, "writes by indices into a part", kFix);
  const int64_t dim = self->dim();
  auto of_values = table_.find(values);
  const bool has_values = of_values && of_values->is_sharded();
  const bool is_indexed = dim >= indices.first && dim < indices.last;
  bool fits = is_indexed;
  Sharding taken{.kind = Sharding::Kind::kSelected, .split = self->split};  // where the values are from
  if (indices.has_mask) {
    const auto mask = table_.find(indices.tensors.back());
    if (mask) taken.selector = selector_of({1, indices.tensors.back(), *mask});
    fits = fits && indices.count == 1 && mask && mask->has_tokens() && mask->dims.size() == 1 &&
           indices.first + mask->dim() == dim && mask->kind == self->kind && mask->outer == self->outer &&
           mask->inner == self->inner && mask->split->matches(*self->split);
  } else {
    for (const at::Tensor& index : indices.tensors) {
      if (!index.defined()) continue;
      const auto sharding = table_.find(index);
      fits = fits && sharding && sharding->kind == Sharding::Kind::kSelected && index.dim() == 1;
      if (sharding && !taken.selector.defined()) taken.selector = sharding->selector;
    }
  }
  if (!fits) refuse(call, own, "writes by numbers into a part", kFix);
  const bool is_one_value = values.dim() == 0 || (values.dim() == 1 && values.numel() == 1);
  // Python leaves out dims of size 1 before a write: that of a single token, too.
  const bool is_single = has_values && of_values->kind == Sharding::Kind::kMerged && of_values->selector.defined() &&
                         values.dim() == own.tensor.dim() - (indices.last - indices.first);
  if (is_single) of_values->kind = Sharding::Kind::kSelected;
  if (has_values ? (!is_single && of_values->dim() != indices.first) || !is_same_selection(taken, *of_values)
                 : !is_one_value && values.dim() > own.tensor.dim() - (indices.last - indices.first))
    refuse(call, own, str("writes ", values.sizes(), " of other tokens into a part"), kFix);
  next(call);
  add_results(call, own, [&](const at::Tensor&) { return dim; });
}

/// Along a dim: of wholes any, else one that tokens do not run along, or tokens that were selected from the same ones.
void TokenPass::run_scatter(OperatorCall& call, Next next, const FoundArguments& found) {
  const at::Tensor tensor = call.arguments()[0].toTensor();
  const auto self = table_.find(tensor);
  const Found like = found[0];
  if ((!self || !self->is_sharded()) && takes_wholes() && is_whole(call, found)) return run_written(call, found);
  if (!self || !self->is_sharded()) {
    // Into a tensor of this rank's length that is the same for all tokens, such as zeros: sharded from now on.
    const Found& lead = check_aligned(call, found);
    const int64_t dim = lead.sharding.dim();
    if (tensor.dim() != lead.tensor.dim() || dim == named_dims(call, tensor.dim()).at(0) ||
        tensor.size(dim) != lead.tensor.size(dim) || !is_alike(tensor, dim))
      refuse(call, like, "writes into a tensor that is not sharded by a part", kFix);
    const Found reference = lead;
    next(call);
    return add_results(call, reference, [&](const at::Tensor&) { return dim; });
  }
  const Found own{0, tensor, *self};
  const int64_t along = named_dims(call, tensor.dim()).at(0);
  if (is_whole(call, found)) {
    std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
    if (!writes_first(call)) return give(call, {part(results[0].toTensor(), *self, self->dims)});
    table_.refresh(self->whole);
    return give(call, {tensor});
  }
  if (!self->has_tokens() || self->dims.size() > 1)
    refuse(call, own, "writes by indices into dims that tokens went into", kFix);
  const bool is_by_dim = call.op.schema().name().starts_with("aten::index_");
  if (self->dim() != along) {
    if (is_by_dim) {  // the index is for all tokens
      for (const Found& one : found)
        if (one.index == 2 && one.sharding.is_sharded())
          refuse(call, own, "writes by sharded numbers into a part", kFix);
    }
    check_aligned(call, found);
    for (size_t i = 2; i < call.traits.arguments; ++i) {
      if (!call.arguments()[i].isTensor() || (is_by_dim && i == 2)) continue;
      const at::Tensor other = call.arguments()[i].toTensor();
      if (other.defined() && !table_.find(other) && other.dim() == tensor.dim() && !is_alike(other, self->dim()))
        refuse(call, own, str("joins ", other.sizes(), ", which is not sharded, with a part"), kFix);
    }
  } else {
    for (size_t i = 2; i < call.traits.arguments; ++i) {
      if (!call.arguments()[i].isTensor()) continue;
      const at::Tensor other = call.arguments()[i].toTensor();
      const auto sharding = table_.find(other);
      if (other.dim() > 0 && (!is_by_dim || !sharding || sharding->kind != Sharding::Kind::kSelected))
        refuse(call, own, "writes by numbers into a part", kFix);
    }
  }
  next(call);
  add_results(call, own, [&](const at::Tensor&) { return self->dim(); });
}

void TokenPass::run_set(OperatorCall& call, const FoundArguments& found) {
  if (!is_whole(call, found)) refuse(call, found[0], "looks at all elements");
  if (writes_first(call)) refuse(call, found[0], "writes in an order of its own into a part");
  std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
  for (c10::IValue& result : results)
    if (result.isTensor() && result.toTensor().defined()) result = part(result.toTensor(), found[0].sharding, {});
  give(call, std::move(results));
}

void TokenPass::run_read(OperatorCall& call, const FoundArguments& found) {
  if (!is_whole(call, found)) refuse(call, found[0], "reads a number", "read it from a total, such as sum() or mean()");
  give(call, run_on(call, whole_arguments(call, found)));
}

}  // namespace trireme::sequence
