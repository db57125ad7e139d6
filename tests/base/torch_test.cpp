// Parts that depend on libtorch's version.
#include <ATen/Parallel.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_lazy_clone.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <regex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "trireme/base/error.h"
#include "trireme/base/torch/autograd_metadata.h"
#include "trireme/base/torch/carried.h"
#include "trireme/base/torch/engine.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/base/torch/storage.h"
#include "trireme/base/torch/variable_hooks.h"

namespace trireme {
namespace {

using c10::DebugInfoGuard;
using c10::DebugInfoKind;
using c10::ThreadLocalDebugInfo;

struct Luggage final : Carried {};

/// The state that a thread finds which works for this one, as autograd's helpers do.
Carried* carried_by_a_helper() {
  Carried* found = nullptr;
  std::thread([&, state = at::ThreadLocalState()] {
    const at::ThreadLocalStateGuard guard(state);
    found = carried();
  }).join();
  return found;
}

class Carrying : public ::testing::Test {
 protected:
  ~Carrying() override { carry(nullptr); }
  const std::shared_ptr<Luggage> luggage = std::make_shared<Luggage>();
  const std::shared_ptr<Luggage> profiler = std::make_shared<Luggage>();
};

TEST_F(Carrying, IsForThisThreadAndThoseThatWorkForIt) {
  EXPECT_EQ(carried(), nullptr);
  carry(luggage);
  EXPECT_EQ(carried(), luggage.get());
  EXPECT_EQ(carried_by_a_helper(), luggage.get());
  Carried* elsewhere = luggage.get();
  std::thread([&] { elsewhere = carried(); }).join();
  EXPECT_EQ(elsewhere, nullptr);
  carry(nullptr);
  EXPECT_EQ(carried(), nullptr);
  EXPECT_EQ(carried_by_a_helper(), nullptr);
  EXPECT_EQ(luggage.use_count(), 1);
}

TEST_F(Carrying, AnotherTakesThePlaceOfTheFirst) {
  carry(luggage);
  carry(profiler);
  EXPECT_EQ(carried(), profiler.get());
  EXPECT_EQ(luggage.use_count(), 1);
}

TEST_F(Carrying, LiesBelowWhatIsThereSoThatAProfilerMayEndAtAnyTime) {
  const auto producer = std::make_shared<Luggage>();
  ThreadLocalDebugInfo::_push(DebugInfoKind::PRODUCER_INFO, producer);
  ThreadLocalDebugInfo::_push(DebugInfoKind::PROFILER_STATE, profiler);
  carry(luggage);
  EXPECT_EQ(carried_by_a_helper(), luggage.get());
  EXPECT_EQ(ThreadLocalDebugInfo::get(DebugInfoKind::PRODUCER_INFO), producer.get());
  EXPECT_EQ(ThreadLocalDebugInfo::_pop(DebugInfoKind::PROFILER_STATE), profiler);
  EXPECT_EQ(carried(), luggage.get());
  ThreadLocalDebugInfo::_push(DebugInfoKind::PROFILER_STATE, profiler);
  carry(nullptr);
  EXPECT_EQ(carried(), nullptr);
  EXPECT_EQ(ThreadLocalDebugInfo::_pop(DebugInfoKind::PROFILER_STATE), profiler);
  EXPECT_EQ(ThreadLocalDebugInfo::_pop(DebugInfoKind::PRODUCER_INFO), producer);
  EXPECT_EQ(ThreadLocalDebugInfo::current(), nullptr);
}

TEST_F(Carrying, LeavesEveryKindOfLibtorchsAlone) {
  for (const DebugInfoKind kind :
       {DebugInfoKind::PRODUCER_INFO, DebugInfoKind::MOBILE_RUNTIME_INFO, DebugInfoKind::PROFILER_STATE,
        DebugInfoKind::INFERENCE_CONTEXT, DebugInfoKind::PARAM_COMMS_INFO, DebugInfoKind::TEST_INFO,
        DebugInfoKind::TEST_INFO_2}) {
    carry(luggage);
    EXPECT_EQ(ThreadLocalDebugInfo::get(kind), nullptr);
    {
      const DebugInfoGuard guard(kind, profiler);
      EXPECT_EQ(carried(), luggage.get());
      EXPECT_EQ(ThreadLocalDebugInfo::get(kind), profiler.get());
    }
    EXPECT_EQ(carried(), luggage.get());
  }
}

/// Doubles the gradient.
struct Twice final : torch::autograd::Node {
  explicit Twice(bool& ended) : ended_(ended) {}
  ~Twice() override { ended_ = true; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    return {gradients[0].mul(2)};
  }
  bool& ended_;
};

TEST(Nodes, TakePartInBackwardAndEndWithTheGraph) {
  bool ended = false;
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  at::Tensor value = leaf.detach();
  {
    const NodePtr node = make_node<Twice>(ended);
    node->set_next_edges(torch::autograd::collect_next_edges(leaf));
    torch::autograd::set_history(value, node);
  }
  EXPECT_FALSE(ended);
  value.sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({2}, 2.f)));
  value = at::Tensor();
  EXPECT_TRUE(ended);
}

TEST(Nodes, AreHeldBeyondTheirGraph) {
  bool ended = false;
  NodePtr node = make_node<Twice>(ended);
  NodePtr held = hold_node(*node);
  EXPECT_EQ(held.get(), node.get());
  node = nullptr;
  EXPECT_FALSE(ended);
  held = nullptr;
  EXPECT_TRUE(ended);
}

TEST(Nodes, InALongChainAreFreedWithoutADeepStack) {
  bool ended = false;
  NodePtr last = make_node<Twice>(ended);
  for (int i = 0; i < 1'000'000; ++i) {
    NodePtr next = make_node<Twice>(ended);
    next->set_next_edges({{std::move(last), 0}});
    last = std::move(next);
  }
  ended = false;
  last = nullptr;
  EXPECT_TRUE(ended);
}

TEST(AStorage, WhoseDataAreReplacedIsWrittenWhereTheyLie) {
  const at::Tensor original = at::ones({2});
  const at::Tensor clone = original._lazy_clone();
  at::Tensor memory = at::full({2}, 5.f);
  replace_data(*clone.storage().unsafeGetStorageImpl(), {memory.data_ptr(), at::kCPU});
  clone.add_(1);
  EXPECT_TRUE(at::equal(memory, at::full({2}, 6.f)));
  EXPECT_TRUE(at::equal(original, at::ones({2})));
}

TEST(AStorage, ThatWasToldToThrowIsReadAgain) {
  at::Tensor memory = at::full({2}, 5.f);
  const at::Tensor tensor = at::ones({2});
  c10::StorageImpl& storage = *tensor.storage().unsafeGetStorageImpl();
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_("gone");
  EXPECT_THROW(tensor.data_ptr(), c10::Error);
  replace_data(storage, {memory.data_ptr(), at::kCPU});
  EXPECT_EQ(tensor.data_ptr(), memory.data_ptr());
}

/// The header `name` of the libtorch that is loaded.
std::string header(const std::string& name) {
  Dl_info library;
  EXPECT_NE(dladdr(reinterpret_cast<const void*>(&at::get_num_threads), &library), 0);
  const auto path = std::filesystem::path(library.dli_fname).parent_path() / "../include" / name;
  std::ifstream file(path);
  EXPECT_TRUE(file) << path;
  return {std::istreambuf_iterator<char>(file), {}};
}

TEST(ForwardingEngine, KnowsEveryVirtualFunctionOfLibtorchsEngine) {
  const std::set<std::string> forwarded = {"execute", "execute_with_graph_task", "make_anomaly_metadata",
                                           "get_default_saved_variable_hooks", "get_node_creation_hooks"};
  // An engine calls these on itself.
  const std::set<std::string> own = {"Engine", "thread_on_exception", "thread_init", "thread_main"};
  const std::string text = header("torch/csrc/autograd/engine.h");
  const std::regex function(R"(virtual\s[^;{]*?(\w+)\()");
  int found = 0;
  for (std::sregex_iterator at(text.begin(), text.end(), function), end; at != end; ++at, ++found) {
    const std::string name = (*at)[1];
    EXPECT_TRUE(forwarded.contains(name) || own.contains(name)) << name << "() is not handed on";
  }
  EXPECT_GE(found, 8);
}

/// Answers where the base class does not.
class Answering final : public ForwardingEngine {
 public:
  Answering() : ForwardingEngine(torch::autograd::Engine::get_default_engine()) {}
  torch::autograd::variable_list execute(const torch::autograd::edge_list&, const torch::autograd::variable_list&, bool,
                                         bool, bool, const torch::autograd::edge_list&) override {
    return {at::full({1}, 7.f)};
  }
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks() override {
    return std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>>(3);
  }
#endif
};

TEST(ForwardingEngine, GivesTheAnswersOfTheEngineBehindIt) {
  Answering real;
  ForwardingEngine engine(static_cast<torch::autograd::Engine&>(real));
  EXPECT_EQ(engine.execute({}, {}, false, false, false, {}).at(0).item<float>(), 7);
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  EXPECT_EQ(engine.get_node_creation_hooks().size(), 3u);
#endif
}

TEST(AutogradMetadata, AreOneForTwoTensors) {
  at::Tensor owner = at::ones({2}).requires_grad_();
  at::Tensor other = at::ones({2});
  const at::Tensor loss = (owner * 3).sum();
  share_autograd_metadata(*owner.unsafeGetTensorImpl(), *other.unsafeGetTensorImpl());
  EXPECT_TRUE(other.requires_grad());
  loss.backward();
  EXPECT_TRUE(at::equal(other.grad(), at::full({2}, 3.f)));
  other.set_requires_grad(false);
  EXPECT_FALSE(owner.requires_grad());
  EXPECT_THROW(share_autograd_metadata(*owner.unsafeGetTensorImpl(), *other.unsafeGetTensorImpl()), Error);
  forget_autograd_metadata(*other.unsafeGetTensorImpl());
  EXPECT_FALSE(other.grad().defined());
  EXPECT_TRUE(owner.grad().defined());
  move_autograd_metadata(*owner.unsafeGetTensorImpl(), *other.unsafeGetTensorImpl());
  EXPECT_FALSE(owner.grad().defined());
  EXPECT_TRUE(other.grad().defined());
}

TEST(ForwardingVariableHooks, GiveTheAnswersOfTheHooksBehindThem) {
  struct Counting final : ForwardingVariableHooks {
    using ForwardingVariableHooks::ForwardingVariableHooks;
    const NodePtr& grad_fn(const Base& self) const override {
      ++asked;
      return ForwardingVariableHooks::grad_fn(self);
    }
    mutable int asked = 0;
  };
  at::impl::VariableHooksInterface* const real = at::impl::GetVariableHooks();
  Counting hooks(*real);
  at::impl::SetVariableHooks(&hooks);
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  at::Tensor x = leaf * 2;
  const int before = hooks.asked;
  EXPECT_GT(before, 0);  // by the edge to the leaf
  EXPECT_NE(x.grad_fn(), nullptr);
  EXPECT_EQ(hooks.asked, before + 1);
  EXPECT_FALSE(x.is_leaf());
  EXPECT_EQ(x.output_nr(), 0);
  EXPECT_EQ(x._version(), 0);
  EXPECT_EQ(x.name(), "");
  x.retain_grad();
  EXPECT_TRUE(x.retains_grad());
  EXPECT_FALSE(x.is_view());
  const at::Tensor view = x.view({1, 2});
  EXPECT_TRUE(view.is_view());
  EXPECT_TRUE(view._base().is_same(x));
  x.remove_hook(x.register_hook([](const at::Tensor& gradient) { return gradient * 100; }));
  x.register_hook([](const at::Tensor& gradient) { return gradient * 5; });
  at::Tensor(view).sum().backward();
  EXPECT_TRUE(at::equal(leaf.grad(), at::full({2}, 10.f)));
  EXPECT_TRUE(at::equal(x.data(), at::full({2}, 2.f)));
  EXPECT_TRUE(at::equal(x.variable_data(), x.tensor_data()));
  leaf.set_data(at::full({2}, 7.f));
  EXPECT_TRUE(at::equal(leaf, at::full({2}, 7.f)));
  leaf.detach().requires_grad_(false);
  EXPECT_EQ(hooks.grad_dtype(leaf), at::kFloat);
  at::impl::SetVariableHooks(real);
}

}  // namespace
}  // namespace trireme
