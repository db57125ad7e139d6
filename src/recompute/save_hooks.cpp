#include "recompute/save_hooks.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/input_buffer.h>

#include <atomic>
#include <mutex>

namespace trireme::detail {
namespace {

using torch::autograd::Engine;

thread_local SaveScope* innermost = nullptr;

/// libtorch offers saved-tensor hooks to C++ through its engine only. This one hands everything else to the engine that
/// was there before (Python's, where Python is).
class HookingEngine final : public Engine {
 public:
  explicit HookingEngine(Engine& real) : real_(real) {}

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    return real_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, std::shared_ptr<torch::autograd::Node> root,
      torch::autograd::InputBuffer&& buffer) override {
    return real_.execute_with_graph_task(task, std::move(root), std::move(buffer));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return real_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto hooks = SaveScope::hooks();
    return hooks != nullptr ? std::move(hooks) : real_.get_default_saved_variable_hooks();
  }

 private:
  Engine& real_;
};

std::atomic<Engine*> installed = nullptr;
Engine& installed_engine() { return *installed.load(); }

// Once per process, and again where somebody (Python, imported late) has put another engine in its place.
void install() {
  static std::mutex mutex;
  Engine& present = Engine::get_default_engine();
  if (&present == installed.load()) return;
  const std::lock_guard lock(mutex);
  if (&Engine::get_default_engine() == installed.load()) return;
  // Never freed: autograd's threads may outlive every static object.
  installed = new HookingEngine(present);
  torch::autograd::set_default_engine_stub(&installed_engine);
}

}  // namespace

SaveScope::SaveScope(SavePolicy& policy) : policy_(policy), outer_(innermost) {
  install();
  innermost = this;
}

SaveScope::~SaveScope() {
  SaveScope** link = &innermost;
  while (*link != this) link = &(*link)->outer_;
  *link = outer_;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> SaveScope::hooks() {
  for (const SaveScope* scope = innermost; scope != nullptr; scope = scope->outer_)
    if (auto hooks = scope->policy_.hooks()) return hooks;
  return nullptr;
}

bool SaveScope::reaches(const SavePolicy& policy) noexcept {
  const SaveScope* scope = innermost;
  while (scope != nullptr && &scope->policy_ != &policy && scope->policy_.may_decline()) scope = scope->outer_;
  return scope != nullptr && &scope->policy_ == &policy;
}

}  // namespace trireme::detail
