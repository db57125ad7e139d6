#include "trireme/pager/pager.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "pager/acceptance.h"
#include "pager/gradients/deferred_gradients.h"
#include "pager/gradients/gradient_watch.h"
#include "pager/gradients/squares.h"
#include "pager/gradients/store.h"
#include "pager/weights/shard_home.h"
#include "pager/weights/store.h"
#include "trireme/base/log.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"
#include "trireme/device/extents.h"
#include "trireme/device/stream.h"
#include "trireme/intercept.h"
#include "trireme/pager/storage/written_values.h"

namespace trireme {
namespace {

/// Weights come with their own bits, whatever autocast is around.
struct WithoutAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard{c10::autocast_dispatch_keyset};
};

struct HandleOfPager final : PagerHandle {
  explicit HandleOfPager(Pager& to) : pager(to) {}
  Pager& pager;
};

}  // namespace

class Pager::Impl {
 public:
  Impl(Pager& pager, Group& group, std::vector<ShardMesh> meshes, std::vector<NamedParameter> parameters,
       const PagerPolicy& policy)
      : handle_(pager), group_(group), meshes_(std::move(meshes)), policy_(policy), context_{meshes_, layout_,
                                                                                             policy_, managed_,
                                                                                             device_, offload_,
                                                                                             extents_} {
    check(policy_);
    for (const NamedParameter& parameter : parameters) specs_.push_back(spec_of(parameter));
    device_ = device_of(parameters);
    policy_.gather = choose_gather(policy, meshes_, device_);
    std::vector<MeshSize> sizes;
    for (const ShardMesh& mesh : meshes_) sizes.push_back(mesh.size());
    layout_ = make_layout(specs_, sizes, policy.units);
    plan_offload();
    if (policy_.disk.is_on()) all_or_throw(group_, [this] { extents_ = make_shard_extents(layout_, policy_.disk); });
    managed_ = take_over(std::move(parameters), layout_);
    make_stores();
    for (ManagedParameter& managed : managed_) managed.owner->pager = &handle_;
    for (int i = 0; i < static_cast<int>(layout_.units.size()); ++i) {
      OwnedSlice slice = weights_->owned(i);
      if (layout_.units[i].trainable) slice.gradients = gradients_[layout_.units[i].mesh]->home().owned(i);
      (layout_.units[i].trainable ? owned_ : owned_frozen_).push_back(std::move(slice));
    }
    is_published_.assign(layout_.units.size(), false);
    arrivals_.assign(managed_.size(), 0);
    watch_gradients();
    scope_.emplace(weights_->pages() ? InterceptScope::Watch::kAll : InterceptScope::Watch::kWrites);
  }

  ~Impl() {
    scope_.reset();
    watch_.end();
  }

  void set_accumulation_steps(int64_t steps) {
    for (const auto& store : gradients_) store->set_accumulation_steps(steps);
  }
  void set_gradient_check(std::function<void()> check) { gradient_check_ = std::move(check); }
  void defer_reductions(bool defer) { deferring_ = defer; }
  bool defers_reductions() const { return deferring_; }

  std::optional<at::Tensor> sum_of_this_rank(int parameter) const {
    const at::Tensor sum = defers() ? deferred_->sum_of(parameter) : gradients_of(parameter).unreduced(parameter);
    if (!sum.defined()) return std::nullopt;
    return sum.to(at::kFloat) * gradients_of(parameter).scale().of_this_rank();
  }

  void expect_units(const std::vector<bool>& units) {
    for (const auto& store : gradients_) store->expect(units);
  }

  void end_backward() {
    check_opened(CallerScope::current("end_backward"));
    if (defers()) return;
    hand_over_deferred();
    for (const auto& store : gradients_) store->end_backward();
  }

  void reduce_now() {
    check_opened(CallerScope::current("reduce_now"));
    check_storages(CallerScope::current("reduce_now"));
    if (deferring_)
      throw StateError(str(CallerScope::current("reduce_now"),
                           ": inside a scope in which nothing is reduced (no_sync, coalesce_grad_reduction); let it "
                           "end first"));
    hand_over_deferred();
    for (const auto& store : gradients_) store->finish();
    for (const OwnedSlice& slice : owned_) await_owned(slice.unit);
    group_.barrier();  // a peer that is still finishing looks at what this rank's next backward writes
  }

  bool has_gradient(int parameter) const { return gradients_of(parameter).touched(parameter); }
  void gradient_written(int parameter) { gradients_of(parameter).home().rewritten(parameter); }

  void close_window() {
    const char* call = CallerScope::current("close_window");
    check_opened(call);
    check_storages(call);
    hand_over_deferred();
    for (const auto& store : gradients_) store->finish();
    require_same_writes();
    offload_.await_all();  // of the step before: what went wrong there is told while this window is still open
  }

  std::vector<bool> touched() const {
    std::vector<bool> touched;
    for (int i = 0; i < static_cast<int>(managed_.size()); ++i) touched.push_back(has_gradient(i));
    return touched;
  }
  std::vector<bool> written() const {
    std::vector<bool> written;
    for (const ManagedParameter& managed : managed_) written.push_back(managed.written);
    return written;
  }

  ExactSum squares() const { return squares_on_host(context_, gradients_); }
  at::Tensor squares_on_device() const { return trireme::squares_on_device(context_, owned_, gradients_); }

  void meet() {
    if (is_host(device_)) group_.barrier();  // peers read each other's weights there alone
  }
  void begin_update() { weights_->apply_writes(); }
  void leave_closed() noexcept { is_left_closed_ = true; }

  std::vector<bool> settle_writes() {
    for (const ManagedParameter& managed : managed_)
      managed.owner->require_spread(CallerScope::current("settle_writes"));
    check_opened(CallerScope::current("settle_writes"));
    offload_.await_all();  // who asks looks at weights next
    const std::vector<bool> written = this->written();
    if (!require_same_writes()) return written;
    // Every rank has come this far, so none reads.
    weights_->apply_writes();
    weights_->settle_writes();
    for (ManagedParameter& managed : managed_) managed.written = false;
    return written;
  }

  void publish(int unit) {
    mark_published(unit);
    weights_->outdate(unit);
    weights_->publish(unit);
  }

  void await_owned(int unit) {
    if (!offload_.owns(unit)) return;
    gradients_in(unit).home().await_owned(unit);
    weights_->await_owned(unit);
  }
  bool is_owned_there(int unit) const {
    return !offload_.owns(unit) || (gradients_in(unit).home().is_owned_there(unit) && weights_->is_owned_there(unit));
  }

  void defer_publish(int unit) {
    TRIREME_CHECK(offload_.owns(unit), "unit ", layout_.units[unit].name, " is not offloaded");
    mark_published(unit);
    weights_->outdate(unit);
    offload_.expect(unit);
  }

  void await_published() { offload_.await_all(); }

  void publish_deferred(int unit, const std::exception_ptr& problem) {
    if (!problem) weights_->publish(unit);
    offload_.arrive(unit, problem);
  }

  void open_window() {
    weights_->open_window();
    for (const auto& store : gradients_) store->clear();
    for (ManagedParameter& managed : managed_) {
      managed.written = false;
      // A graph from before the step must not run backward over the new values without a word.
      if (has_published_ && layout_.units[managed.unit].trainable) managed.tensor.unsafeGetTensorImpl()->bump_version();
    }
    has_published_ = false;
    is_published_.assign(layout_.units.size(), false);
    arrivals_.assign(managed_.size(), 0);
  }

  void abandon_window() {
    for (const OwnedSlice& slice : owned_)
      if (!is_published_[slice.unit]) publish(slice.unit);
    open_window();
  }

  GradientsSoFar gradients_so_far() const {
    GradientsSoFar so_far;
    for (const int64_t arrivals : arrivals_) {
      so_far.count += arrivals;
      so_far.passes = std::max(so_far.passes, arrivals);
    }
    return so_far;
  }

  at::Tensor whole(int parameter) {
    // Operators that gathering runs count as one, so that it does not make room by releasing this unit again.
    const WithoutInterception own_operators;
    const WithoutAutocast own_bits;
    weights_->before_access(parameter, Access::kRead);
    return managed_[parameter].tensor;
  }

  void release_gathered() { weights_->release_gathered(); }

  void require_free() const {
    for (const ManagedParameter& managed : managed_) managed.owner->require_free(CallerScope::current("restore"));
  }

  void restore() {
    if (!scope_) throw StateError("restore: the pager manages nothing any more");
    require_free();
    scope_.reset();
    watch_.end();
    const WithoutAutocast own_bits;
    for (size_t i = 0; i < managed_.size(); ++i) {
      ManagedParameter& managed = managed_[i];
      weights_->before_access(static_cast<int>(i), Access::kRead);
      const at::Tensor copy = managed.flat().clone();
      privates_.push_back(copy.storage().set_data_ptr(c10::DataPtr(nullptr, device_)));
    }
    for (size_t i = 0; i < managed_.size(); ++i) {
      managed_[i].owner->forget();
      StorageHandle::give(managed_[i].storage(), std::move(privates_[i]), managed_[i].bytes());
      managed_[i].storage().set_allocator(c10::GetAllocator(device_.type()));  // one of a file, or of numpy, had none
      managed_[i].storage().set_resizable(true);
    }
    privates_.clear();
  }

  void accept_gradient(int index) {
    at::Tensor gradient = std::move(managed_[index].tensor.mutable_grad());
    managed_[index].tensor.mutable_grad().reset();
    if (!gradient.defined()) return;
    if (gradient_check_) gradient_check_();
    ++arrivals_[index];
    gradient = flat_gradient(managed_[index].tensor, gradient.detach());
    if (!defers() && !deferred_->has(index)) return gradients_of(index).accept(index, std::move(gradient));
    deferred_->add(index, gradient);
    if (!defers()) gradients_of(index).accept(index, deferred_->take(index));
  }

  PagerMemory memory() const {
    PagerMemory memory;
    weights_->add_to(memory);
    for (const auto& store : gradients_) store->home().add_to(memory);
    deferred_->add_to(memory);
    memory.offloaded_bytes = offload_.memory().bytes();
    return memory;
  }

  DiskUse disk_use() const { return extents_ ? extents_->use() : DiskUse{}; }

  PagerCounters counters() const {
    PagerCounters counters;
    weights_->add_to(counters);
    for (const auto& store : gradients_) store->add_to(counters);
    return counters;
  }

  const Layout& layout() const { return layout_; }
  const std::vector<ParameterSpec>& specs() const { return specs_; }
  const std::vector<ShardMesh>& meshes() const { return meshes_; }
  const PagerPolicy& policy() const { return policy_; }
  c10::Device device() const { return device_; }
  const std::vector<OwnedSlice>& owned() const { return owned_; }
  const std::vector<OwnedSlice>& owned_frozen() const { return owned_frozen_; }

 private:
  void mark_published(int unit) {
    has_published_ = true;
    is_published_[unit] = true;
  }

  GradientStore& gradients_in(int unit) const { return *gradients_[layout_.units[unit].mesh]; }
  GradientStore& gradients_of(int parameter) const { return gradients_in(layout_.unit_of[parameter]); }
  // All stores alike, for that follows from the policy.
  bool defers() const { return deferring_ && !gradients_.front()->reduces_at_boundary(); }

  // Parameters on the host are updated there anyway: nothing is offloaded.
  void plan_offload() {
    const bool has_effect = !is_host(device_) && policy_.stage > 0;
    if (policy_.offload_ratio > 0 && !has_effect && group_.rank() == 0)
      log(LogLevel::kInfo, str("zero_optimization.offload_optimizer and offload_param: without effect, ",
                               is_host(device_) ? "the model is on the host, where all is that would be offloaded"
                                                : "stage 0 shards nothing; use stage 1, 2 or 3"));
    if (!has_effect) policy_.offload_ratio = 0;
    policy_.offload_parameters &= policy_.offload_ratio > 0 && policy_.stage == 3;
    offload_.decide(layout_, policy_);
    offload_.reserve(layout_, policy_, device_);
  }

  void make_stores() {
    const bool shared = policy_.stage == 3 && policy_.gather == GatherPolicy::kShared;
    // A world of one has nothing to gather; on a device a copy of what is there would cost memory and time.
    const bool is_alone_on_device = !is_host(device_) && group_.size() == 1;
    const bool stays = policy_.stage < 3 || (is_alone_on_device && !policy_.offload_parameters);
    if (stays) weights_ = make_resident_weights(context_);
    if (!stays) weights_ = shared ? make_mapped_weights(context_) : make_paged_weights(context_);
    for (int mesh = 0; mesh < static_cast<int>(meshes_.size()); ++mesh)
      gradients_.push_back(make_gradients(context_, mesh));
    deferred_.emplace(context_);
  }

  void watch_gradients() {
    for (size_t i = 0; i < managed_.size(); ++i)
      if (specs_[i].trainable) watch_.add(managed_[i].tensor, static_cast<int>(i));
  }

  // Hands over the deferred sums that no later gradient of their parameter took along.
  void hand_over_deferred() {
    // From the last parameter on: the order in which backward would have produced them.
    for (int i = static_cast<int>(managed_.size()) - 1; i >= 0; --i)
      if (deferred_->has(i)) gradients_of(i).accept(i, deferred_->take(i));
  }

  // Returns whether there are any. Collective.
  bool require_same_writes() const {
    std::vector<int64_t> digests;
    for (size_t i = 0; i < managed_.size(); ++i) digests.push_back(weights_->written_digest(static_cast<int>(i)));
    return require_same(group_, digests, [&](size_t i) { return managed_[i].name; });
  }

  void check_opened(const char* call) const {
    if (is_left_closed_)
      throw StateError(str(call,
                           ": the step before ended between close_window() and open(), so ranks may hold different "
                           "weights; load a checkpoint into a new engine"));
  }

  void check_storages(const char* call) const {
    if (!scope_) throw StateError(str(call, ": the parameters were given back by restore()"));
    for (size_t i = 0; i < managed_.size(); ++i) {
      const ManagedParameter& managed = managed_[i];
      managed.owner->require_free(call);
      if (managed.tensor.requires_grad() && !specs_[i].trainable)
        throw StateError(str("parameter '", managed.name,
                             "' was frozen when it was sharded and requires a gradient now; call requires_grad_(true) "
                             "before that, as before initialize(), or freeze it again"));
      if (StorageHandle::owner_of(managed.storage()) != managed.owner.get())
        throw StateError(str("parameter '", managed.name,
                             "' was given another storage (set_data, or .data = …) since the engine took "
                             "it over; write into it instead, without a graph: parameter.copy_(values)"));
    }
  }

  HandleOfPager handle_;
  Group& group_;
  const std::vector<ShardMesh> meshes_;
  PagerPolicy policy_;
  c10::Device device_{c10::kCPU};
  std::vector<ParameterSpec> specs_;
  Layout layout_;
  std::vector<ManagedParameter> managed_;
  Offload offload_;
  std::unique_ptr<Extents> extents_;  // of shards on disk; null: they are in memory
  const StoreContext context_;
  std::unique_ptr<WeightStore> weights_;
  std::vector<std::unique_ptr<GradientStore>> gradients_;  // by mesh
  std::optional<DeferredGradients> deferred_;
  bool deferring_ = false;
  std::function<void()> gradient_check_;
  std::vector<OwnedSlice> owned_;
  std::vector<OwnedSlice> owned_frozen_;
  GradientWatch watch_{[this](int parameter) { accept_gradient(parameter); }};
  std::vector<c10::DataPtr> privates_;
  std::optional<InterceptScope> scope_;
  std::vector<int64_t> arrivals_;   // of gradients, by parameter, in this window
  std::vector<bool> is_published_;  // by unit, in this window
  bool has_published_ = false;
  bool is_left_closed_ = false;  // a ClosedWindow died before its end
};

Pager::Pager(Group& group, std::vector<NamedParameter> parameters, const PagerPolicy& policy)
    : Pager(group, {{.shards = group}}, std::move(parameters), policy) {}
Pager::Pager(Group& group, std::vector<ShardMesh> meshes, std::vector<NamedParameter> parameters,
             const PagerPolicy& policy)
    : impl_(std::make_unique<Impl>(*this, group, std::move(meshes), std::move(parameters), policy)) {}
Pager::~Pager() = default;

const Layout& Pager::layout() const { return impl_->layout(); }
const std::vector<ParameterSpec>& Pager::parameters() const { return impl_->specs(); }
const std::vector<ShardMesh>& Pager::meshes() const { return impl_->meshes(); }
const PagerPolicy& Pager::policy() const { return impl_->policy(); }
c10::Device Pager::device() const { return impl_->device(); }
const std::vector<OwnedSlice>& Pager::owned() const { return impl_->owned(); }
const std::vector<OwnedSlice>& Pager::owned_frozen() const { return impl_->owned_frozen(); }
void Pager::set_accumulation_steps(int64_t steps) { impl_->set_accumulation_steps(steps); }
void Pager::set_gradient_check(std::function<void()> check) { impl_->set_gradient_check(std::move(check)); }
void Pager::expect_units(const std::vector<bool>& units) { impl_->expect_units(units); }
void Pager::end_backward() { impl_->end_backward(); }
void Pager::defer_reductions(bool defer) { impl_->defer_reductions(defer); }
bool Pager::defers_reductions() const { return impl_->defers_reductions(); }
std::optional<at::Tensor> Pager::sum_of_this_rank(int parameter) const { return impl_->sum_of_this_rank(parameter); }
void Pager::reduce_now() { impl_->reduce_now(); }
bool Pager::has_gradient(int parameter) const { return impl_->has_gradient(parameter); }
void Pager::gradient_written(int parameter) { impl_->gradient_written(parameter); }
void Pager::release_gathered() { impl_->release_gathered(); }
void Pager::require_free() const { impl_->require_free(); }
std::vector<bool> Pager::settle_writes() { return impl_->settle_writes(); }
void Pager::await_owned(int unit) { impl_->await_owned(unit); }
DiskUse Pager::disk_use() const { return impl_->disk_use(); }
bool Pager::is_owned_there(int unit) const { return impl_->is_owned_there(unit); }
void Pager::await_published() { impl_->await_published(); }
void Pager::publish_deferred(int unit, const std::exception_ptr& problem) { impl_->publish_deferred(unit, problem); }
GradientsSoFar Pager::gradients_so_far() const { return impl_->gradients_so_far(); }
at::Tensor Pager::whole(int parameter) { return impl_->whole(parameter); }
void Pager::restore() { impl_->restore(); }
PagerMemory Pager::memory() const { return impl_->memory(); }
PagerCounters Pager::counters() const { return impl_->counters(); }

ClosedWindow Pager::close_window() {
  impl_->close_window();
  return ClosedWindow(*impl_);
}

ClosedWindow::ClosedWindow(Pager::Impl& pager) : pager_(&pager), touched_(pager.touched()), written_(pager.written()) {}

ClosedWindow::ClosedWindow(ClosedWindow&& other) noexcept
    : pager_(std::exchange(other.pager_, nullptr)),
      touched_(std::move(other.touched_)),
      written_(std::move(other.written_)),
      state_(other.state_) {}

ClosedWindow::~ClosedWindow() {
  if (pager_ != nullptr && state_ != State::kOpen) pager_->leave_closed();
}

void ClosedWindow::require(State state, const char* call) const {
  if (pager_ != nullptr && state_ == state) return;
  const bool is_early = pager_ != nullptr && state_ == State::kClosed;
  throw StateError(str(call, is_early ? ": peers may still read the weights; call meet() or begin_update() before it"
                                      : ": the window is behind that; call it once, in the order of ClosedWindow"));
}

ExactSum ClosedWindow::squares() const { return pager_->squares(); }
at::Tensor ClosedWindow::squares_on_device() const { return pager_->squares_on_device(); }

void ClosedWindow::begin_update() {
  require(State::kClosed, "begin_update");
  pager_->begin_update();
  state_ = State::kUpdating;
}

void ClosedWindow::meet() {
  require(State::kClosed, "meet");
  pager_->meet();
  begin_update();
}

void ClosedWindow::publish(int unit) {
  require(State::kUpdating, "publish");
  pager_->publish(unit);
}

void ClosedWindow::defer_publish(int unit) {
  require(State::kUpdating, "defer_publish");
  pager_->defer_publish(unit);
}

void ClosedWindow::open() {
  require(State::kUpdating, "open");
  pager_->open_window();
  state_ = State::kOpen;
}

void ClosedWindow::abandon() {
  require(State::kUpdating, "abandon");
  pager_->abandon_window();
  state_ = State::kOpen;
}

std::optional<ManagedPlace> find_managed(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  auto* owner = dynamic_cast<ParameterStorage*>(StorageHandle::owner_of(*tensor.storage().unsafeGetStorageImpl()));
  if (owner == nullptr || !owner->is_managed()) return std::nullopt;
  return ManagedPlace{&static_cast<HandleOfPager*>(owner->pager)->pager, owner->parameter()};
}

}  // namespace trireme
