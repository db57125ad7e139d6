#include "sequence/token_pass.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/tensor.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/intercept/transforms.h"

namespace trireme::sequence {

bool contains(c10::ArrayRef<int64_t> dims, int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

at::Tensor selector_of(const Found& mask) {
  const WithoutInterception guard;
  return (mask.sharding.whole.defined() ? mask.sharding.whole : mask.tensor).detach().clone();
}

bool is_same_selection(const Sharding& one, const Sharding& other) {
  if (one.kind != Sharding::Kind::kSelected || other.kind != Sharding::Kind::kSelected) return one.kind == other.kind;
  const at::Tensor &a = one.selector, &b = other.selector;
  if (a.is_same(b)) return true;
  const WithoutInterception guard;
  return a.defined() && b.defined() && a.numel() == b.numel() && at::equal(a.flatten(), b.flatten());
}

TokenPass::TokenPass(Group& group, SequenceAttention attention)
    : group_(group),
      attention_(attention),
      attention_operator_(c10::Dispatcher::singleton().findSchemaOrThrow("aten::scaled_dot_product_attention", "")),
      scope_(InterceptScope::Watch::kWrites, this) {
  RankContext::of_this_thread().streams().set_slice(static_cast<uint64_t>(group.rank()) + 1);
}

TokenPass::~TokenPass() { RankContext::of_this_thread().streams().set_slice(0); }

at::Tensor TokenPass::cut(const at::Tensor& whole, int64_t dim) {
  const int64_t along = dim < 0 ? dim + whole.dim() : dim;
  if (along < 0 || along >= whole.dim())
    throw ShapeError(str("cut: ", whole.sizes(), " has no dim ", dim, "; name the dim that the tokens run along"));
  if (const auto known = table_.find(whole); known && known->is_sharded())
    throw StateError(str("cut: ", whole.sizes(), " is a part of a sequence already; cut() takes whole tensors"));
  auto split = std::make_shared<TokenSplit>();
  split->rank = group_.rank();
  for (int rank = 0; rank < group_.size(); ++rank)
    split->lengths.push_back(sequence_range(whole.size(along), group_.size(), rank).numel());
  if (*std::min_element(split->lengths.begin(), split->lengths.end()) < 2)
    throw ShapeError(str("cut: ", whole.sizes(), " has ", whole.size(along), " tokens in dim ", along,
                         ", fewer than two for each of ", group_.size(),
                         " ranks; use a longer sequence or fewer ranks"));
  const WithoutInterception guard;
  Sharding sharding{.split = split, .dims = {along}};
  const at::Tensor part = part_of(whole, sharding);
  if (!whole.requires_grad()) sharding.whole = whole.clone(at::MemoryFormat::Contiguous);
  mark(part, sharding);
  return part;
}

void TokenPass::mark(const at::Tensor& part, const Sharding& sharding) {
  table_.add(part, sharding);
  if (!sharding.is_sharded()) return;
  const TokenSplit& split = *sharding.split;
  const auto [known, is_new] = lengths_.emplace(split.local(), split.total());
  if (!is_new && known->second != split.total()) known->second = -1;
  has_cut_ = true;
}

void TokenPass::run(OperatorCall& call, Next next) {
  const bool is_forward = torch::autograd::get_current_graph_task_id() == -1 || at::GradMode::is_enabled();
  if (!is_forward || table_.is_empty()) return next(call);
  find_arguments(call);
  if (found_.empty()) {
    if (call.op == attention_operator_) check_lost(call);
    return has_tensors_ ? next(call) : run_factory(call, next);
  }
  FoundArguments found = std::exchange(found_, {});
  if (call.traits.written != 0)
    for (const Found& one : found)
      if (one.sharding.is_copy && (call.traits.written >> one.index & 1) != 0)
        refuse(call, one, "writes into a token that was taken from another rank, a result",
               "write by torch.where() instead");
  try {
    run_found(call, next, std::move(found));
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error& error) {  // it speaks of sizes, which the program may have read off a part
    throw StateError(str(name_of(call), " failed beside a part of a sequence, of which rank ", group_.rank(),
                         " of group '", group_.name(), "' has some tokens; a number, a size or an index that is of ",
                         "the whole sequence may not fit a part: ", error.what_without_backtrace()));
  }
}

/// Integers that a mask took are of all tokens; beside activations that a mask took they are of this rank's.
void TokenPass::take_selected(OperatorCall& call, FoundArguments& found) {
  if (std::none_of(found.begin(), found.end(),
                   [](const Found& one) { return one.sharding.kind == Sharding::Kind::kSelected; }))
    return;
  for (Found& one : found) {
    if (!one.sharding.selected.defined() || !call.arguments()[one.index].isTensor()) continue;
    const at::Tensor own = one.sharding.selected;
    argument(call, one.index) = own;
    one = {one.index, own, *table_.find(own)};
  }
}

void TokenPass::run_found(OperatorCall& call, Next next, FoundArguments found) {
  const at::Tensor given = writes_first(call) ? call.arguments()[0].toTensor() : at::Tensor();
  if (run_view_within(call, next, found)) return;
  take_within(call, next, found);
  found.empty() ? next(call) : run_sharded(call, next, std::move(found));
  const auto results = call.results();  // an argument may have been replaced by this rank's tokens of it
  if (given.defined() && results.size() == 1 && results[0].isTensor()) call.stack.back() = given;
}

void TokenPass::run_sharded(OperatorCall& call, Next next, FoundArguments found) {
  take_selected(call, found);
  if (std::none_of(found.begin(), found.end(), [](const Found& one) { return one.sharding.is_sharded(); }))
    return run_unsharded(call, next, found);
  // A tensor that the program has made is looked at where it joins tokens.
  std::erase_if(found, [](const Found& one) {
    return one.sharding.kind == Sharding::Kind::kConstant || one.sharding.kind == Sharding::Kind::kCounting;
  });
  if (call.traits.random) {
    if (!value_of(call, "generator").isNone())
      refuse(call, found[0], "draws from a generator that the program gives, for a part",
             "leave the generator out, draw a tensor of the whole's sizes, or draw before cut()");
    call.stream = RandomStream::kSlice;
  }
  const at::Tensor written = writes_first(call) ? call.arguments()[0].toTensor() : at::Tensor();
  if (const OperatorRule* const rule = rules_(call.op))
    run_known(call, next, *rule, std::move(found));
  else
    run_opened(call, next, found);
  if (written.defined()) table_.forget_made(written);
}

void TokenPass::find_arguments(const OperatorCall& call) {
  found_.clear();
  has_tensors_ = false;
  bool hides = false;  // a tensor of torch.func's transforms
  for (size_t i = 0; i < call.traits.arguments; ++i)
    for_each_tensor(call.arguments().slice(i, 1), [&](const at::Tensor& tensor) {
      has_tensors_ = true;
      check_transform(call, tensor);
      if (auto sharding = table_.find(tensor)) found_.push_back({i, tensor, *std::move(sharding)});
      hides = hides || (tensor.defined() && !tensor.unsafeGetTensorImpl()->unsafe_storage());
    });
  if (!hides) return;
  for (const Found& one : found_)
    if (one.sharding.is_sharded()) refuse_transform(call, one);
}

/// A part inside of torch.func's transforms: its dims and its gradient are hidden there.
void TokenPass::check_transform(const OperatorCall& call, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.unsafeGetTensorImpl()->unsafe_storage()) return;
  const at::Tensor& inner = under_transforms(tensor);
  if (inner.is_same(tensor)) return;
  if (const auto sharding = table_.find(inner); sharding && sharding->is_sharded())
    refuse_transform(call, {0, inner, *sharding});
}

void TokenPass::refuse_transform(const OperatorCall& call, const Found& part) const {
  refuse(call, part, "is inside of torch.func's vmap() or grad(), and works on a part",
         "write the batch dim out, and call backward()");
}

void TokenPass::run_known(OperatorCall& call, Next next, const OperatorRule& rule, FoundArguments given) {
  const FoundArguments found = cut_wholes(call, next, rule.role, std::move(given));
  switch (rule.role) {
    case OperatorRole::kNone:
      return next(call);
    case OperatorRole::kNew:
      return run_new(call, next);
    case OperatorRole::kEach:
      return run_each(call, next, found);
    case OperatorRole::kFind:
      return run_find(call, next, found);
    case OperatorRole::kCopy:
      return run_copy(call, next, found);
    case OperatorRole::kView:
      return run_view(call, next, found);
    case OperatorRole::kRepeat:
      return run_repeat(call, next, found);
    case OperatorRole::kPart:
      return run_part(call, next, found);
    case OperatorRole::kReduction:
      return run_reduction(call, next, rule, found);
    case OperatorRole::kScan:
      return run_scan(call, next, found);
    case OperatorRole::kSet:
      return run_set(call, found);
    case OperatorRole::kCat:
      return run_cat(call, next, found, /*is_stack=*/false);
    case OperatorRole::kStack:
      return run_cat(call, next, found, /*is_stack=*/true);
    case OperatorRole::kPad:
      return run_pad(call, next, found);
    case OperatorRole::kProduct:
      return run_product(call, next, found);
    case OperatorRole::kConvolution:
      return run_convolution(call, next, found);
    case OperatorRole::kLookup:
      return run_lookup(call, next, found);
    case OperatorRole::kNorm:
      return run_norm(call, next, found);
    case OperatorRole::kAttention:
      return run_attention(call, next);
    case OperatorRole::kClassLoss:
      return run_class_loss(call, next, found);
    case OperatorRole::kEachLoss:
      return run_each_loss(call, next, found);
    case OperatorRole::kIndex:
      return run_index(call, next, found);
    case OperatorRole::kSelectIndex:
      return run_select_index(call, next, found);
    case OperatorRole::kGather:
      return run_gather(call, next, found);
    case OperatorRole::kMaskedSelect:
      return run_masked_select(call, next, found);
    case OperatorRole::kNonzero:
      return run_nonzero(call, next, found);
    case OperatorRole::kPut:
      return run_put(call, next, found);
    case OperatorRole::kScatter:
      return run_scatter(call, next, found);
    case OperatorRole::kTriangle:
      return run_triangle(call, next, found);
    case OperatorRole::kRead:
      return run_read(call, found);
  }
}

void TokenPass::run_new(OperatorCall& call, Next next) {
  const std::string& name = call.op.schema().name();
  const bool is_constant = name == "aten::new_zeros" || name == "aten::new_ones" || name == "aten::new_full";
  next(call);
  if (is_constant && !takes_wholes())
    table_.add(call.results()[0].toTensor(),
               {.kind = Sharding::Kind::kConstant, .split = std::make_shared<TokenSplit>()});
}

/// An operator without a row is looked at by its parts. One that has none is not known to be right.
void TokenPass::run_opened(OperatorCall& call, Next next, const FoundArguments& found) {
  if (!call.traits.composite || call.traits.random)
    refuse(call, found[0], "is not known to sequence parallelism, and has an argument");
  const auto& returns = call.op.schema().returns();
  const bool gives_views = std::any_of(returns.begin(), returns.end(),
                                       [](const c10::Argument& result) { return result.alias_info() != nullptr; });
  if (is_whole(call, found) && call.traits.written == 0 &&
      !gives_views) {  // its code may read sizes, which are a part's
    const Found& one = found[0];
    std::vector<c10::IValue> results = run_on(call, whole_arguments(call, found));
    for (c10::IValue& result : results) {
      if (!result.isTensor() || !result.toTensor().defined()) continue;
      const at::Tensor whole = result.toTensor();
      // Whichever dim is as long as the sequence: the part is a slice of a whole that is right.
      c10::SmallVector<int64_t, 2> dims;
      for (int64_t dim = 0; dim < whole.dim(); ++dim)
        if (whole.size(dim) == one.sharding.split->total()) dims.push_back(dim);
      if (dims.size() > 1 || one.sharding.outer * one.sharding.inner != 1) dims.clear();
      result = part(whole, one.sharding, dims);
    }
    return give(call, std::move(results));
  }
  struct Opened {
    std::vector<std::string>& names;
    ~Opened() { names.pop_back(); }
  };
  opened_.push_back(call.op.schema().name());
  const Opened opened{opened_};
  next.open(call);
}

/// Refuses a tensor of the part's length beside one of all tokens: libtorch's own error would speak of sizes alone.
void TokenPass::check_lengths(const OperatorCall& call, const Found& total) const {
  for_each_tensor(call.arguments(), [&](const at::Tensor& other) {
    if (!other.defined()) return;
    for (int64_t place = 1; place <= std::min(other.dim(), total.tensor.dim()); ++place) {
      const int64_t size = other.size(other.dim() - place), all = total.tensor.size(total.tensor.dim() - place);
      const auto whole = lengths_.find(size);
      if (size != 1 && size != all && whole != lengths_.end() && whole->second == all)
        throw StateError(str(name_of(call), " joins ", total.tensor.sizes(), ", which is of all ", all,
                             " tokens, with ", other.sizes(), ", which the model made by the length of a part, ", size,
                             "; make it from tensors that went through cut(), such as position_ids"));
    }
  });
}

/// A number out of a tensor that the program has made as long as a part is this rank's: its last one, its sum.
void TokenPass::check_made_by_length(const OperatorCall& call, const FoundArguments& found) const {
  const bool keeps_dims = call.op.schema().name() == "aten::slice" || call.op.schema().name() == "aten::narrow";
  const auto is_of_length = [&](int64_t size) { return size > 1 && lengths_.contains(size); };
  for (const Found& one : found) {
    const auto sizes = one.tensor.sizes();
    const bool is_counting = one.sharding.kind == Sharding::Kind::kCounting && !keeps_dims;
    const bool is_constant = one.sharding.kind == Sharding::Kind::kConstant && call.op.schema().name() == "aten::sum" &&
                             std::any_of(sizes.begin(), sizes.end(), is_of_length);
    if (is_counting || is_constant)
      throw StateError(str(name_of(call), " takes a number out of ", sizes,
                           ", which the program has made by the length of a part, so it is this rank's; make it from ",
                           "tensors that went through cut(), such as torch.ones_like(input_ids)"));
  }
}

/// All ranks compute the same, of totals and of what the program has made.
void TokenPass::run_unsharded(OperatorCall& call, Next next, const FoundArguments& found) {
  check_number(call, found);
  const Found* of_total = nullptr;
  size_t made = 0;
  for (const Found& one : found) {
    if (one.sharding.kind == Sharding::Kind::kTotal && (of_total == nullptr || of_total->sharding.counts == nullptr))
      of_total = &one;
    made += one.sharding.kind == Sharding::Kind::kConstant;
  }
  const OperatorRule* const rule = rules_(call.op);
  const OperatorRole role = rule != nullptr ? rule->role : OperatorRole::kRead;
  size_t tensors = 0;
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) { tensors += tensor.defined() && tensor.dim() > 0; });
  const bool stays_constant =
      made == tensors && !call.traits.random &&
      (role == OperatorRole::kEach || role == OperatorRole::kCopy || role == OperatorRole::kView);
  const bool stays_counting = found[0].sharding.kind == Sharding::Kind::kCounting && role == OperatorRole::kCopy;
  if (of_total != nullptr && role == OperatorRole::kEach && !takes_wholes()) check_lengths(call, *of_total);
  if (role == OperatorRole::kReduction || role == OperatorRole::kRead || role == OperatorRole::kPart)
    check_made_by_length(call, found);
  const Sharding total{.kind = Sharding::Kind::kTotal,
                       .split = of_total != nullptr ? of_total->sharding.split : found[0].sharding.split,
                       .counts = of_total != nullptr ? of_total->sharding.counts : nullptr};
  const bool has_total = of_total != nullptr;
  const Found first = found[0];
  const bool is_written = writes_first(call);
  const bool keeps_selection = found.size() == 1 && tensors == 1 && first.sharding.selected.defined() && !is_written &&
                               (role == OperatorRole::kEach || role == OperatorRole::kCopy) &&
                               call.arguments()[first.index].isTensor();
  std::vector<c10::IValue> of_selected = call.arguments().vec();
  next(call);
  for_each_tensor(call.results(), [&](const at::Tensor& result) {
    if (!result.defined() || !result.has_storage()) return;
    if (is_written) {
      table_.refresh(result);  // where it is a view of a whole
      table_.forget_made(result);
    }
    if (table_.find(result)) return;
    if (has_total && keeps_selection && result.sizes() == first.tensor.sizes()) {
      of_selected[first.index] = first.sharding.selected;
      Sharding kept = total;
      kept.selected = run_on(call, of_selected)[0].toTensor();
      table_.add(kept.selected, *table_.find(first.sharding.selected));
      table_.add(result, kept);
    } else if (has_total) {
      table_.add(result, total);
    } else if (stays_constant && !is_written) {
      table_.add(result, {.kind = Sharding::Kind::kConstant, .split = first.sharding.split});
    } else if (stays_counting && at::isIntegralType(result.scalar_type(), /*includeBool=*/false)) {
      Sharding counting = first.sharding;
      table_.add(result, counting);
    }
  });
}

/// A tensor that the program makes of nothing: by the lengths that it has seen, or by whole ones.
void TokenPass::run_factory(OperatorCall& call, Next next) {
  const std::string& name = call.op.schema().name();
  const bool counts = name == "aten::arange";
  if (takes_wholes()) return next(call);
  if (!counts && name != "aten::zeros" && name != "aten::ones" && name != "aten::full") return next(call);
  bool from_zero = true;
  if (counts) {
    const c10::IValue start = value_of(call, "start"), step = value_of(call, "step");
    from_zero = (!start.isScalar() || start.toScalar().toDouble() == 0) &&
                (!step.isScalar() || step.toScalar().toDouble() == 1);
  }
  next(call);
  const at::Tensor result = call.results()[0].toTensor();
  const auto split = std::make_shared<TokenSplit>();
  if (!counts) return table_.add(result, {.kind = Sharding::Kind::kConstant, .split = split});
  if (!from_zero || result.numel() < 2) return;
  if (std::any_of(lengths_.begin(), lengths_.end(),
                  [&](const auto& length) { return length.second == result.numel(); }))
    return table_.add(result, {.kind = Sharding::Kind::kTotal, .split = split});
  if (lengths_.contains(result.numel()))
    table_.add(result, {.kind = Sharding::Kind::kCounting, .split = split, .dims = {0}});
}

// --- what handlers are made of ---

bool TokenPass::is_whole(const OperatorCall& call, const FoundArguments& found) {
  if (call.traits.random) return false;
  bool asks_gradient = false;
  if (at::GradMode::is_enabled())
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
      asks_gradient = asks_gradient || (tensor.defined() && tensor.requires_grad());
    });
  return !asks_gradient && std::all_of(found.begin(), found.end(), [](const Found& one) {
    return one.sharding.kind == Sharding::Kind::kTotal || one.sharding.whole.defined();
  });
}

std::vector<c10::IValue> TokenPass::run_on(const OperatorCall& call, std::vector<c10::IValue> arguments) {
  torch::jit::Stack stack(std::move(arguments));
  call.op.callBoxed(&stack);
  return stack;
}

std::vector<c10::IValue> TokenPass::whole_arguments(const OperatorCall& call, const FoundArguments& found) const {
  std::vector<c10::IValue> result = call.arguments().vec();
  const auto whole_of = [&](const at::Tensor& tensor) {
    for (const Found& one : found)
      if (one.tensor.is_same(tensor) && one.sharding.whole.defined()) return one.sharding.whole;
    return tensor;
  };
  for (c10::IValue& value : result) {
    if (value.isTensor()) {
      value = whole_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorList()) list.push_back(whole_of(tensor));
      value = std::move(list);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional(whole_of(*tensor)) : std::nullopt);
      value = std::move(list);
    }
  }
  return result;
}

at::Tensor TokenPass::part(const at::Tensor& whole, const Sharding& like, c10::ArrayRef<int64_t> dims) {
  Sharding sharding{.split = like.split, .outer = like.outer, .inner = like.inner, .whole = whole};
  sharding.dims.assign(dims.begin(), dims.end());
  if (dims.empty()) {
    table_.add(whole, {.kind = Sharding::Kind::kTotal, .split = like.split});
    return whole;
  }
  const int64_t tokens = whole.size(dims[0]) / (like.outer * like.inner);
  if (tokens != like.split->total()) {
    auto split = std::make_shared<TokenSplit>(like.split->with_total(tokens));
    if (split->lengths.back() < 2) {  // too few for the last rank: all have the whole
      table_.add(whole, {.kind = Sharding::Kind::kTotal, .split = like.split});
      return whole;
    }
    sharding.split = std::move(split);
  }
  at::Tensor result = part_of(whole, sharding);
  table_.add(result, sharding);
  return result;
}

void TokenPass::add(const at::Tensor& tensor, const Found& like, int64_t dim) {
  Sharding sharding = like.sharding;
  sharding.whole.reset();
  sharding.dims = {dim};
  table_.add(tensor, sharding);
}

std::string TokenPass::name_of(const OperatorCall& call) const {
  return opened_.empty() ? call.op.schema().name() : str(opened_.front(), " (", call.op.schema().name(), ")");
}

void TokenPass::refuse(const OperatorCall& call, const Found& argument, const std::string& reason,
                       const std::string& fix) const {
  const TokenSplit& split = *argument.sharding.split;
  const std::string place = argument.sharding.dims.empty() ? std::string("a dim that was merged with another")
                                                           : str("dim ", argument.sharding.dim());
  throw StateError(
      str(name_of(call), " ", reason, " of ", argument.tensor.sizes(), ", of which rank ", group_.rank(), " of group '",
          group_.name(), "' has ", split.local(), " of ", split.total(), " tokens in ", place, "; ",
          !fix.empty() ? fix
                       : std::string("attention goes over the ranks as scaled_dot_product_attention "
                                     "(attn_implementation=\"sdpa\"), sums as sum(), mean() or cross_entropy(); "
                                     "docs/sequence.md lists the rest")));
}

}  // namespace trireme::sequence
