#include "pipeline/split_backward.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <string_view>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace trireme {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;

/// Keeps the gradients with which a node runs in the first half.
struct Keep final : torch::autograd::FunctionPreHook {
  explicit Keep(std::shared_ptr<std::vector<at::Tensor>> place) : place(std::move(place)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    if (place->empty()) *place = gradients;
    return gradients;
  }
  const std::shared_ptr<std::vector<at::Tensor>> place;
};

/// Where the ways from some nodes lead.
class Reach {
 public:
  explicit Reach(const SplitBackward::Edges& inputs) {
    for (const Edge& input : inputs) inputs_.insert(input.function.get());
  }

  /// Visits everything behind `roots` once, without recursion: graphs are as deep as models.
  void visit(const SplitBackward::Edges& roots) {
    std::vector<std::pair<Node*, size_t>> path;
    const auto enter = [&](Node* node) {
      if (node == nullptr || !known_.emplace(node, Known{}).second) return;
      path.emplace_back(node, 0);
    };
    for (const Edge& root : roots) {
      enter(root.function.get());
      while (!path.empty()) {
        auto& [node, next] = path.back();
        if (next < node->next_edges().size()) {
          enter(node->next_edges()[next++].function.get());
          continue;
        }
        Node* const done = node;
        path.pop_back();
        Known known;
        if (done->next_edges().empty()) (inputs_.contains(done) ? known.to_input : known.to_weight) = true;
        for (const Edge& edge : done->next_edges()) {
          if (!edge.function) continue;
          known.to_input |= to_input(edge);
          known.to_weight |= to_weight(edge);
        }
        known_[done] = known;
        order_.push_back(done);
      }
    }
  }

  bool to_input(const Edge& edge) const { return known_.at(edge.function.get()).to_input; }
  bool to_weight(const Edge& edge) const { return known_.at(edge.function.get()).to_weight; }
  const std::vector<Node*>& nodes() const { return order_; }

 private:
  struct Known {
    bool to_input = false, to_weight = false;
  };
  std::unordered_set<const Node*> inputs_;
  std::unordered_map<const Node*, Known> known_;
  std::vector<Node*> order_;
};

// torch.utils.checkpoint's and DeepSpeed's functions have this name.
bool is_reentrant(const Node& node) {
  const bool is_python = std::string_view(typeid(node).name()).ends_with("PyNodeE");  // other names are not needed
  return is_python && node.name().find("CheckpointFunction") != std::string::npos;
}

}  // namespace

std::string reentrant_node(const torch::autograd::edge_list& outputs) {
  Reach reach({});
  reach.visit(outputs);
  for (const Node* const node : reach.nodes())
    if (is_reentrant(*node)) return node->name();
  return "";
}

SplitBackward::SplitBackward(Edges outputs, const std::vector<at::Tensor>& inputs) : outputs_(std::move(outputs)) {
  for (const at::Tensor& input : inputs) inputs_.push_back(torch::autograd::impl::gradient_edge(input));
}

std::vector<at::Tensor> SplitBackward::input_gradients(const std::vector<at::Tensor>& output_gradients) {
  Reach reach(inputs_);
  reach.visit(outputs_);
  for (Node* const seen : reach.nodes()) {
    Fork fork{hold_node(*seen), {}, std::make_shared<std::vector<at::Tensor>>()};
    bool leads_aside = false;
    for (size_t i = 0; i < seen->next_edges().size(); ++i) {
      const Edge& edge = seen->next_edges()[i];
      if (!edge.function) continue;
      if (reach.to_input(edge))
        fork.to_inputs.push_back(i);
      else
        leads_aside |= reach.to_weight(edge);
    }
    if (fork.to_inputs.empty() || !leads_aside) continue;
    fork.node->add_pre_hook(std::make_unique<Keep>(fork.gradients));
    forks_.push_back(std::move(fork));
  }
  Edges roots;
  std::vector<at::Tensor> gradients;
  for (size_t i = 0; i < outputs_.size(); ++i) {
    const bool to_input = reach.to_input(outputs_[i]);
    (to_input ? roots : rest_.from).push_back(outputs_[i]);
    (to_input ? gradients : rest_.gradients).push_back(output_gradients[i]);
  }
  outputs_.clear();
  if (roots.empty()) return std::vector<at::Tensor>(inputs_.size());
  return torch::autograd::Engine::get_default_engine().execute(roots, gradients, /*keep_graph=*/true,
                                                               /*create_graph=*/false, /*accumulate_grad=*/false,
                                                               inputs_);
}

SplitBackward::Rest SplitBackward::rest() {
  Rest rest = std::exchange(rest_, {});
  for (Fork& fork : forks_) {
    for (const size_t i : fork.to_inputs) fork.node->next_edges()[i] = Edge();
    fork.node->tensor_pre_hooks().clear();  // the kept gradients have been through them
    for (size_t i = 0; i < fork.gradients->size(); ++i) {
      if (!(*fork.gradients)[i].defined()) continue;
      rest.from.emplace_back(fork.node, static_cast<uint32_t>(i));
      rest.gradients.push_back((*fork.gradients)[i]);
    }
  }
  forks_.clear();
  return rest;
}

}  // namespace trireme
