#include "activations/plain_slices.h"

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>

namespace trireme {
namespace part_tensor {

const NodePtr* Slices::told(const at::TensorBase& leaf) {
  if (!has_some_ || !leaf.requires_grad()) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = slices_.find(leaf.unsafeGetTensorImpl());
  if (found == slices_.end()) return nullptr;
  // The accumulator asks whether its tensor is still a leaf.
  const auto running = torch::autograd::get_current_node();
  if (const auto* const own = dynamic_cast<torch::autograd::AccumulateGrad*>(running.get());
      own != nullptr && own->variable.is_same(leaf))
    return nullptr;
  Slice& slice = found->second;
  const at::Tensor own(leaf);
  const Edge edge(torch::autograd::impl::grad_accumulator(own), 0);
  if (slice.told == nullptr || !(slice.told->next_edge(0) == edge))
    slice.told = make_node<LocalGradient>(slice.of, own, edge, slice.name, /*is_plain=*/true);
  return &slice.told;
}

}  // namespace part_tensor

PlainSlices::~PlainSlices() { part_tensor::Slices::all().forget(this); }

}  // namespace trireme
