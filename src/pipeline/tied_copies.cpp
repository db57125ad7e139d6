#include "pipeline/tied_copies.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

constexpr int64_t kHeader = 6;                 // words before a gradient: the mark, its key, dtype, number of elements
constexpr int64_t kMark = 0x7469656467726164;  // "tiedgrad"

}  // namespace

TiedCopies::TiedCopies(Group& stages, const std::vector<Tie>& ties, const pipeline::Schedule& shape, Pager& pager,
                       bool each_micro_batch)
    : stages_(stages), pager_(pager), each_micro_batch_(each_micro_batch) {
  for (const Tie& tie : ties) {
    const int owner = shape.stage_of(tie.parts.front());
    Tied& tied = ties_.emplace_back(Tied{shape.chunk_of(tie.parts.front()), tie.parameters.front(), -1, {}});
    for (size_t i = 1; i < tie.parts.size(); ++i)
      tied.copies.push_back({shape.chunk_of(tie.parts[i]), shape.stage_of(tie.parts[i]), owner, tie.parameters[i]});
    if (owner != stages.rank()) continue;
    const auto place = find_managed(tied.parameter);
    if (!place) throw Error(ErrorCode::kInternal, str("pipeline: the tied parameter '", tie.name, "' is not managed"));
    tied.index = place->parameter;
  }
  cast_copies();
}

// The owners' weights may have been cast.
void TiedCopies::cast_copies() {
  const WithoutInterception own_operators;
  const at::Tensor dtype = at::empty({1}, at::kInt);
  for (const Tied& tied : ties_) {
    if (owns(tied)) dtype.fill_(static_cast<int>(pager_.parameters()[tied.index].dtype));
    for (const Copy& copy : tied.copies) {
      if (owns(tied) && !is_here(copy)) stages_.send(dtype, copy.stage).wait();
      if (!is_here(copy)) continue;
      if (!owns(tied)) stages_.recv(dtype, copy.owner_stage).wait();
      copy.parameter.set_data(copy.parameter.detach().to(static_cast<at::ScalarType>(dtype.item<int>())).contiguous());
    }
  }
}

void TiedCopies::follow_owners() {
  const SubjectScope subject("tied parameters");
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  for (const Tied& tied : ties_) {
    const at::Tensor whole = owns(tied) ? pager_.whole(tied.index).detach().clone() : at::Tensor();
    for (const Copy& copy : tied.copies) {
      if (owns(tied) && is_here(copy)) {
        copy.parameter.copy_(whole);
      } else if (owns(tied)) {
        stages_.send(whole, copy.stage).wait();
      } else if (is_here(copy)) {
        const at::Tensor received = at::empty_like(copy.parameter);
        stages_.recv(received, copy.owner_stage).wait();
        copy.parameter.copy_(received);
      }
    }
  }
}

TiedCopies::Key TiedCopies::key_of(size_t tie, size_t copy, const Pass& pass) const {
  return {static_cast<int64_t>(tie), static_cast<int64_t>(copy), each_micro_batch_ ? pass.micro_batch : -1};
}

TiedCopies::Roots TiedCopies::receive(const Pass& pass) {
  Roots roots;
  if (!pass.is_last && !each_micro_batch_) return roots;
  const SubjectScope subject("gradients of tied parameters");
  for (size_t tie = 0; tie < ties_.size(); ++tie) {
    const Tied& tied = ties_[tie];
    if (!owns(tied) || tied.chunk != pass.chunk || !tied.parameter.requires_grad()) continue;
    // The last layers first, as autograd adds them where there are no stages.
    for (size_t copy = tied.copies.size(); copy-- > 0;) {
      roots.edges.push_back(torch::autograd::impl::gradient_edge(tied.parameter));
      roots.gradients.push_back(take(key_of(tie, copy, pass)));
    }
  }
  return roots;
}

at::Tensor TiedCopies::take(const Key& key) {
  const Copy& copy = ties_[static_cast<size_t>(key.tie)].copies[static_cast<size_t>(key.copy)];
  while (!gradients_.contains(key)) {
    if (is_here(copy))
      throw Error(ErrorCode::kInternal, str("pipeline: a copy of tied parameter ", key.tie, " on stage ", copy.stage,
                                            " has no gradient of micro-batch ", key.micro_batch, " yet"));
    receive_next(copy.stage);
  }
  return std::move(gradients_.extract(key).mapped());
}

void TiedCopies::receive_next(int from) {
  at::Tensor header = at::empty({kHeader}, at::kLong);
  stages_.recv(header, from).wait();
  const int64_t* const words = header.const_data_ptr<int64_t>();
  const Key key{words[1], words[2], words[3]};
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorCode::kDiverged,
                str("pipeline: stage ", from, " sent stage ", stages_.rank(), " a gradient of copy ", key.copy,
                    " of tied parameter ", key.tie, ", micro-batch ", key.micro_batch, ", ", why,
                    ": the stages do not run the same step"));
  };
  const auto is_index = [](int64_t index, size_t size) { return index >= 0 && index < static_cast<int64_t>(size); };
  if (words[0] != kMark) refuse("without the mark of such a message");
  if (!is_index(key.tie, ties_.size()) || !owns(ties_[key.tie])) refuse("of which it owns none");
  const Tied& tied = ties_[key.tie];
  if (!is_index(key.copy, tied.copies.size()) || tied.copies[key.copy].stage != from)
    refuse("which is another stage's");
  const ParameterSpec& spec = pager_.parameters()[tied.index];
  if (words[4] != static_cast<int64_t>(spec.dtype) || words[5] != tied.parameter.numel())
    refuse(str("of ", words[5], " elements, and the parameter has ", tied.parameter.numel(), " of ", spec.dtype));
  at::Tensor gradient = at::empty(spec.shape, at::TensorOptions().dtype(spec.dtype).device(pager_.device()));
  stages_.recv(gradient, from).wait();
  if (!gradients_.emplace(key, gradient).second) refuse("twice");
}

void TiedCopies::send(const Pass& pass) {
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const SubjectScope subject("gradients of tied parameters");
  for (size_t tie = 0; tie < ties_.size(); ++tie)
    for (size_t index = 0; index < ties_[tie].copies.size(); ++index) {
      Copy& copy = ties_[tie].copies[index];
      if (!is_here(copy) || copy.chunk != pass.chunk || !copy.parameter.requires_grad()) continue;
      at::Tensor gradient = std::exchange(copy.parameter.mutable_grad(), at::Tensor());
      if (!each_micro_batch_) {
        // Sums are fp32, as those of all gradients.
        if (gradient.defined()) copy.sum = copy.sum.defined() ? copy.sum.add_(gradient) : gradient.to(at::kFloat);
        if (!pass.is_last) continue;
        gradient = std::exchange(copy.sum, at::Tensor());
      }
      const at::Tensor message =
          gradient.defined() ? gradient.to(copy.parameter.scalar_type()).contiguous() : at::zeros_like(copy.parameter);
      const Key key = key_of(tie, index, pass);
      if (owns(ties_[tie])) {
        gradients_.emplace(key, message);
        continue;
      }
      const at::Tensor header = at::empty({kHeader}, at::kLong);
      const int64_t words[] = {
          kMark, key.tie, key.copy, key.micro_batch, static_cast<int64_t>(message.scalar_type()), message.numel()};
      std::copy(std::begin(words), std::end(words), header.mutable_data_ptr<int64_t>());
      leaving_.emplace_back(stages_.send(header, copy.owner_stage), header);
      leaving_.emplace_back(stages_.send(message, copy.owner_stage), message);
    }
}

void TiedCopies::clear() {
  for (auto& [pending, message] : leaving_) pending.wait();
  leaving_.clear();
  gradients_.clear();
  for (Tied& tied : ties_)
    for (Copy& copy : tied.copies) {
      copy.sum.reset();
      if (is_here(copy)) copy.parameter.mutable_grad().reset();
    }
}

std::set<std::string> names_of_copies(const std::vector<Tie>& ties, const torch::nn::Module& module) {
  std::set<const void*> copies;
  for (const Tie& tie : ties)
    for (size_t i = 1; i < tie.parameters.size(); ++i)
      if (tie.parameters[i].defined()) copies.insert(tie.parameters[i].unsafeGetTensorImpl());
  std::set<std::string> names;
  for (const auto& item : module.named_parameters())
    if (copies.contains(item.value().unsafeGetTensorImpl())) names.insert(item.key());
  return names;
}

}  // namespace trireme
