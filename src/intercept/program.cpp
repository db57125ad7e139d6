#include "trireme/intercept/program.h"

#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

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

}  // namespace

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
  return node != nullptr && is_function(*node);
}

ProgramScope::ProgramScope(Whose whose) : outer_task_(marked.task), outer_is_program_(marked.is_program) {
  marked = {.task = torch::autograd::get_current_graph_task_id(), .is_program = whose == Whose::kProgram};
}
ProgramScope::~ProgramScope() { marked = {.task = outer_task_, .is_program = outer_is_program_}; }

}  // namespace trireme
