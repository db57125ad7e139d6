// The cost of an operator where stages own parts of an unmodified model: of one whose result is a tensor without
// memory, one that this stage computes, one that every stage computes.
//
// There is no such pass yet. This one has the parts that cost time: a home for each storage, a key of the call, results
// that are told once and found by the key, tensors without bytes and their nodes of autograd. It exchanges nothing.
#include <ATen/EmptyTensor.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/scaled_dot_product_attention.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdio>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "benchmarks/flags.h"
#include "benchmarks/times.h"
#include "trireme/base/error.h"
#include "trireme/base/mix64.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/intercept.h"
#include "trireme/intercept/storage_table.h"

namespace {

using namespace trireme;
using benchmarks::ns_per_call;
using benchmarks::print;
using benchmarks::Times;
using torch::jit::Stack;

constexpr int kOwnStage = 0;
constexpr int kOtherStage = 1;

/// Where a tensor's numbers are.
struct Home {
  int stage = kOwnStage;
  bool is_parameter = false;
  uint64_t born = 0;
};

/// The storage of a tensor that is on another stage.
class RemoteStorage final : public ManagedStorage {
 public:
  explicit RemoteStorage(const Home& home) : home_(home) {}
  const Home& home() const { return home_; }
  void before_access(Access) override { throw StateError("a tensor of another stage was touched"); }

 private:
  const Home home_;
};

/// Makes a shadow's grad_fn right; it never runs.
class StubNode final : public torch::autograd::Node {
 public:
  using Node::Node;
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    return torch::autograd::variable_list(num_outputs());
  }
};

/// One tensor among the results, as it is told.
struct Told {
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype;
  bool requires_grad;
};

/// The results of a call, as they are told.
struct ToldCall {
  std::optional<size_t> is_argument;  ///< the result is this tensor among the arguments
  bool is_view = false;               ///< the results share an argument's memory
  std::vector<bool> is_list;          ///< of each return
  std::vector<std::vector<Told>> results;
};

struct Key {
  uint64_t first = 0, second = 0;
  bool operator==(const Key&) const = default;
};
struct KeyHash {
  size_t operator()(const Key& key) const { return key.first; }
};

/// 128 bits of an operator and what it was called with, numbers in tensors aside.
class KeyMaker {
 public:
  void add(uint64_t value) {
    key_.first = mix64(key_.first ^ value);
    key_.second = std::rotl(key_.second, 23) * 0x9e3779b97f4a7c15 + value;
  }
  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) return add(~uint64_t{0});
    add(static_cast<uint64_t>(tensor.dim()) << 32 | static_cast<uint64_t>(tensor.scalar_type()) << 1 |
        static_cast<uint64_t>(tensor.requires_grad()));
    for (const int64_t size : tensor.sizes()) add(static_cast<uint64_t>(size));
    for (const int64_t stride : tensor.strides()) add(static_cast<uint64_t>(stride));
  }
  void add(const c10::IValue& value) {
    if (value.isTensor()) return add(value.toTensor());
    if (value.isInt()) return add(static_cast<uint64_t>(value.toInt()));
    if (value.isDouble()) return add(std::bit_cast<uint64_t>(value.toDouble()));
    if (value.isBool()) return add(static_cast<uint64_t>(value.toBool()));
    if (value.isNone()) return add(uint64_t{0x6e6f6e65});
    if (value.isIntList()) {
      for (const int64_t number : value.toIntList()) add(static_cast<uint64_t>(number));
      return;
    }
    if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorList()) add(tensor);
      return;
    }
    throw Error(ErrorCode::kUnsupported, "ownership_bench: an argument of type " + value.tagKind());
  }
  const Key& key() const { return key_; }

 private:
  Key key_;
};

Key key_of(const OperatorCall& call) {
  KeyMaker maker;
  maker.add(reinterpret_cast<uint64_t>(&call.op.schema()));
  maker.add(static_cast<uint64_t>(at::GradMode::is_enabled()));
  for (const c10::IValue& argument : call.arguments()) maker.add(argument);
  return maker.key();
}

at::Tensor make_shadow(const Told& told, c10::Device device, const Home& home) {
  const size_t bytes = at::detail::computeStorageNbytes(told.sizes, told.strides, c10::elementSize(told.dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), nullptr, false);
  StorageHandle::release(*storage.unsafeGetStorageImpl(), std::make_shared<RemoteStorage>(home),
                         "this tensor is on another stage");
  at::Tensor shadow = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::computeDispatchKey(told.dtype, at::kStrided, device)),
      c10::scalarTypeToTypeMeta(told.dtype));
  shadow.unsafeGetTensorImpl()->set_sizes_and_strides(told.sizes, told.strides);
  return shadow;
}

/// `call`'s arguments with another tensor in place of each.
template <class Replace>
Stack with_tensors(const OperatorCall& call, const Replace& replace) {
  Stack stack;
  for (const c10::IValue& argument : call.arguments()) {
    if (argument.isTensor() && argument.toTensor().defined()) {
      stack.emplace_back(replace(argument.toTensor()));
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : argument.toTensorList()) list.push_back(replace(tensor));
      stack.emplace_back(std::move(list));
    } else {
      stack.push_back(argument);
    }
  }
  return stack;
}

Told told_of(const at::Tensor& tensor) {
  return {tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type(), tensor.requires_grad()};
}

/// The value that is told of a call with `arguments` that had `results`.
ToldCall told_of(c10::ArrayRef<c10::IValue> arguments, c10::ArrayRef<c10::IValue> results) {
  ToldCall told;
  for (const c10::IValue& result : results) {
    told.is_list.push_back(result.isTensorList());
    std::vector<Told>& tensors = told.results.emplace_back();
    for_each_tensor(result, [&](const at::Tensor& tensor) {
      tensors.push_back(told_of(tensor));
      size_t place = 0;
      for_each_tensor(arguments, [&](const at::Tensor& argument) {
        if (argument.is_same(tensor)) told.is_argument = place;
        if (argument.defined() && argument.is_alias_of(tensor)) told.is_view = true;
        ++place;
      });
    });
  }
  return told;
}

/// How a stage gets to know the sizes of results that another stage has.
enum class Sizes { kToldOnce, kMetaKernels };

class OwnershipPass final : public Pass {
 public:
  PassOrder order() const override { return PassOrder::kOwnership; }

  void run(OperatorCall& call, Next next) override {
    const std::optional<Home> home = home_of(call);
    if (!home) return next(call);
    if (home->stage != kOwnStage) return make_results(call, *home);
    next(call);
    for_each_tensor(call.results(), [&](const at::Tensor& tensor) {
      if (tensor.defined() && homes_.find(tensor.storage().unsafeGetStorageImpl()) == nullptr)
        homes_.set(tensor.storage(), {kOwnStage, false, ++born_});
    });
  }

  void own(const at::Tensor& parameter) { homes_.set(parameter.storage(), {kOwnStage, true, 0}); }

  Sizes sizes = Sizes::kToldOnce;
  int64_t remote = 0;  ///< operators that made shadows
  std::set<std::string> without_meta_kernel;

 private:
  const Home* find(const at::Tensor& tensor) {
    c10::StorageImpl* storage =
        tensor.defined() ? tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl() : nullptr;
    if (storage == nullptr) return nullptr;
    ManagedStorage* owner = StorageHandle::owner_of(*storage);
    if (owner != nullptr && typeid(*owner) == typeid(RemoteStorage)) return &static_cast<RemoteStorage*>(owner)->home();
    return homes_.find(storage);
  }

  /// The home of the written argument, else of the first parameter, else of the one that was born last.
  std::optional<Home> home_of(const OperatorCall& call) {
    const Home* found = nullptr;
    bool is_settled = false;
    const auto arguments = call.arguments();
    for (uint32_t i = 0; i < call.traits.arguments; ++i) {
      const bool is_written = i < 64 && (call.traits.written >> i & 1);
      for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        const Home* home = find(tensor);
        if (home == nullptr || (is_settled && !is_written)) return;
        if (is_written || home->is_parameter || found == nullptr || home->born >= found->born) found = home;
        is_settled = is_settled || is_written || home->is_parameter;
      });
    }
    return found != nullptr ? std::optional(*found) : std::nullopt;
  }

  void make_results(OperatorCall& call, const Home& home) {
    ++remote;
    const ToldCall* told = sizes == Sizes::kMetaKernels ? by_meta_kernel(call) : nullptr;
    if (told == nullptr) {
      const Key key = key_of(call);
      const auto entry = told_.find(key);
      told = &(entry != told_.end() ? entry->second : told_.emplace(key, by_running(call)).first->second);
    }
    // A view of a shadow needs no memory. Not by next(call): the owner of a storage is asked for its bytes there.
    if (told->is_view && !told->is_argument) return call.op.redispatchBoxed(call.keys, &call.stack);
    std::vector<at::Tensor> arguments;
    for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) { arguments.push_back(tensor); });
    torch::jit::drop(call.stack, call.traits.arguments);
    if (told->is_argument) return torch::jit::push(call.stack, arguments[*told->is_argument]);
    NodePtr stub;
    const Home born{home.stage, false, ++born_};
    const auto make = [&](const Told& result) {
      at::Tensor shadow = make_shadow(result, c10::kCPU, born);
      if (result.requires_grad) {
        if (!stub) stub = make_node<StubNode>(torch::autograd::collect_next_edges(arguments));
        torch::autograd::set_history(shadow, stub);
      }
      return shadow;
    };
    for (size_t i = 0; i < told->results.size(); ++i) {
      if (!told->is_list[i]) {
        call.stack.emplace_back(make(told->results[i].front()));
        continue;
      }
      c10::List<at::Tensor> list;
      for (const Told& result : told->results[i]) list.push_back(make(result));
      call.stack.emplace_back(std::move(list));
    }
  }

  /// As the stage that has the numbers would tell it.
  static ToldCall by_running(const OperatorCall& call) {
    const Stack arguments = with_tensors(call, [](const at::Tensor& tensor) {
      const at::Tensor twin = at::zeros({}, tensor.options().requires_grad(false)).expand(tensor.sizes());
      const at::Tensor whole = at::empty_strided(tensor.sizes(), tensor.strides(), twin.options()).copy_(twin);
      return whole.requires_grad_(tensor.requires_grad());
    });
    Stack stack = arguments;
    call.op.callBoxed(stack);
    return told_of(arguments, stack);
  }

  /// Null where the operator has no meta kernel.
  const ToldCall* by_meta_kernel(const OperatorCall& call) {
    const at::NoGradGuard no_grad;
    const Stack arguments = with_tensors(call, [](const at::Tensor& tensor) {
      return at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type());
    });
    Stack stack = arguments;
    try {
      call.op.callBoxed(stack);
    } catch (const c10::Error&) {
      without_meta_kernel.insert(call.op.schema().name());
      return nullptr;
    }
    by_meta_ = told_of(arguments, stack);
    return &by_meta_;
  }

  StorageTable<Home> homes_;
  std::unordered_map<Key, ToldCall, KeyHash> told_;
  ToldCall by_meta_;
  uint64_t born_ = 0;
};

constexpr int64_t kBatch = 2, kTokens = 16, kWidth = 32, kInner = 64, kHeads = 4, kKeyHeads = 2;

/// A layer of Llama, operator by operator as the Transformers library computes it.
struct Layer {
  std::array<at::Tensor, 2> norms;
  at::Tensor query, key, value, output, gate, up, down;
  at::Tensor cos = at::ones({kBatch, kTokens, kWidth / kHeads}), sin = cos.clone();  // every stage has them

  template <class Make>
  explicit Layer(const Make& make)
      : norms{make({kWidth}), make({kWidth})},
        query(make({kWidth, kWidth})),
        key(make({kWidth / kHeads * kKeyHeads, kWidth})),
        value(make({kWidth / kHeads * kKeyHeads, kWidth})),
        output(make({kWidth, kWidth})),
        gate(make({kInner, kWidth})),
        up(make({kInner, kWidth})),
        down(make({kWidth, kInner})) {}

  static at::Tensor norm(const at::Tensor& x, const at::Tensor& weight) {
    const at::Tensor wide = x.to(at::kFloat);
    const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
    return weight * (wide * (variance + 1e-6).rsqrt()).to(x.scalar_type());
  }
  static at::Tensor heads(const at::Tensor& x) {
    return x.view({kBatch, kTokens, -1, kWidth / kHeads}).transpose(1, 2);
  }
  static at::Tensor rotated(const at::Tensor& x, const at::Tensor& cos, const at::Tensor& sin) {
    const int64_t half = kWidth / kHeads / 2;
    return x * cos + at::cat({-x.slice(3, half), x.slice(3, 0, half)}, -1) * sin;
  }
  at::Tensor forward(const at::Tensor& x) const {
    const at::Tensor normed = norm(x, norms[0]);
    const at::Tensor q = heads(at::linear(normed, query)), k = heads(at::linear(normed, key));
    const at::Tensor v = heads(at::linear(normed, value)), cosines = cos.unsqueeze(1), sines = sin.unsqueeze(1);
    const at::Tensor mixed =
        at::scaled_dot_product_attention(rotated(q, cosines, sines), rotated(k, cosines, sines), v, {}, 0.0,
                                         /*is_causal=*/true, std::nullopt, /*enable_gqa=*/true);
    const at::Tensor joined = mixed.transpose(1, 2).reshape({kBatch, kTokens, kWidth}).contiguous();
    const at::Tensor attended = x + at::linear(joined, output);
    const at::Tensor again = norm(attended, norms[1]);
    return attended + at::linear(at::silu(at::linear(again, gate)) * at::linear(again, up), down);
  }
};

constexpr const char* kAbout =
    "what an operator costs, in ns, where stages own parts of a model: remote (its result is a tensor without "
    "memory),\n"
    "own (this stage computes it) and replicated (every stage does). Operators are those of a small layer of Llama, "
    "in\n"
    "C++ on one thread; what Python's call of an operator costs is not in it. Sizes of remote results are found by a\n"
    "key of the call, or told by meta kernels each time. Variants take turns in one run; min and median of the rounds.";

}  // namespace

int main(int argc, char** argv) {
  bool smoke = false;
  benchmarks::Flags("ownership_bench", kAbout)
      .on("--smoke", smoke, "2 rounds of 2 layers in place of 600 of 10: does it work?")
      .parse(argc, argv);
  const int rounds = smoke ? 2 : 600;
  const int calls = smoke ? 2 : 10;  // short rounds: a busy host interrupts few of them
  at::set_num_threads(1);

  OwnershipPass pass;
  const auto ordinary = [](at::IntArrayRef sizes) { return at::ones(sizes).requires_grad_(); };
  const auto owned = [&](at::IntArrayRef sizes) {
    const at::Tensor weight = ordinary(sizes);
    pass.own(weight);
    return weight;
  };
  const auto remote_parameter = [&](at::IntArrayRef sizes) {
    const at::Tensor weight = ordinary(sizes);
    StorageHandle::release(*weight.storage().unsafeGetStorageImpl(),
                           std::make_shared<RemoteStorage>(Home{kOtherStage, true, 0}), "on another stage");
    return weight;
  };
  const Layer plain(ordinary), own(owned), remote(remote_parameter);
  const at::Tensor x = at::ones({kBatch, kTokens, kWidth});

  int64_t operators = 0;
  {
    const InterceptScope scope(InterceptScope::Watch::kWrites);
    const uint64_t before = RankContext::of_this_thread().serial();
    plain.forward(x);
    operators = static_cast<int64_t>(RankContext::of_this_thread().serial() - before);
  }
  const auto per_operator = [&](const Layer& layer, int times) {
    return ns_per_call(times, [&] { layer.forward(x); }) / static_cast<double>(operators);
  };

  Times none{"without interception", {}}, none_grad{"without interception, gradients", {}};
  Times replicated{"replicated", {}}, owns{"own", {}}, owns_grad{"own, gradients", {}};
  Times told{"remote, told once", {}}, told_grad{"remote, told once, gradients", {}};
  Times meta{"remote, by meta kernels", {}};
  for (int round = 0; round < rounds; ++round) {
    {
      const at::NoGradGuard no_grad;
      none.ns.push_back(per_operator(plain, calls));
      const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
      replicated.ns.push_back(per_operator(plain, calls));
      owns.ns.push_back(per_operator(own, calls));
      remote.forward(x);
      told.ns.push_back(per_operator(remote, calls));
      pass.sizes = Sizes::kMetaKernels;
      meta.ns.push_back(per_operator(remote, calls));
      pass.sizes = Sizes::kToldOnce;
    }
    none_grad.ns.push_back(per_operator(plain, calls));
    const InterceptScope scope(InterceptScope::Watch::kWrites, &pass);
    owns_grad.ns.push_back(per_operator(own, calls));
    remote.forward(x);
    told_grad.ns.push_back(per_operator(remote, calls));
  }

  // The parts of a remote operator, each by itself.
  Times shadow{"a shadow", {}}, shadow_stub{"a shadow with a stub node", {}}, entry{"a home of a new storage", {}};
  const Told sizes{{kBatch, kTokens, kWidth}, {kTokens * kWidth, kWidth, 1}, at::kFloat, true};
  StorageTable<Home> table;
  for (int round = 0; round < rounds; ++round) {
    const int many = calls * 50;
    shadow.ns.push_back(ns_per_call(many, [&] { make_shadow(sizes, c10::kCPU, {kOtherStage, false, 1}); }));
    shadow_stub.ns.push_back(ns_per_call(many, [&] {
      at::Tensor made = make_shadow(sizes, c10::kCPU, {kOtherStage, false, 1});
      torch::autograd::set_history(made, make_node<StubNode>(torch::autograd::collect_next_edges(remote.query)));
    }));
    std::vector<c10::Storage> storages;
    for (int i = 0; i < many; ++i)
      storages.emplace_back(c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, c10::kCPU), nullptr, false);
    auto next = storages.begin();
    entry.ns.push_back(ns_per_call(many, [&] { table.set(*next++, {kOwnStage, false, 1}); }));
  }

  std::printf("ns per operator of a layer of %ld operators, one thread, %d rounds of %d  min    median\n",
              static_cast<long>(operators), rounds, calls);
  for (const Times* times : {&none, &replicated, &owns, &told, &meta, &none_grad, &owns_grad, &told_grad})
    print(*times);
  std::printf("parts\n");
  for (const Times* times : {&shadow, &shadow_stub, &entry}) print(*times);
  std::printf("a replicated operator costs %.0f ns more, an own one %.0f (with gradients %.0f); limit 300\n",
              replicated.more_than(none), owns.more_than(none), owns_grad.more_than(none_grad));
  std::printf("a remote operator costs %.0f ns (with gradients %.0f); limit 3000\n", told.median(), told_grad.median());
  std::string lacking;
  for (const std::string& name : pass.without_meta_kernel) lacking += " " + name;
  std::printf("told once in both, for want of a meta kernel in C++:%s\n", lacking.empty() ? " none" : lacking.c_str());
  return 0;
}
