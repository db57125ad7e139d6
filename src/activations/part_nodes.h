// The nodes between a program's own functions, which take and give gradients of wholes, and operators', which take and
// give this rank's.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <memory>
#include <mutex>
#include <string>
#include <unordered_set>
#include <vector>

#include "trireme/activations/part_tensor.h"
#include "trireme/base/error.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/intercept.h"

namespace trireme::part_tensor {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using Known = std::shared_ptr<const PartOf>;

[[noreturn]] void refuse(const std::string& what);
void refuse_gradients_of_gradients();
bool is_same(const Known& one, const Known& other);
/// The gradient that an operator gives of a part, as a program is to see it.
at::Tensor as_part(const at::Tensor& gradient, const Known& of);

/// From a program's function or its call of backward to what operators have recorded. `slice` is the name of a plain
/// leaf, of which grad() gives plain gradients; "": a part is told.
class LocalGradient final : public Node {
 public:
  LocalGradient(Known of, const at::Tensor& local, Edge edge, std::string slice = {}, bool is_plain = false)
      : of_(std::move(of)),
        local_sizes_(local.sizes().vec()),
        context_(RankContext::current()),
        slice_(std::move(slice)),
        is_plain_(is_plain) {
    add_next_edge(std::move(edge));
    const auto sizes = c10::fromIntArrayRefSlow(of_->sizes);
    add_input_metadata(local.options(), sizes, /*is_tensor_subclass=*/false, /*is_nested=*/false, local.scalar_type());
    const std::lock_guard lock(mutex());
    living().insert(this);
  }
  ~LocalGradient() override {
    const std::lock_guard lock(mutex());
    living().erase(this);
    if (has_hooks()) died_with_hooks = true;
  }
  variable_list apply(variable_list&& gradients) override {
    refuse_gradients_of_gradients();
    if (is_plain_ && gradients[0].defined()) check_shares();
    return {local_gradient(gradients[0], of_, local_sizes_)};
  }
  std::string name() const override { return "TriremeLocalGradient"; }
  const Known& known() const { return of_; }
  bool is_plain() const { return is_plain_; }
  /// Whether `gradient`, where a backward pass begins, is of the plain leaf itself.
  bool is_own(const at::Tensor& gradient) const {
    return is_plain_ && gradient.defined() && PartTensor::of(gradient) == nullptr &&
           gradient.sizes() == at::IntArrayRef(local_sizes_);
  }

  /// Throws: a program has put a hook on the node that it was told, which gradients of operators do not pass.
  static void refuse_hooks() {
    const std::lock_guard lock(mutex());
    const RankContext* const context = RankContext::current();
    if (std::exchange(died_with_hooks, false) || std::ranges::any_of(living(), [context](LocalGradient* node) {
          return node->context_ == context && node->has_hooks();
        }))
      refuse("a hook on its grad_fn would not see all of its gradient; put it on the tensor, by register_hook()");
  }

 private:
  /// The gradients that operators give of elements which several ranks have are of each rank's own use.
  void check_shares() const {
    if (of_->placement.overlaps())
      refuse(str("a program's own function takes \"", slice_,
                 "\" itself, of which ranks share elements; give it what an operator has computed, such as clone()"));
  }
  bool has_hooks() { return !pre_hooks().empty() || !post_hooks().empty() || !tensor_pre_hooks().empty(); }
  static std::mutex& mutex() {
    static auto* const one = new std::mutex;  // autograd's threads may outlive every static object
    return *one;
  }
  static std::unordered_set<LocalGradient*>& living() {
    static auto* const all = new std::unordered_set<LocalGradient*>;
    return *all;
  }
  static thread_local bool died_with_hooks;

  const Known of_;
  const std::vector<int64_t> local_sizes_;
  const RankContext* const context_;
  const std::string slice_;
  const bool is_plain_;
};

/// From what operators have recorded to a program's function.
class GradientAsPart final : public Node {
 public:
  GradientAsPart(Known of, const at::Tensor& local, Edge edge) : of_(std::move(of)) {
    add_next_edge(std::move(edge));
    add_input_metadata(local);
  }
  variable_list apply(variable_list&& gradients) override {
    refuse_gradients_of_gradients();
    return {as_part(gradients[0], of_)};
  }
  std::string name() const override { return "TriremeGradientAsPart"; }

 private:
  const Known of_;
};

/// A program's function that has written a view, where CopySlices runs it on local tensors. Its other results go along
/// edges of the function's own.
class WrittenView final : public Node {
 public:
  WrittenView(Known of, const at::Tensor& local, NodePtr function)
      : of_(std::move(of)), local_sizes_(local.sizes().vec()), function_(std::move(function)) {
    set_next_edges(torch::autograd::edge_list(function_->next_edges()));
    add_input_metadata(local);
  }
  variable_list apply(variable_list&& gradients) override {
    refuse_gradients_of_gradients();
    variable_list results = (*function_)({as_part(gradients[0], of_)});
    if (!results.empty()) results[0] = local_gradient(results[0], of_, local_sizes_);
    return results;
  }
  void release_variables() override { function_->release_variables(); }
  std::string name() const override { return "TriremeWrittenView"; }

 private:
  const Known of_;
  const std::vector<int64_t> local_sizes_;
  const NodePtr function_;
};

/// Takes the local gradient of a leaf; the gradient that the program finds there is a part.
class AccumulatePart final : public torch::autograd::AccumulateGrad {
 public:
  /// It holds the part by `variable` alone, which later versions of torch let go of: a leaf knows its node weakly, and
  /// lives as long as the node's members.
  AccumulatePart(const at::Tensor& part, Known of) : AccumulateGrad(part), of_(std::move(of)) {}
  variable_list apply(variable_list&& gradients) override {
    refuse_gradients_of_gradients();
    if (gradients[0].defined() && PartTensor::of(gradients[0]) == nullptr) {
      at::Tensor gradient = std::move(gradients[0]);
      {
        // The part is ours alone, so libtorch would take its memory: it must be nobody else's.
        const WithoutInterception as_local;
        const at::Tensor local = local_of(variable);
        if (of_->shares > 1) gradient = gradient / of_->shares;
        const bool is_ours = gradient.use_count() == 1 && gradient.storage().use_count() == 1;
        if (!is_ours || !torch::autograd::utils::obeys_layout_contract(gradient, local))
          gradient = torch::autograd::utils::clone_obey_contract(gradient, local);
      }
      gradients[0] = PartTensor::wrap(std::move(gradient), of_);
    }
    return AccumulateGrad::apply(std::move(gradients));
  }
  std::string name() const override { return "TriremeAccumulatePart"; }
  const Known& known() const { return of_; }

 private:
  const Known of_;
};

/// Adds up a part's gradient in its grad(), as retain_grad() does.
class KeptGradient final : public torch::autograd::FunctionPreHook {
 public:
  KeptGradient(const at::Tensor& local, Known of, uint32_t output)
      : local_(local.getIntrusivePtr()), of_(std::move(of)), output_(output) {}
  variable_list operator()(const variable_list& gradients) override {
    const auto local = local_.lock();
    if (local == nullptr || !gradients[output_].defined()) return gradients;
    refuse_gradients_of_gradients();
    at::Tensor& kept = local->mutable_grad();
    const at::Tensor gradient = as_part(gradients[output_], of_);
    kept = kept.defined() ? kept + gradient : gradient.clone();
    return gradients;
  }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl> local_;
  const Known of_;
  const uint32_t output_;
};

/// The place of a gradient in the graph, where `edge` leads to what a program was told.
struct Captured {
  Edge edge;
  Known of;
};
Captured captured(const Edge& edge);

/// From now on `function`, where it is a program's own that takes parts, gives and gets gradients of whole tensors that
/// are those of all ranks. Others are left as they are.
void join_ranks(Node& function);

}  // namespace trireme::part_tensor
