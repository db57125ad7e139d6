#include "recompute/save_hooks.h"

#include <algorithm>
#include <atomic>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "trireme/base/torch/engine.h"
#include "trireme/recompute/rank_thread.h"

namespace trireme::detail {
namespace {

using torch::autograd::Engine;

thread_local SaveScope* innermost = nullptr;
std::atomic<uint64_t> serials = 0;
/// Scopes after this one are not asked.
thread_local uint64_t last_asked = std::numeric_limits<uint64_t>::max();

/// libtorch offers saved-tensor hooks to C++ through its engine only.
class HookingEngine final : public ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    auto hooks = SaveScope::hooks();
    return hooks != nullptr ? std::move(hooks) : ForwardingEngine::get_default_saved_variable_hooks();
  }
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

using HookStack = decltype(at::impl::SavedTensorDefaultHooksTLS::stack);

/// Libtorch's hooks of this thread.
size_t hook_count() { return at::SavedTensorDefaultHooks::get_tls_state().stack.size(); }

std::vector<HookStack::value_type> top_first(HookStack stack) {
  std::vector<HookStack::value_type> hooks;
  for (; !stack.empty(); stack.pop()) hooks.push_back(stack.top());
  return hooks;
}

/// The hooks at the bottom that are the same in both.
HookStack common_hooks(const HookStack& one, const HookStack& other) {
  const auto object = [](const HookStack::value_type& hooks) { return hooks.first.ptr(&hooks.first.pyinterpreter()); };
  const auto some = top_first(one), others = top_first(other);
  HookStack common;
  for (auto mine = some.rbegin(), theirs = others.rbegin(); mine != some.rend() && theirs != others.rend();
       ++mine, ++theirs) {
    if (object(*mine) != object(*theirs)) break;
    common.push(*mine);
  }
  return common;
}

}  // namespace

SaveScope* SaveScope::of_this_thread() noexcept { return innermost; }
void SaveScope::decide_here(SaveScope* scope) noexcept { innermost = scope; }

SaveScope::SaveScope(SavePolicy& policy)
    : policy_(policy), outer_(innermost), serial_(++serials), hooks_around_(hook_count()) {
  install();
  innermost = this;
}

SaveScope::~SaveScope() {
  SaveScope** link = &innermost;
  while (*link != this) link = &(*link)->outer_;
  *link = outer_;
}

std::unique_ptr<torch::autograd::SavedVariableHooks> SaveScope::hooks() {
  const size_t hooks_now = hook_count();
  for (const SaveScope* scope = innermost; scope != nullptr; scope = scope->outer_) {
    if (scope->serial_ > last_asked) continue;
    if (hooks_now > scope->hooks_around_) return nullptr;
    if (auto hooks = scope->policy_.hooks()) return hooks;
  }
  return nullptr;
}

bool SaveScope::reaches(const SavePolicy& policy) noexcept {
  const SaveScope* scope = innermost;
  while (scope != nullptr && &scope->policy_ != &policy && scope->policy_.may_decline()) scope = scope->outer_;
  return scope != nullptr && &scope->policy_ == &policy && hook_count() <= scope->hooks_around_;
}

SaveMoment::SaveMoment() : hooks_(at::SavedTensorDefaultHooks::get_tls_state()), last_(serials) {}

bool SaveMoment::has_later() const {
  const HookStack& present = at::SavedTensorDefaultHooks::get_tls_state().stack;
  if (!present.empty() && common_hooks(present, hooks_.stack).size() < present.size()) return true;
  const SaveScope* scope = innermost;
  while (scope != nullptr && (scope->serial_ <= last_ || scope->policy_.may_decline())) scope = scope->outer_;
  return scope != nullptr;
}

SaveMoment::Scope::Scope(const SaveMoment& moment)
    : outer_hooks_(at::SavedTensorDefaultHooks::get_tls_state()),
      outer_last_(std::exchange(last_asked, std::min(last_asked, moment.last_))) {
  if (outer_hooks_.stack.empty()) return;
  at::impl::SavedTensorDefaultHooksTLS common = outer_hooks_;
  common.stack = common_hooks(outer_hooks_.stack, moment.hooks_.stack);
  at::SavedTensorDefaultHooks::set_tls_state(common);
}

SaveMoment::Scope::~Scope() {
  at::SavedTensorDefaultHooks::set_tls_state(outer_hooks_);
  last_asked = outer_last_;
}

}  // namespace trireme::detail

namespace trireme {

RankSaves::RankSaves() : innermost_(detail::SaveScope::of_this_thread()) {}
RankSaves::Scope::Scope(const RankSaves& saves) { detail::SaveScope::decide_here(saves.innermost_); }
RankSaves::Scope::~Scope() { detail::SaveScope::decide_here(nullptr); }

}  // namespace trireme
