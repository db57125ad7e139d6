#include "recompute/region.h"

#include <torch/csrc/autograd/graph_task.h>

#include "trireme/intercept/program.h"

namespace trireme::detail {
namespace {

/// Ends a recomputation that has all it needs. No std::exception, so that the function does not mistake it for its own.
struct EarlyStop {};

// detach() below keeps version counters, and out of cycles between a node and its own output.
class RecordedHooks final : public torch::autograd::SavedVariableHooks {
 public:
  explicit RecordedHooks(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  ~RecordedHooks() override {
    if (index_) region_->forget(*index_);
  }
  void call_pack_hook(const at::Tensor& tensor) override { index_ = region_->record(tensor); }
  at::Tensor call_unpack_hook() override { return region_->take(*index_); }

 private:
  std::shared_ptr<Region> region_;
  std::optional<size_t> index_;
};

class Recorder final : public SavePolicy {
 public:
  explicit Recorder(std::shared_ptr<Region> region) : region_(std::move(region)) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override {
    return std::make_unique<RecordedHooks>(region_);
  }

 private:
  std::shared_ptr<Region> region_;
};

/// The version of a parameter, or of a view of one.
std::optional<uint32_t> parameter_version(const at::Tensor& tensor) {
  if (!tensor.requires_grad()) return std::nullopt;
  const bool is_parameter = tensor.is_view() ? tensor._base().is_leaf() : tensor.is_leaf();
  if (!is_parameter) return std::nullopt;
  return static_cast<uint32_t>(tensor._version());
}

}  // namespace

/// While the function runs again: what autograd saves refills the region's slots. The graph itself is thrown away,
/// unless the function runs a backward of its own.
class Region::Refill final : public SavePolicy {
 public:
  explicit Refill(Region& region) : region_(region) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> hooks() override { return std::make_unique<Hooks>(region_); }

 private:
  class Hooks final : public torch::autograd::SavedVariableHooks {
   public:
    explicit Hooks(Region& region) : region_(region) {}
    void call_pack_hook(const at::Tensor& tensor) override {
      tensor_ = tensor.detach();
      region_.refill(tensor);
    }
    at::Tensor call_unpack_hook() override { return tensor_; }

   private:
    Region& region_;
    at::Tensor tensor_;
  };
  Region& region_;
};

Region::Region(const RecomputeOptions& options, const std::vector<at::Tensor>& inputs, RecordScope::Replay replay)
    : options_(options), replay_(std::move(replay)), surroundings_(inputs, options.preserve_rng_state) {
  for (const at::Tensor& input : inputs) {
    inputs_.emplace_back(input, false);
    input_versions_.push_back(input.defined() ? static_cast<uint32_t>(input._version()) : 0);
  }
}

size_t Region::record(const at::Tensor& tensor) {
  const std::lock_guard lock(mutex_);
  slots_.push_back({.traits = traits_of(tensor), .wanted = true, .value = {}, .version = 0});
  return slots_.size() - 1;
}

at::Tensor Region::take(size_t index) {
  const std::lock_guard lock(mutex_);
  const int graph_task = torch::autograd::get_current_graph_task_id();
  // Outside of backward nobody says when values are not needed any more, so none are kept for later.
  if (graph_task != graph_task_ || graph_task == -1 || !slots_[index].value.defined()) {
    recompute_all();
    graph_task_ = graph_task;
  }
  Slot& slot = slots_[index];
  if (!slot.value.defined())
    throw RecomputeError(str(options_.name, ": forward saved ", slots_.size(),
                             " tensors for backward, but recomputation only ", refilled_,
                             "; the function must compute the same both times"));
  const at::Tensor value = std::move(slot.value);
  if (static_cast<uint32_t>(value._version()) != slot.version)
    throw RecomputeError(str(options_.name, ": ", number(index),
                             " was written by the function after autograd had saved it; write into a clone() of it"));
  if (graph_task == -1)
    for (Slot& other : slots_) other.value.reset();
  return value;
}

void Region::forget(size_t index) {
  const std::lock_guard lock(mutex_);
  slots_[index].wanted = false;
  slots_[index].value.reset();
}

void Region::recompute_all() {
  for (Slot& slot : slots_) slot.value.reset();
  refilled_ = 0;
  std::vector<at::Tensor> inputs;
  for (size_t i = 0; i < inputs_.size(); ++i) {
    inputs.push_back(inputs_[i].unpack());
    if (inputs.back().defined() && static_cast<uint32_t>(inputs.back()._version()) != input_versions_[i])
      throw RecomputeError(str(options_.name, ": input ", i, " was written since forward; write into a clone() of it"));
  }
  const SurroundingsScope surroundings(surroundings_, inputs, options_.preserve_rng_state);
  Refill refill(*this);
  const SaveScope scope(refill);
  const at::AutoGradMode grad_mode(true);
  const ProgramScope program(ProgramScope::Whose::kProgram);
  try {
    replay_(inputs);
  } catch (const EarlyStop&) {
  }
}

void Region::refill(const at::Tensor& tensor) {
  const size_t index = refilled_++;
  if (index >= slots_.size())
    throw RecomputeError(str(options_.name, ": recomputation saved more tensors for backward than the ", slots_.size(),
                             " of forward; the function must compute the same both times"));
  Slot& slot = slots_[index];
  if (options_.determinism_check) check(slot, tensor);
  if (slot.wanted) {
    slot.value = tensor.detach();
    slot.version = static_cast<uint32_t>(slot.value._version());
  }
  if (options_.early_stop && refilled_ == slots_.size()) throw EarlyStop();
}

Region::Traits Region::traits_of(const at::Tensor& tensor) {
  return {.sizes = tensor.sizes().vec(),
          .dtype = tensor.scalar_type(),
          .device = tensor.device(),
          .parameter_version = parameter_version(tensor)};
}

void Region::check(const Slot& slot, const at::Tensor& tensor) const {
  const Traits& then = slot.traits;
  const Traits now = traits_of(tensor);
  const size_t index = refilled_ - 1;
  if (then.sizes != now.sizes || then.dtype != now.dtype || then.device != now.device)
    throw RecomputeError(str(options_.name, ": ", number(index), " was ", then.dtype, " ", at::IntArrayRef(then.sizes),
                             " on ", then.device, " in forward, and is ", now.dtype, " ", at::IntArrayRef(now.sizes),
                             " on ", now.device, " when recomputed; the function must compute the same both times"));
  if (then.parameter_version != now.parameter_version)
    throw RecomputeError(str(options_.name, ": ", number(index), ", a parameter ", at::IntArrayRef(now.sizes),
                             ", was written between forward and backward; step the optimizer after backward"));
}

std::string Region::number(size_t index) const { return str("saved tensor ", index + 1, " of ", slots_.size()); }

struct RecordScope::State {
  State(const RecomputeOptions& options, const std::vector<at::Tensor>& inputs, Replay replay)
      : recorder(std::make_shared<Region>(options, inputs, std::move(replay))), scope(recorder) {}
  Recorder recorder;
  SaveScope scope;
};

RecordScope::RecordScope(const RecomputeOptions& options, const std::vector<at::Tensor>& inputs, Replay replay)
    : state_(std::make_unique<State>(options, inputs, std::move(replay))) {}

RecordScope::~RecordScope() = default;

size_t layers_per_segment(size_t layers, int segments) {
  if (segments < 1 || static_cast<size_t>(segments) > layers)
    throw ShapeError(str("recompute_sequential: ", segments, " segments of ", layers, " layers; use 1 to ", layers));
  return layers / static_cast<size_t>(segments);
}

}  // namespace trireme::detail
