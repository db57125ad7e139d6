// Programs that speak of wholes: their sizes and places are the whole sequence's, and the tensors that they make by
// them are whole. Here they become this rank's.
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/tensor.h>
#include <c10/util/accumulate.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>

#include "sequence/token_pass.h"
#include "trireme/base/error.h"
#include "trireme/intercept/transforms.h"

namespace trireme::sequence {
namespace {

std::vector<int64_t> contiguous_strides(at::IntArrayRef sizes) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t dim = sizes.size(); dim-- > 0; stride *= std::max<int64_t>(sizes[dim], 1)) strides[dim] = stride;
  return strides;
}

/// The sizes that `call` gives `whole` sizes, -1 among them replaced.
std::vector<int64_t> asked_sizes(const OperatorCall& call, std::vector<int64_t> given, at::IntArrayRef whole) {
  const std::string& name = call.op.schema().name();
  const auto fail = [&] {
    throw ShapeError(str(name, ": a tensor of ", whole, ", of which this rank has a part, cannot be of sizes ",
                         at::IntArrayRef(given)));
  };
  if (expands(name)) {
    const size_t added = given.size() - std::min(given.size(), whole.size());
    if (given.size() < whole.size()) fail();
    for (size_t dim = added; dim < given.size(); ++dim) {
      const int64_t size = whole[dim - added];
      if (given[dim] == -1) given[dim] = size;
      if (given[dim] != size && size != 1) fail();
    }
    return given;
  }
  if (name == "aten::unflatten") {
    int64_t at = call.arguments()[1].toInt();
    if (at < 0) at += static_cast<int64_t>(whole.size());
    const auto dim = static_cast<size_t>(at);
    const int64_t known = -c10::multiply_integers(given);
    for (int64_t& size : given)
      if (size == -1 && known > 0) size = whole[dim] / known;
    std::vector<int64_t> sizes(whole.begin(), whole.begin() + at);
    sizes.insert(sizes.end(), given.begin(), given.end());
    sizes.insert(sizes.end(), whole.begin() + at + 1, whole.end());
    given = std::move(sizes);
  } else {
    const int64_t known = -c10::multiply_integers(given);
    for (int64_t& size : given)
      if (size == -1 && known > 0) size = c10::multiply_integers(whole) / known;
  }
  if (c10::multiply_integers(given) != c10::multiply_integers(whole)) fail();
  return given;
}

struct OwnStorage : torch::autograd::Function<OwnStorage> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& tensor) {
    if (tensor.numel() == 0) return tensor.clone();
    return at::from_blob(
        tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, tensor.options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0]};
  }
};

}  // namespace

at::Tensor of_sizes(const std::string& name, const at::Tensor& tensor, at::IntArrayRef sizes) {
  if (expands(name)) return tensor.expand(sizes);
  return name == "aten::view_as" ? tensor.view(sizes) : tensor.reshape(sizes);
}

at::Tensor in_own_storage(const at::Tensor& tensor) {
  (void)tensor.detach();  // a later pass may not have computed its data yet
  return OwnStorage::apply(tensor);
}

std::vector<int64_t> TokenPass::sizes_of(const Found& argument) const {
  const Sharding& sharding = argument.sharding;
  if (sharding.whole.defined()) return sharding.whole.sizes().vec();
  if (!sharding.is_sharded()) return argument.tensor.sizes().vec();
  if (sharding.kind == Sharding::Kind::kMerged)
    return std::vector<int64_t>(static_cast<size_t>(argument.tensor.dim()), -1);
  std::vector<int64_t> sizes = argument.tensor.sizes().vec();
  const bool is_counted = sharding.kind == Sharding::Kind::kTokens || speaks_of_wholes_;
  sizes[static_cast<size_t>(sharding.dim())] =
      is_counted ? sharding.outer * sharding.split->total() * sharding.inner : -1;
  return sizes;
}

std::optional<std::vector<int64_t>> TokenPass::whole_sizes(const at::Tensor& tensor) {
  const bool is_forward = torch::autograd::get_current_graph_task_id() == -1 || at::GradMode::is_enabled();
  if (!is_forward || table_.is_empty() || !tensor.defined()) return {};
  const bool is_hidden = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() == nullptr;
  const at::Tensor& inner = is_hidden ? under_transforms(tensor) : tensor;
  const auto sharding = find(inner);
  if (!sharding || !sharding->is_sharded()) return {};
  if (!inner.is_same(tensor))
    throw StateError(str("a size of a part of a sequence is read inside of torch.func's vmap() or grad(), where it is ",
                         "not known; write the batch dim out, and call backward()"));
  return sizes_of({0, tensor, *sharding});
}

/// view(), reshape(), expand() and their kin: the program asks for a view of the whole.
void TokenPass::run_sized_view(OperatorCall& call, Next next, const Found& one) {
  const std::string& name = call.op.schema().name();
  const Sharding& sharding = one.sharding;
  if (sharding.kind == Sharding::Kind::kMerged)
    refuse(call, one, "needs the tokens", "keep tokens in a dim of their own");
  const std::vector<int64_t> whole = sizes_of(one);
  const bool is_like = call.arguments()[1].isTensor();
  const size_t sizes_at = name == "aten::unflatten" ? 2 : 1;
  std::vector<int64_t> given;
  if (is_like) {
    const at::Tensor other = call.arguments()[1].toTensor();
    const auto of_other = table_.find(other);
    given = of_other ? sizes_of({1, other, *of_other}) : other.sizes().vec();
  } else {
    given = call.arguments()[sizes_at].toIntVector();
  }
  const std::vector<int64_t> asked = asked_sizes(call, given, whole);
  const bool has_whole = sharding.whole.defined() && is_whole(call, {one});

  Sharding result = sharding;
  result.whole.reset();
  result.dims.clear();
  std::vector<int64_t> local = asked;
  for (const int64_t dim : sharding.dims) {
    std::optional<TokenDim> token;
    const int64_t tokens = sharding.split->total();
    if (expands(name)) {
      token = TokenDim{dim + static_cast<int64_t>(asked.size() - whole.size()), sharding.outer, sharding.inner};
    } else {
      const int64_t stride = sharding.inner * c10::multiply_integers(whole.begin() + dim + 1, whole.end());
      token = token_dim_of(asked, contiguous_strides(asked), stride, tokens);
    }
    if (!token) {
      if (has_whole)  // every rank has it
        return give(call, {part(sharding.whole.reshape(asked), sharding, {})});
      refuse(call, one, str("gives sizes ", at::IntArrayRef(asked), ", which split tokens,"),
             "keep tokens in a dim of their own: (batch, -1, ...)");
    }
    result.dims.push_back(token->dim);
    result.outer = token->outer;
    result.inner = token->inner;
    local[static_cast<size_t>(token->dim)] = token->outer * sharding.split->local() * token->inner;
  }
  const at::Tensor base = one.tensor;
  const at::Tensor whole_tensor = has_whole ? sharding.whole : at::Tensor();
  const bool is_expanded = expands(name);
  if (is_like) {
    give(call, {next.run(call, [&] { return of_sizes(name, base, local); })});
  } else {
    if (name == "aten::unflatten") {
      const int64_t at = call.arguments()[1].toInt();
      const auto first = local.begin() + (at < 0 ? at + base.dim() : at);
      argument(call, sizes_at) = std::vector<int64_t>(first, first + static_cast<int64_t>(given.size()));
    } else {
      argument(call, sizes_at) = local;
    }
    next(call);
  }
  const at::Tensor made = call.results()[0].toTensor();
  if (has_whole) {
    result.whole = is_expanded ? whole_tensor.expand(asked) : whole_tensor.reshape(asked);
  } else if (made.is_alias_of(base)) {
    return;  // known by its strides
  }
  table_.add(made, result);
}

/// This rank's tokens of a tensor that every rank has, along `dim` of it. A gradient of them is this rank's share.
at::Tensor TokenPass::own_tokens(const OperatorCall& call, Next next, const at::Tensor& whole, int64_t dim,
                                 const Sharding& like) {
  Sharding sharding{.split = like.split, .dims = {dim}, .outer = like.outer, .inner = like.inner};
  const bool asks_gradient = at::GradMode::is_enabled() && whole.requires_grad();
  const at::Tensor own = next.run(call, [&] { return part_of(whole, sharding); });
  if (!asks_gradient) sharding.whole = whole;
  table_.add(own, sharding);
  return own;
}

/// A view of a tensor of which this rank's tokens alone are known: it is as whole, and may be written.
bool TokenPass::run_view_within(OperatorCall& call, Next next, const FoundArguments& found) {
  const OperatorRule* const rule = rules_(call.op);
  if (!takes_wholes() || rule == nullptr || found.size() != 1 || found[0].index != 0 ||
      found[0].sharding.kind != Sharding::Kind::kWithin ||
      (rule->role != OperatorRole::kView && rule->role != OperatorRole::kPart))
    return false;
  const Found one = found[0];
  next(call);
  for_each_tensor(call.results(), [&](const at::Tensor& result) {
    if (result.defined() && !result.is_alias_of(one.tensor))  // a copy, of which nothing is known
      table_.add(result, {.kind = Sharding::Kind::kWithin, .split = one.sharding.split});
  });
  return true;
}

/// In place of tensors of which this rank's tokens alone are known: these tokens. One that is written stays as it is.
void TokenPass::take_within(OperatorCall& call, Next next, FoundArguments& found) {
  std::erase_if(found, [&](const Found& one) {
    return one.sharding.kind == Sharding::Kind::kWithin && one.index == 0 && writes_first(call);
  });
  for (Found& one : found) {
    if (one.sharding.kind != Sharding::Kind::kWithin) continue;
    const at::Tensor whole = one.tensor;
    const TokenSplit& split = *one.sharding.split;
    if (one.sharding.dims.empty() || one.sharding.outer * one.sharding.inner != 1)
      refuse(call, one, "reads some tokens of a tensor that parts were written into, a view");
    one.tensor =
        next.run(call, [&] { return in_own_storage(whole.narrow(one.sharding.dim(), split.begin(), split.local())); });
    one.sharding.kind = Sharding::Kind::kTokens;
    table_.add(one.tensor, one.sharding);
    c10::IValue& value = argument(call, one.index);
    if (value.isTensor()) {
      value = one.tensor;
      continue;
    }
    if (!value.isTensorList()) refuse(call, one, "takes for an index a part");
    c10::List<at::Tensor> tensors;
    for (const at::Tensor& tensor : value.toTensorVector())
      tensors.push_back(tensor.is_same(whole) ? one.tensor : tensor);
    value = std::move(tensors);
  }
}

/// Writes tokens into a tensor that the program has made as long as the whole: from now on it is known within this
/// rank's tokens alone.
void TokenPass::run_written_within(OperatorCall& call, Next next, const Found& lead, const at::Tensor& written) {
  const int64_t dim = written.dim() - from_right(lead);
  const TokenSplit& split = *lead.sharding.split;
  argument(call, 0) = next.run(call, [&] { return written.narrow(dim, split.begin(), split.local()); });
  next(call);
  table_.add(written, {.kind = Sharding::Kind::kWithin, .split = lead.sharding.split, .dims = {dim}});
}

/// In place of arguments that every rank has whole, and that meet a part's tokens: this rank's tokens of them.
FoundArguments TokenPass::cut_wholes(OperatorCall& call, Next next, OperatorRole role, FoundArguments found) {
  if (!takes_wholes() || is_whole(call, found)) return found;
  const Found* lead = nullptr;
  for (const Found& one : found)
    if (one.sharding.kind == Sharding::Kind::kTokens && one.sharding.dims.size() == 1 &&
        (lead == nullptr || !one.sharding.whole.defined()))
      lead = &one;
  if (lead == nullptr) return found;
  const Found like = *lead;
  const int64_t all = like.sharding.outer * like.sharding.inner * like.sharding.split->total();
  bool has_cut = false;
  const auto own = [&](const at::Tensor& tensor, int64_t dim) -> std::optional<at::Tensor> {
    if (!tensor.defined() || dim < 0 || dim >= tensor.dim() || tensor.size(dim) != all) return {};
    const auto sharding = table_.find(tensor);
    if (sharding && sharding->is_sharded()) return {};
    has_cut = true;
    return own_tokens(call, next, tensor, dim, like.sharding);
  };
  const auto take = [&](size_t index, int64_t dim) {
    if (!argument(call, index).isTensor()) return;
    if (const auto tensor = own(argument(call, index).toTensor(), dim)) argument(call, index) = *tensor;
  };
  const int64_t place = from_right(like);
  switch (role) {
    case OperatorRole::kEach:
    case OperatorRole::kEachLoss:
    case OperatorRole::kMaskedSelect:
      for (size_t i = writes_first(call) ? 1 : 0; i < call.traits.arguments; ++i)
        if (argument(call, i).isTensor()) take(i, argument(call, i).toTensor().dim() - place);
      break;
    case OperatorRole::kProduct: {
      const size_t left = left_factor_index(call.op);
      for (size_t i = left; i < left + 2 && call.op.schema().name() != "aten::linear"; ++i) {
        const int64_t dims = argument(call, i).toTensor().dim();
        if (dims - place < dims - 2 && like.sharding.dim() < like.tensor.dim() - 2) take(i, dims - place);
      }
      break;
    }
    case OperatorRole::kGather:
    case OperatorRole::kScatter:
      for (size_t i = writes_first(call) ? 1 : 0; i < call.traits.arguments; ++i)
        if (argument(call, i).isTensor() && argument(call, i).toTensor().dim() == like.tensor.dim())
          take(i, like.sharding.dim());
      break;
    case OperatorRole::kCat:
    case OperatorRole::kStack: {
      c10::List<at::Tensor> tensors;
      const int64_t along = named_dims(call, like.tensor.dim() + (role == OperatorRole::kStack)).at(0);
      if (role == OperatorRole::kCat && along == like.sharding.dim()) break;
      for (const at::Tensor& tensor : argument(call, 0).toTensorVector())
        tensors.push_back(own(tensor, tensor.dim() == like.tensor.dim() ? like.sharding.dim() : -1).value_or(tensor));
      if (has_cut) argument(call, 0) = std::move(tensors);
      break;
    }
    case OperatorRole::kClassLoss: {
      const at::Tensor& logits = argument(call, 0).toTensor();
      const at::Tensor& target = argument(call, 1).toTensor();
      const int64_t class_dim = logits.dim() > 1 ? 1 : 0;
      const bool is_soft = target.dim() == logits.dim();
      if (like.index == 0)
        take(1, like.sharding.dim() - (!is_soft && like.sharding.dim() > class_dim));
      else if (like.index == 1)
        take(0, like.sharding.dim() + (!is_soft && like.sharding.dim() >= class_dim));
      break;
    }
    case OperatorRole::kIndex:
    case OperatorRole::kPut: {
      c10::List<std::optional<at::Tensor>> indices;
      const bool is_table = like.index != 0;  // a part among the indices
      int64_t dim = 0;
      for (const std::optional<at::Tensor>& index : argument(call, 1).toOptionalTensorList()) {
        const bool is_mask =
            index && index->defined() && (index->scalar_type() == at::kBool || index->scalar_type() == at::kByte);
        std::optional<at::Tensor> cut;
        if (is_mask && !is_table) cut = own(*index, like.sharding.dim() - dim);
        if (is_mask && is_table && index->is_same(like.tensor) && !(role == OperatorRole::kPut))
          take(0, dim + like.sharding.dim());
        if (index && index->defined() && !is_mask && is_table) cut = own(*index, index->dim() - place);
        indices.push_back(cut ? cut : index);
        dim += is_mask ? index->dim() : 1;
      }
      if (has_cut) argument(call, 1) = std::move(indices);
      break;
    }
    default:
      break;
  }
  if (!has_cut) return found;
  find_arguments(call);
  FoundArguments result = std::exchange(found_, {});
  std::erase_if(result, [](const Found& one) {
    return one.sharding.kind == Sharding::Kind::kConstant || one.sharding.kind == Sharding::Kind::kCounting;
  });
  return result;
}

/// How many tokens each rank has selected by `mask`, of which this rank has `selected`.
std::shared_ptr<const TokenSplit> TokenPass::selected_split(const Found& mask, int64_t selected) {
  if (!speaks_of_wholes_) return mask.sharding.split;
  const WithoutInterception guard;
  auto split = std::make_shared<TokenSplit>();
  split->rank = group_.rank();
  const Sharding& sharding = mask.sharding;
  if (sharding.whole.defined() && sharding.dims.size() == 1) {
    for (int rank = 0; rank < group_.size(); ++rank) {
      Sharding of_rank{
          .split = sharding.split, .dims = sharding.dims, .outer = sharding.outer, .inner = sharding.inner};
      auto other = std::make_shared<TokenSplit>(*sharding.split);
      other->rank = rank;
      of_rank.split = std::move(other);
      split->lengths.push_back(part_of(sharding.whole, of_rank).count_nonzero().item<int64_t>());
    }
    return split;
  }
  const at::Tensor own = at::tensor({selected}, at::kLong).to(mask.tensor.device());
  at::Tensor all = at::empty({group_.size()}, own.options());
  group_.all_gather(all, own).wait();
  const at::Tensor counts = all.cpu();
  split->lengths.assign(counts.const_data_ptr<int64_t>(), counts.const_data_ptr<int64_t>() + group_.size());
  return split;
}

}  // namespace trireme::sequence
