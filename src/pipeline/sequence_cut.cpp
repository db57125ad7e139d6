#include "pipeline/sequence_cut.h"

#include <ATen/ops/tensor.h>

#include <algorithm>
#include <string>

#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/intercept.h"
#include "trireme/pipeline/values.h"

namespace trireme {
namespace {

/// An object of the program's is not looked into.
std::vector<at::Tensor> tensors_in(const c10::IValue& value) {
  return value.isCapsule() ? std::vector<at::Tensor>() : flatten(value).tensors;
}

}  // namespace

bool SequenceCut::has_part(const c10::IValue& value) const {
  return std::ranges::any_of(tensors_in(value), [&](const at::Tensor& tensor) { return sequence_->is_part(tensor); });
}

int64_t SequenceCut::tokens_of(const MicroBatch& batch) const {
  if (has_part(batch.inputs)) return 0;
  for (const at::Tensor& tensor : tensors_in(batch.inputs))
    if (tensor.defined() && tensor.dim() >= 2) return tensor.size(1);
  return 0;
}

/// A line for each tensor, without values where the program has cut it.
std::string SequenceCut::text_of(const c10::IValue& value, const char* name, int micro_batch) const {
  std::string text;
  int number = 0;
  for (const at::Tensor& tensor : tensors_in(value)) {
    text += str("tensor ", ++number, " of the ", name, " of micro-batch ", micro_batch, ": ");
    if (!tensor.defined())
      text += "None\n";
    else if (sequence_->is_part(tensor))
      text += str(tensor.scalar_type(), ", a part\n");
    else
      text += str(tensor.scalar_type(), " ", tensor.sizes(), ", digest ",
                  digest_of(tensor.detach().contiguous().view(-1)), "\n");
  }
  return text;
}

void SequenceCut::agree(const MicroBatchFeed& feed, int count) {
  tokens_.assign(static_cast<size_t>(count), 0);
  if (sequence_ == nullptr) return;
  const WithoutInterception own_operators;
  std::string problem;
  if (needs_.inputs || needs_.labels) {
    const auto difference = first_different_line(*group_, [&] {
      std::string text;
      for (int i = 0; i < count; ++i) {
        if (needs_.inputs) text += text_of(feed.at(i).inputs, "inputs", i);
        if (needs_.labels) text += text_of(feed.at(i).labels, "labels", i);
      }
      return text;
    });
    if (difference)
      problem = str("pipeline: ", difference->text(), " of group '", group_->name(),
                    "'; ranks that share a sequence get the same micro-batches (a sampler over data_place().size, no "
                    "shuffling of their own)");
  }
  all_or_throw(all_, [&] {
    if (!problem.empty()) throw StateError(problem);
    for (int i = 0; needs_.inputs && i < count; ++i) tokens_[static_cast<size_t>(i)] = tokens_of(feed.at(i));
  });
  const at::Tensor told = at::tensor(tokens_, at::kLong);
  stages_.all_reduce(told).wait();
  const auto* const tokens = told.const_data_ptr<int64_t>();
  tokens_.assign(tokens, tokens + count);
  const int64_t ranks = group_->size();
  all_or_throw(all_, [&] {
    for (const int64_t length : tokens_)
      if (length > 0 && length < 2 * ranks)
        throw ShapeError(str("pipeline: micro-batches of ", length, " tokens (dim 1 of the first input), fewer than ",
                             "two for each of ", ranks, " ranks along \"sequence\"; use longer sequences or fewer ",
                             "ranks"));
  });
}

c10::IValue SequenceCut::part_of(const c10::IValue& value, int micro_batch) const {
  const int64_t tokens = tokens_.empty() ? 0 : tokens_.at(static_cast<size_t>(micro_batch));
  if (tokens == 0 || value.isCapsule() || has_part(value)) return value;
  FlatValue flat = flatten(value);
  for (at::Tensor& tensor : flat.tensors)
    if (tensor.defined() && tensor.dim() >= 2 && tensor.size(1) == tokens) tensor = sequence_->cut(tensor, 1);
  return unflatten(flat);
}

}  // namespace trireme
