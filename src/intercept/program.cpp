#include "trireme/intercept/program.h"

#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <memory>
#include <string>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>

namespace trireme {
namespace {

/// The owner of this thread's code in one backward pass: another one may begin inside of it.
struct Marked {
  int task = -1;
  bool is_program = false;
};
constinit thread_local Marked marked;

class OfOperator final : public torch::autograd::FunctionPreHook {
 public:
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    return gradients;
  }
};

bool is_operators(torch::autograd::Node& node) {
  return std::ranges::any_of(node.pre_hooks(),
                             [](const auto& hook) { return dynamic_cast<const OfOperator*>(hook.get()) != nullptr; });
}

}  // namespace

void mark_operators(torch::autograd::Node& node) {
  if (!is_operators(node)) node.add_pre_hook(std::make_unique<OfOperator>());
}

bool is_function(const torch::autograd::Node& node) {
  static thread_local std::unordered_map<std::type_index, bool> known;
  const auto [found, is_new] = known.try_emplace(typeid(node), false);
  if (is_new) {
    const std::string name = c10::demangle(typeid(node).name());
    found->second = name.starts_with("torch::autograd::CppNode<") || name == "torch::autograd::PyNode";
  }
  return found->second;
}

bool program_runs_in_backward() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == -1) return false;
  if (marked.task == task) return marked.is_program;
  const auto node = torch::autograd::get_current_node();
  return node != nullptr && is_function(*node) && !is_operators(*node);
}

ProgramScope::ProgramScope(Whose whose) : outer_task_(marked.task), outer_is_program_(marked.is_program) {
  marked = {.task = torch::autograd::get_current_graph_task_id(), .is_program = whose == Whose::kProgram};
}
ProgramScope::~ProgramScope() { marked = {.task = outer_task_, .is_program = outer_is_program_}; }

}  // namespace trireme
