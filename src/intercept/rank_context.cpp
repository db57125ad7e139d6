#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string_view>

#include "intercept/transforms.h"
#include "trireme/base/error.h"
#include "trireme/base/error_hook.h"
#include "trireme/intercept.h"

namespace trireme {
namespace {

// ThreadLocalState, which autograd hands from the thread that calls backward to its helpers, carries this slot along.
constexpr c10::DebugInfoKind kSlot = c10::DebugInfoKind::TEST_INFO_2;

struct ContextSlot final : c10::DebugInfoBase {
  explicit ContextSlot(RankContext* rank_context) : context(rank_context) {}
  RankContext* context;
};

thread_local RankContext* this_context = nullptr;

// Draws swap the state of libtorch's one default generator, so ranks that are threads take turns.
std::mutex default_generator_mutex;

void intercept(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Only top-level operators are of interest, unless a pass opens one; what they call inside goes straight to libtorch.
  c10::impl::ExcludeDispatchKeyGuard guard(kInterceptKey);
  const c10::DispatchKeySet rest = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kInterceptKey);
  RankContext* context = RankContext::current();
  if (context == nullptr) return op.redispatchBoxed(rest, stack);
  run_below_libtorch([&] { context->call(op, rest, stack); });
}

bool writes_without_reading(std::string_view name) {
  return name == "aten::normal_" || name == "aten::uniform_" || name == "aten::zero_" || name == "aten::fill_";
}

struct Touch {
  ManagedStorage* storage;
  Access access;
  std::shared_ptr<ManagedStorage> written;  // held: the operator may give the tensor another storage (resize_, out=)
};
using Touches = c10::SmallVector<Touch, 8>;

void look(const at::Tensor& tensor, bool written, bool overwrites, Touches& touches) {
  if (!tensor.defined()) return;
  // Null in sparse and other tensors without a storage; asking them costs a virtual call.
  c10::StorageImpl* const held = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (held == nullptr) {
    const at::Tensor& inner = under_transforms(tensor);
    if (!inner.is_same(tensor)) look(inner, written, /*overwrites=*/false, touches);
    return;
  }
  c10::StorageImpl& storage = *held;
  ManagedStorage* owner = StorageHandle::owner_of(storage);
  if (owner == nullptr) return;
  Access access = Access::kRead;
  if (written) {
    const bool whole = overwrites && tensor.is_non_overlapping_and_dense() && tensor.nbytes() == storage.nbytes();
    access = whole ? Access::kOverwrite : Access::kWrite;
  }
  touches.push_back({owner, access, written ? StorageHandle::share_owner_of(storage) : nullptr});
}

void look_at_arguments(const OperatorCall& call, bool reads_too, Touches& touches) {
  const auto arguments = torch::jit::last(call.stack, call.traits.arguments);
  for (uint32_t i = 0; i < call.traits.arguments; ++i) {
    const bool written = i < 64 && (call.traits.written >> i & 1);
    if (!written && !reads_too) continue;
    for_each_tensor(arguments[i],
                    [&](const at::Tensor& tensor) { look(tensor, written, call.traits.overwrites, touches); });
  }
}

// Tells the owners of written storages afterwards, also when the operator throws half-way.
class [[nodiscard]] WriteScope {
 public:
  explicit WriteScope(const Touches& touches) : touches_(touches) {}
  ~WriteScope() {
    for (const Touch& touch : touches_)
      if (touch.access != Access::kRead) touch.storage->after_write();
  }
  WriteScope(const WriteScope&) = delete;
  WriteScope& operator=(const WriteScope&) = delete;

 private:
  const Touches& touches_;
};

// While it lives, operators that the running one calls are intercepted.
class [[nodiscard]] SeenInside {
 public:
  explicit SeenInside(int& depth) : depth_(depth) {
    ++depth_;
    c10::impl::tls_set_dispatch_key_excluded(kInterceptKey, false);
  }
  ~SeenInside() {
    --depth_;
    c10::impl::tls_set_dispatch_key_excluded(kInterceptKey, true);
  }
  SeenInside(const SeenInside&) = delete;
  SeenInside& operator=(const SeenInside&) = delete;

 private:
  int& depth_;
};

// Proves once per process that the key reaches our fallback: libtorch may move or rename a key that is meant for its
// tests.
void verify_interception(const RankContext& context) {
  static const bool works = [&context] {
    const uint64_t before = context.serial();
    at::add(at::zeros({1}), at::zeros({1}));
    return context.serial() == before + 3;
  }();
  if (!works)
    throw Error(ErrorCode::kUnsupported,
                "this libtorch does not let operators be intercepted through DispatchKey::TESTING_ONLY_GenericMode; "
                "Trireme is tested with torch 2.11");
}

}  // namespace

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}

RankContext* RankContext::current() noexcept {
  if (this_context != nullptr) return this_context;
  auto* slot = static_cast<ContextSlot*>(c10::ThreadLocalDebugInfo::get(kSlot));
  return slot != nullptr ? slot->context : nullptr;
}

RankContext& RankContext::of_this_thread() {
  thread_local RankContext context;
  this_context = &context;
  return context;
}

void RankContext::use_own_generator(uint64_t seed) { generator_ = at::detail::createCPUGenerator(seed); }

const OperatorTraits& RankContext::traits_of(const c10::OperatorHandle& op) {
  if (const auto found = traits_.find(op); found != traits_.end()) return found->second;
  OperatorTraits traits;
  const c10::FunctionSchema& schema = op.schema();
  traits.arguments = static_cast<uint32_t>(schema.arguments().size());
  for (size_t i = 0; i < schema.arguments().size() && i < 64; ++i) {
    const c10::AliasInfo* alias = schema.arguments()[i].alias_info();
    if (alias != nullptr && alias->isWrite()) traits.written |= uint64_t{1} << i;
  }
  // fill_(p, value) may read a view of p as its value.
  const auto is_tensor = [](const c10::Argument& argument) {
    return argument.type()->kind() == c10::TypeKind::TensorType;
  };
  traits.overwrites = writes_without_reading(schema.name()) &&
                      std::count_if(schema.arguments().begin(), schema.arguments().end(), is_tensor) == 1;
  traits.random = op.hasTag(at::Tag::nondeterministic_seeded);
  traits.composite = op.hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  return traits_.emplace(op, traits).first->second;
}

void RankContext::call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Owners keep what the running operator touched until the serial number grows.
  if (depth_ == 0) ++serial_;
  // A copy: a pass or an owner may call operators, and the table may move.
  const OperatorTraits traits = traits_of(op);
  OperatorCall call{op, keys, traits, *stack, depth_};
  if (read_scopes_ == 0 && traits.written == 0 && passes_.empty()) return run(call);

  Touches touches;
  if (read_scopes_ > 0 || traits.written != 0) look_at_arguments(call, read_scopes_ > 0, touches);
  if (!touches.empty()) {
    const OutsideOfTransforms outside;
    for (const Touch& touch : touches) touch.storage->before_access(touch.access);
  }
  for (Pass* pass : passes_) pass->before(call);
  {
    WriteScope scope(touches);
    run(call);
  }
  for (auto pass = passes_.rbegin(); pass != passes_.rend(); ++pass) (*pass)->after(call);
}

void RankContext::run(OperatorCall& call) {
  if (call.traits.random && generator_.defined()) return run_with_own_generator(call);
  if (call.open && !call.traits.random) return run_open(call);
  call.op.redispatchBoxed(call.keys, &call.stack);
}

void RankContext::run_open(OperatorCall& call) {
  const SeenInside inside(depth_);
  call.op.redispatchBoxed(call.keys, &call.stack);
}

// Composite operators (dropout, randn) have no generator argument to fill in, so the default generator takes on this
// rank's state while the operator runs.
void RankContext::run_with_own_generator(OperatorCall& call) {
  std::lock_guard lock(default_generator_mutex);
  at::Generator shared = at::detail::getDefaultCPUGenerator();
  const at::Tensor kept = shared.get_state();
  shared.set_state(generator_.get_state());
  struct Restore {
    at::Generator& shared;
    at::Generator& own;
    const at::Tensor& kept;
    ~Restore() {
      own.set_state(shared.get_state());
      shared.set_state(kept);
    }
  } restore{shared, generator_, kept};
  call.op.redispatchBoxed(call.keys, &call.stack);
}

void manual_seed(uint64_t seed) {
  RankContext* context = RankContext::current();
  if (context != nullptr && context->has_own_generator()) return context->use_own_generator(seed);
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard lock(generator.mutex());
  generator.set_current_seed(seed);
}

InterceptScope::InterceptScope(Watch watch, Pass* pass)
    : context_(RankContext::of_this_thread()), watch_(watch), pass_(pass) {
  enter();
  try {
    verify_interception(context_);
  } catch (...) {
    leave();
    throw;
  }
}

InterceptScope::~InterceptScope() { leave(); }

void InterceptScope::enter() {
  if (context_.scopes_++ == 0) {
    c10::ThreadLocalDebugInfo::_push(kSlot, std::make_shared<ContextSlot>(&context_));
    c10::impl::tls_set_dispatch_key_included(kInterceptKey, true);
  }
  if (watch_ == Watch::kAll) ++context_.read_scopes_;
  if (pass_ != nullptr) context_.passes_.push_back(pass_);
}

void InterceptScope::leave() noexcept {
  auto& passes = context_.passes_;
  if (pass_ != nullptr) passes.erase(std::find(passes.rbegin(), passes.rend(), pass_).base() - 1);
  if (watch_ == Watch::kAll) --context_.read_scopes_;
  if (--context_.scopes_ > 0) return;
  c10::impl::tls_set_dispatch_key_included(kInterceptKey, false);
  try {
    c10::ThreadLocalDebugInfo::_pop(kSlot);
  } catch (const std::exception&) {
    // Somebody pushed a slot above ours and has not popped it yet. Ours stays below it: harmless, as the context
    // outlives the thread's scopes and nothing is intercepted any more.
  }
}

}  // namespace trireme
