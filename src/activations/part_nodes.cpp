#include "activations/part_nodes.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/intercept/program.h"

namespace trireme::part_tensor {
namespace {

/// To a whole argument of a program's function: all of a gradient that is a part.
class WholeGradient final : public Node {
 public:
  WholeGradient(const Edge& edge, std::shared_ptr<PartRanks> ranks) : ranks_(std::move(ranks)) {
    const auto& whole = edge.function->input_metadata(edge.input_nr);
    add_input_metadata(whole.options(), whole.shape_as_dim_vector(), whole.is_tensor_subclass(),
                       whole.is_nested_tensor(), whole.grad_dtype());
    add_next_edge(edge);
  }
  variable_list apply(variable_list&& gradients) override {
    if (!gradients[0].defined() || at::GradMode::is_enabled()) return std::move(gradients);
    return {ranks_->whole(gradients[0])};
  }
  std::string name() const override { return "TriremeWholeGradient"; }

 private:
  const std::shared_ptr<PartRanks> ranks_;
};

/// The hook of a program's function that joins gradients of its whole results, of which ranks have shares.
class JoinedGradients final : public torch::autograd::FunctionPreHook {
 public:
  explicit JoinedGradients(Known of) : of_(std::move(of)) {}
  variable_list operator()(const variable_list& gradients) override {
    variable_list joined = gradients;
    for (at::Tensor& gradient : joined) {
      if (!gradient.defined() || PartTensor::of(gradient) != nullptr) continue;
      refuse_gradients_of_gradients();
      gradient = of_->ranks->mean(gradient, of_->placement);
    }
    return joined;
  }

 private:
  const Known of_;
};

const LocalGradient* to_part(const Edge& edge) { return dynamic_cast<const LocalGradient*>(edge.function.get()); }

}  // namespace

thread_local bool LocalGradient::died_with_hooks = false;

void refuse(const std::string& what) { throw StateError("a part of a tensor: " + what); }

void refuse_gradients_of_gradients() {
  if (at::GradMode::is_enabled())
    refuse("gradients of gradients (create_graph=True) are not there; leave create_graph out");
}

bool is_same(const Known& one, const Known& other) {
  return one == other || (one->sizes == other->sizes && one->placement == other->placement);
}

at::Tensor as_part(const at::Tensor& gradient, const Known& of) {
  if (!gradient.defined() || PartTensor::of(gradient) != nullptr) return gradient;
  if (of->shares == 1) return PartTensor::wrap(gradient, of);
  const WithoutInterception as_local;
  return PartTensor::wrap(gradient / of->shares, of);
}

Captured captured(const Edge& edge) {
  if (const auto* const told = dynamic_cast<const LocalGradient*>(edge.function.get()))
    return {told->next_edge(0), told->is_plain() ? nullptr : told->known()};
  if (const auto* const leaf = dynamic_cast<const AccumulatePart*>(edge.function.get())) return {edge, leaf->known()};
  return {edge, nullptr};
}

void join_ranks(Node& function) {
  if (!is_function(function)) return;
  const auto of = std::ranges::find_if(function.next_edges(), to_part);
  if (of == function.next_edges().end() || to_part(*of)->known()->ranks == nullptr) return;
  const std::shared_ptr<PartRanks> ranks = to_part(*of)->known()->ranks;
  for (uint32_t i = 0; i < function.num_outputs(); ++i) {
    const Edge edge = function.next_edge(i);
    if (edge.is_valid() && to_part(edge) == nullptr && dynamic_cast<WholeGradient*>(edge.function.get()) == nullptr)
      function.set_next_edge(i, Edge(make_node<WholeGradient>(edge, ranks), 0));
  }
  const auto part = std::ranges::find_if(function.next_edges(), [](const Edge& edge) {
    return to_part(edge) != nullptr && to_part(edge)->known()->shares > 1;
  });
  if (part == function.next_edges().end()) return;
  const bool is_joined = std::ranges::any_of(function.pre_hooks(), [](const auto& hook) {
    return dynamic_cast<const JoinedGradients*>(hook.get()) != nullptr;
  });
  if (!is_joined) function.add_pre_hook(std::make_unique<JoinedGradients>(to_part(*part)->known()));
}

}  // namespace trireme::part_tensor
