#include <ATen/Context.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/ops/add.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <torch/library.h>

#include <algorithm>
#include <mutex>
#include <string_view>

#include "trireme/base/error.h"
#include "trireme/base/error_hook.h"
#include "trireme/base/torch/carried.h"
#include "trireme/intercept.h"
#include "trireme/intercept/program.h"
#include "trireme/intercept/transforms.h"

namespace trireme {
namespace {

/// By which autograd's other threads find the rank of the one that called backward.
struct CarriedContext final : Carried {
  explicit CarriedContext(RankContext* rank_context) : context(rank_context) {}
  RankContext* context;
};

/// Where a thread is, whichever rank it works for.
struct ThreadState {
  RankContext* context = nullptr;  // of its own
  uint64_t serial = 0;             // of the operator that runs
  int depth = 0;
  ChainStart start;
};
constinit thread_local ThreadState this_thread;

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
  const auto arguments = call.arguments();
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

OperatorTraits make_traits(const c10::OperatorHandle& op) {
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
  return traits;
}

// A copy: what runs below may call operators, and the table may move. One for each thread needs no lock.
OperatorTraits traits_of(const c10::OperatorHandle& op) {
  thread_local ska::flat_hash_map<c10::OperatorHandle, OperatorTraits> traits;
  if (const auto found = traits.find(op); found != traits.end()) return found->second;
  return traits.emplace(op, make_traits(op)).first->second;
}

/// The device whose generator an operator draws from: that of its tensors, or the one that a factory is told.
c10::Device device_of(const OperatorCall& call) {
  std::optional<c10::Device> device;
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
    if (!device && tensor.defined()) device = tensor.device();
  });
  for (const c10::IValue& argument : call.arguments())
    if (!device && argument.isDevice()) {
      device = argument.toDevice();
      if (!device->is_meta()) device = at::globalContext().defaultGenerator(*device).device();
    }
  return device.value_or(c10::kCPU);
}

bool has_generator(const OperatorCall& call) {
  return std::ranges::any_of(call.arguments(), [](const c10::IValue& argument) { return argument.isGenerator(); });
}

/// The seed of an operator that is called now. Parts of one that draws by a seed draw by different ones.
std::optional<uint64_t> next_seed(const OperatorTraits& traits, ChainStart& start) {
  if (!start.seed || !traits.random) return start.seed;
  const uint64_t drawn = start.draws++;
  return drawn == 0 ? *start.seed : stream_seed(*start.seed, drawn);
}

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
                "docs/torch.md names the versions that Trireme is tested with");
}

}  // namespace

bool is_inside_of_operator() noexcept { return !this_thread.start.is_first; }

TORCH_LIBRARY_IMPL(_, TESTING_ONLY_GenericMode, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>());
}

RankContext* RankContext::current() noexcept {
  if (this_thread.context != nullptr) return this_thread.context;
  const auto* found = static_cast<CarriedContext*>(carried());
  return found != nullptr ? found->context : nullptr;
}

RankContext& RankContext::to_be() {
  thread_local RankContext context;
  return context;
}

RankContext& RankContext::of_this_thread() {
  if (this_thread.context == nullptr) this_thread.context = &to_be();
  return *this_thread.context;
}

uint64_t RankContext::serial() const { return this_thread.serial; }

void RankContext::call(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  // Owners keep what the running operator touched until the serial number grows.
  if (this_thread.depth == 0) this_thread.serial = ++serials_;
  const OperatorTraits traits = traits_of(op);
  OperatorCall call{.op = op,
                    .keys = keys,
                    .traits = traits,
                    .stack = *stack,
                    .depth = this_thread.depth,
                    .stream = this_thread.start.stream,
                    .seed = next_seed(traits, this_thread.start)};
  run(call, this_thread.start.is_first ? first_ : this_thread.start.link);
}

void RankContext::run(OperatorCall& call, const InterceptScope* link) {
  if (link != nullptr) return link->pass_->run(call, Next(*this, *link));
  if (read_scopes_ == 0 && call.traits.written == 0) return run_kernel(call);
  touch_and_run(call);
}

void RankContext::touch_and_run(OperatorCall& call) {
  Touches touches;
  look_at_arguments(call, read_scopes_ > 0, touches);
  if (!touches.empty()) {
    const OutsideOfTransforms outside;
    for (const Touch& touch : touches) touch.storage->before_access(touch.access);
  }
  const WriteScope scope(touches);
  run_kernel(call);
}

void RankContext::run_kernel(OperatorCall& call) {
  if (call.traits.random) return run_random(call);
  if (call.opener == nullptr) return call.op.redispatchBoxed(call.keys, &call.stack);
  const Next::Inside inside(call, call.opener);
  call.op.redispatchBoxed(call.keys, &call.stack);
}

// Composite operators (dropout, randn) have no generator argument to fill in, so the default generator takes on the
// state of the stream's generator while the operator runs.
void RankContext::run_random(OperatorCall& call) {
  if (call.seed && !has_generator(call)) return run_seeded(call);
  const bool is_slice = call.stream != RandomStream::kModel;
  if (!is_slice && !streams_.has_own_generator()) return call.op.redispatchBoxed(call.keys, &call.stack);
  const c10::Device device = is_slice ? device_of(call) : c10::Device(c10::kCPU);
  if (device.is_meta()) return call.op.redispatchBoxed(call.keys, &call.stack);  // there is nothing to draw
  std::lock_guard lock(default_generator_mutex);
  at::Generator shared = at::globalContext().defaultGenerator(device);
  at::Generator own = streams_.generator(call.stream, device);
  const at::Tensor kept = shared.get_state();
  shared.set_state(own.get_state());
  struct Restore {
    at::Generator& shared;
    at::Generator& own;
    const at::Tensor& kept;
    ~Restore() {
      own.set_state(shared.get_state());
      shared.set_state(kept);
    }
  } restore{shared, own, kept};
  call.op.redispatchBoxed(call.keys, &call.stack);
}

void RankContext::run_seeded(OperatorCall& call) {
  const c10::Device device = device_of(call);
  if (device.is_meta()) return call.op.redispatchBoxed(call.keys, &call.stack);  // there is nothing to draw
  std::lock_guard lock(default_generator_mutex);
  at::Generator shared = at::globalContext().defaultGenerator(device);
  const at::Tensor kept = shared.get_state();
  struct Restore {
    at::Generator& shared;
    const at::Tensor& kept;
    ~Restore() { shared.set_state(kept); }
  } restore{shared, kept};
  shared.set_current_seed(streams_.seed_in(call.stream, *call.seed));
  call.op.redispatchBoxed(call.keys, &call.stack);
}

const InterceptScope* RankContext::first_of(PassOrder order) const {
  const InterceptScope* link = first_;
  while (link != nullptr && link->pass_->order() < order) link = link->next_;
  return link;
}

RankThreadScope::RankThreadScope(RankContext& context) { this_thread.context = &context; }
RankThreadScope::~RankThreadScope() { this_thread.context = nullptr; }

void Next::operator()(OperatorCall& call) const { context_.run(call, after()); }

void Next::open(OperatorCall& call) const {
  if (call.opener == nullptr) call.opener = &scope_;
  (*this)(call);
}

const InterceptScope* Next::after() const { return scope_.next_; }

Next::Inside::Inside(const OperatorCall& call, const InterceptScope* first) : outer_(this_thread.start) {
  ++this_thread.depth;
  // Parts of an operator that does not draw itself go on counting those of the one around it.
  shares_seed_ = outer_.seed && !call.traits.random;
  this_thread.start = {.is_first = false,
                       .link = first,
                       .stream = call.stream,
                       .seed = call.seed,
                       .draws = shares_seed_ ? outer_.draws : 0};
  c10::impl::tls_set_dispatch_key_excluded(kInterceptKey, false);
}

Next::Inside::~Inside() {
  c10::impl::tls_set_dispatch_key_excluded(kInterceptKey, true);
  const uint64_t draws = shares_seed_ ? this_thread.start.draws : outer_.draws;
  this_thread.start = outer_;
  this_thread.start.draws = draws;
  --this_thread.depth;
}

ChainFrom::ChainFrom(PassOrder order, RandomStream stream, std::optional<uint64_t> seed) : outer_(this_thread.start) {
  const RankContext* context = RankContext::current();
  if (context != nullptr)
    this_thread.start = {.is_first = false, .link = context->first_of(order), .stream = stream, .seed = seed};
}

ChainFrom::~ChainFrom() { this_thread.start = outer_; }

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
    carry(std::make_shared<CarriedContext>(&context_));
    c10::impl::tls_set_dispatch_key_included(kInterceptKey, true);
  }
  if (watch_ == Watch::kAll) ++context_.read_scopes_;
  if (pass_ == nullptr) return;
  InterceptScope** link = &context_.first_;
  while (*link != nullptr && (*link)->pass_->order() <= pass_->order()) link = &(*link)->next_;
  next_ = *link;
  *link = this;
}

void InterceptScope::leave() noexcept {
  if (pass_ != nullptr) {
    InterceptScope** link = &context_.first_;
    while (*link != this) link = &(*link)->next_;
    *link = next_;
  }
  if (watch_ == Watch::kAll) --context_.read_scopes_;
  if (--context_.scopes_ > 0) return;
  c10::impl::tls_set_dispatch_key_included(kInterceptKey, false);
  try {
    carry(nullptr);
  } catch (const std::exception&) {
    // Ours stays where it is: harmless, as the context outlives the thread's scopes and nothing is intercepted any
    // more.
  }
}

}  // namespace trireme
