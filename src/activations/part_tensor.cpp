#include "trireme/activations/part_tensor.h"

#include <ATen/TensorGeometry.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/utils/grad_layout_contract.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <string>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "activations/part_nodes.h"
#include "activations/plain_slices.h"
#include "trireme/base/error.h"
#include "trireme/base/torch/autograd_metadata.h"
#include "trireme/base/torch/engine.h"
#include "trireme/base/torch/variable_hooks.h"
#include "trireme/intercept.h"
#include "trireme/intercept/program.h"
#include "trireme/intercept/transforms.h"

namespace trireme {
namespace part_tensor {

torch::autograd::AutogradMeta* metadata(const at::Tensor& tensor) {
  return torch::autograd::impl::get_autograd_meta(tensor);
}

/// Gives grad() the gradients of parts.
class PartEngine final : public ForwardingEngine {
 public:
  using ForwardingEngine::ForwardingEngine;
  variable_list execute(const torch::autograd::edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad, const torch::autograd::edge_list& outputs) override {
    LocalGradient::refuse_hooks();
    std::vector<Captured> all;
    torch::autograd::edge_list real_outputs, real_roots = roots;
    bool has_part = std::ranges::any_of(roots, [](const Edge& root) { return captured(root).of != nullptr; });
    for (size_t i = 0; i < roots.size() && i < inputs.size(); ++i)
      if (const auto* const told = dynamic_cast<const LocalGradient*>(roots[i].function.get());
          told != nullptr && told->is_own(inputs[i]))
        real_roots[i] = told->next_edge(0);
    for (const Edge& output : outputs) {
      all.push_back(captured(output));
      real_outputs.push_back(all.back().edge);
      has_part = has_part || all.back().of != nullptr;
    }
    if (create_graph && has_part) {
      const at::AutoGradMode enabled(true);
      refuse_gradients_of_gradients();
    }
    variable_list gradients =
        ForwardingEngine::execute(real_roots, inputs, keep_graph, create_graph, accumulate_grad, real_outputs);
    for (size_t i = 0; i < gradients.size() && i < all.size(); ++i)
      if (all[i].of != nullptr) gradients[i] = as_part(gradients[i], all[i].of);
    return gradients;
  }
};

torch::autograd::Engine* engine = nullptr;
torch::autograd::Engine& engine_of_parts() { return *engine; }

}  // namespace part_tensor

/// Histories outside of operators: libtorch is told the local tensors of parts.
class PartHooks final : public ForwardingVariableHooks {
 public:
  using ForwardingVariableHooks::ForwardingVariableHooks;

  /// Once per process, for good: tensors outlive every scope.
  static void install() {
    static const bool is_installed = [] {
      at::impl::SetVariableHooks(new PartHooks(*at::impl::GetVariableHooks()));
      part_tensor::engine = new part_tensor::PartEngine(torch::autograd::Engine::get_default_engine());
      torch::autograd::set_default_engine_stub(&part_tensor::engine_of_parts);
      return true;
    }();
    (void)is_installed;
  }

  Base tensor_data(const Base& self) const override {
    PartTensor* const part = PartTensor::of(self);
    return part == nullptr ? part_tensor::Slices::all().add_copy(self, at::Tensor(real().tensor_data(self)))
                           : PartTensor::wrap(at::Tensor(real().tensor_data(part->local())), part->known());
  }
  Base variable_data(const Base& self) const override {
    PartTensor* const part = PartTensor::of(self);
    return part == nullptr ? part_tensor::Slices::all().add_copy(self, at::Tensor(real().variable_data(self)))
                           : PartTensor::wrap(at::Tensor(real().variable_data(part->local())), part->known());
  }
  Base data(const Base& self) const override { return variable_data(self); }
  const NodePtr& grad_fn(const Base& self) const override {
    PartTensor* const part = PartTensor::of(self);
    if (part == nullptr) {
      const NodePtr& node = real().grad_fn(self);
      if (node != nullptr) part_tensor::join_ranks(*node);
      if (node != nullptr || !program_looks() || is_inside_of_operator()) return node;
      const NodePtr* const told = part_tensor::Slices::all().told(self);
      return told != nullptr ? *told : node;
    }
    if (program_looks()) return part->node_for_program();
    return real().grad_fn(part->local());
  }
  int64_t output_nr(const Base& self) const override {
    PartTensor* const part = PartTensor::of(self);
    if (part == nullptr) return real().output_nr(self);
    const at::Tensor local = part->local();
    return program_looks() ? 0 : real().output_nr(local);
  }
  unsigned _register_hook(const Base& self, std::function<Base(const Base&)> hook) const override {
    PartTensor* const part = PartTensor::of(self);
    if (part == nullptr) {
      const WithoutInterception of_the_leaf;  // libtorch asks for its grad_fn
      return real()._register_hook(self, [hook = std::move(hook)](const Base& gradient) {
        const ProgramScope program(ProgramScope::Whose::kProgram);
        return hook(gradient);
      });
    }
    const auto on_part = [of = part->known(), hook = std::move(hook)](const Base& gradient) -> Base {
      part_tensor::refuse_gradients_of_gradients();
      const ProgramScope program(ProgramScope::Whose::kProgram);
      const Base answer = hook(part_tensor::as_part(at::Tensor(gradient), of));
      if (!answer.defined() || PartTensor::of(gradient) != nullptr) return answer;
      return local_gradient(at::Tensor(answer), of, gradient.sizes());
    };
    return real()._register_hook(part->local(), on_part);
  }
  void remove_hook(const Base& self, unsigned place) const override { real().remove_hook(told(self), place); }
  bool is_view(const Base& self) const override {
    // libtorch asks it of each result of a function, whose history it has just set.
    if (PartTensor* const part = PartTensor::of(self)) part->mend();
    return real().is_view(told(self));
  }
  const Base& base(const Base& self) const override {
    PartTensor* const part = PartTensor::of(self);
    if (part == nullptr) return real().base(self);
    // libtorch asks for its history alone.
    if (!part->base_.defined()) {
      const at::Tensor base(real().base(told(self)));
      part->base_ = PartTensor::wrap(base, std::make_shared<const PartOf>(base.sizes().vec(), Placement(0)));
      PartTensor::of(part->base_)->is_known_ = false;
    }
    return part->base_;
  }
  const std::string& name(const Base& self) const override { return real().name(told(self)); }
  bool is_leaf(const Base& self) const override { return real().is_leaf(told(self)); }
  void set_data(const Base& self, const Base& data) const override {
    PartTensor* const part = PartTensor::of(self);
    PartTensor* const other = PartTensor::of(data);
    if ((part == nullptr) != (other == nullptr))
      part_tensor::refuse(part == nullptr ? "a tensor that is none cannot be given its data"
                                          : "it cannot be given the data of a tensor that is none");
    if (part == nullptr) return real().set_data(self, data);
    if (self.scalar_type() != data.scalar_type() || self.device() != data.device())
      part_tensor::refuse("it cannot be given data of another type or device");
    const WithoutInterception as_local;
    real().set_data(part->local(), other->local());
    part->of_ = other->known();
    part->lay_out();
  }
  int64_t _version(const Base& self) const override { return real()._version(told(self)); }
  void retain_grad(const Base& self) const override {
    PartTensor* const part = PartTensor::of(self);
    if (part == nullptr || !self.requires_grad() || is_leaf(self) || retains_grad(self))
      return real().retain_grad(told(self));
    const at::Tensor local = part->local();
    const NodePtr& node = real().grad_fn(local);
    const auto output = static_cast<uint32_t>(real().output_nr(local));
    node->add_retains_grad_hook(std::make_unique<part_tensor::KeptGradient>(local, part->known(), output), output);
    part_tensor::metadata(local)->retains_grad_ = true;
  }
  bool retains_grad(const Base& self) const override { return real().retains_grad(told(self)); }
  void requires_grad_(const Base& self, bool requires_grad) const override {
    real().requires_grad_(told(self), requires_grad);
  }
  std::optional<c10::ScalarType> grad_dtype(const Base& self) const override { return real().grad_dtype(told(self)); }
  void set_grad_dtype(const Base& self, const std::optional<c10::ScalarType>& dtype) const override {
    real().set_grad_dtype(told(self), dtype);
  }

 private:
  /// The tensor that libtorch is told in place of a part.
  static Base told(const Base& self) {
    PartTensor* const part = PartTensor::of(self);
    if (part == nullptr) return self;
    part->share();
    return part->local_;
  }
};

void PlainSlices::add(const at::Tensor& leaf, PartOf of, std::string name) {
  PartHooks::install();
  part_tensor::Slices::all().add(leaf, std::make_shared<const PartOf>(std::move(of)), std::move(name), this);
}

bool has_parts(const OperatorCall& call, const PartRanks* ranks) {
  bool found = false;
  for_each_tensor(call.arguments(), [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (const PartTensor* const part = PartTensor::of(tensor)) {
      part->check_known();
      found = found || ranks == nullptr || part->known()->ranks == nullptr || part->known()->ranks.get() == ranks;
    } else if (const at::Tensor& inner = under_transforms(tensor);
               !inner.is_same(tensor) && PartTensor::of(inner) != nullptr)
      part_tensor::refuse(str(call.op.schema().name(), " in a transform of torch.func (vmap, grad, jvp) is not there"));
  });
  if (!found) return false;
  if (c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode))
    part_tensor::refuse(str(call.op.schema().name(), " in a transform of torch.func (vmap, grad, jvp) is not there"));
  if (call.op.hasTag(at::Tag::inplace_view) && call.op.schema().name() != "aten::detach_")
    part_tensor::refuse(str(call.op.schema().name(), " would change its sizes in place; give the result another name"));
  return true;
}

bool program_looks() noexcept {
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  return keys.included_.has(kInterceptKey) && !keys.excluded_.has(kInterceptKey);
}

at::Tensor PartTensor::wrap(at::Tensor local, std::shared_ptr<const PartOf> of) {
  PartHooks::install();
  TRIREME_CHECK(PartTensor::of(local) == nullptr, "a part of a part");
  return at::detail::make_tensor<PartTensor>(std::move(local), std::move(of), /*shares_metadata=*/true);
}

PartTensor* PartTensor::of(const at::TensorBase& tensor) noexcept {
  c10::TensorImpl* const impl = tensor.unsafeGetTensorImpl();
  return typeid(*impl) == typeid(PartTensor) ? static_cast<PartTensor*>(impl) : nullptr;
}

PartTensor::PartTensor(at::Tensor local, std::shared_ptr<const PartOf> of, bool shares_metadata)
    : TensorImpl(local.key_set(), local.dtype(), local.device()), local_(std::move(local)), of_(std::move(of)) {
  set_custom_sizes_strides(SizesStridesPolicy::CustomSizes);
  set_version_counter(local_.unsafeGetTensorImpl()->version_counter());
  lay_out();
  if (!shares_metadata) return;
  share();
  if (const auto* const metadata = part_tensor::metadata(local_)) heard_ = metadata->grad_fn_;
}

PartTensor::~PartTensor() { forget(); }

/// Gives both impls one metadata, that of the local tensor. A history may come to a tensor of numbers at any time (a
/// view of it is written), and libtorch asks an impl for it without asking us.
void PartTensor::share() {
  if (shares_) return;
  if (autograd_meta() != nullptr) {
    TRIREME_CHECK(local_.unsafeGetTensorImpl()->autograd_meta() == nullptr, "two metadata");
    move_autograd_metadata(*this, *local_.unsafeGetTensorImpl());
  } else if (local_.is_floating_point() || local_.is_complex()) {
    torch::autograd::impl::materialize_autograd_meta(local_);
  }
  if (local_.unsafeGetTensorImpl()->autograd_meta() == nullptr) return;
  share_autograd_metadata(*local_.unsafeGetTensorImpl(), *this);
  shares_ = true;
}

void PartTensor::forget() noexcept {
  if (shares_) forget_autograd_metadata(*this);
  shares_ = false;
}

at::Tensor local_of(const at::Tensor& tensor) {
  PartTensor* const part = PartTensor::of(tensor);
  return part != nullptr ? part->local() : tensor;
}

c10::SmallVector<int64_t, 5> dense_strides(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  c10::SmallVector<int64_t, 5> order, dense(sizes.begin(), sizes.end());
  for (size_t dim = 0; dim < sizes.size(); ++dim) order.push_back(static_cast<int64_t>(dim));
  const auto is_inner = [&](int64_t one, int64_t other) { return strides[one] > strides[other]; };
  if (!std::ranges::is_sorted(strides, std::greater<>())) std::ranges::stable_sort(order, is_inner);
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const int64_t dim = order[i];
    dense[dim] = strides[dim] == 0 ? 0 : stride;
    if (strides[dim] != 0) stride *= std::max<int64_t>(sizes[dim], 1);
  }
  return dense;
}

void PartTensor::lay_out() {
  const c10::IntArrayRef local_strides = local_.strides();
  const std::vector<int64_t>& sizes = of_->sizes;
  TRIREME_CHECK(sizes.size() == local_strides.size(), "a whole of ", sizes.size(), " dims");
  numel_of_whole_ = c10::multiply_integers(sizes);
  strides_ = dense_strides(sizes, local_strides);
}

bool PartTensor::speaks_of_wholes(const torch::autograd::Node& node, uint32_t output) const {
  if (output >= node.num_inputs()) return false;
  const c10::SymIntArrayRef sizes = node.input_metadata(output).shape_as_dim_vector();
  const bool is_whole = sizes.equals(c10::fromIntArrayRefSlow(of_->sizes));
  const bool is_local = sizes.equals(local_.sym_sizes());
  return is_whole == is_local ? is_function(node) : is_whole;
}

/// Where a program's function has given the local tensor a history, which speaks of wholes, a node goes in between.
void PartTensor::mend() {
  share();
  auto* const metadata = part_tensor::metadata(local_);
  if (metadata == nullptr) return;
  if (metadata->grad_fn_ != heard_) {
    if (metadata->grad_fn_ != nullptr && speaks_of_wholes(*metadata->grad_fn_, metadata->output_nr_)) {
      part_tensor::join_ranks(*metadata->grad_fn_);
      metadata->grad_fn_ = make_node<part_tensor::GradientAsPart>(
          of_, local_, torch::autograd::Edge(metadata->grad_fn_, metadata->output_nr_));
      metadata->output_nr_ = 0;
    }
    heard_ = metadata->grad_fn_;
  }
  // libtorch moves what retain_grad() has left to the node that it is told of a tensor that was written.
  if (asked_ != nullptr && heard_ != nullptr && asked_->retains_grad_hooks().contains(0))
    heard_->add_retains_grad_hook(asked_->pop_retains_grad_hook(0), metadata->output_nr_);
  if (!metadata->requires_grad_ || metadata->grad_fn_ != nullptr || accumulator_ != nullptr) return;
  if (NodePtr made = metadata->grad_accumulator_.lock(); made != nullptr) {
    if (const auto* const own = dynamic_cast<torch::autograd::AccumulateGrad*>(made.get());
        own != nullptr && own->variable.unsafeGetTensorImpl() != this)
      accumulator_ = std::move(made);
    return;
  }
  // The accumulator holds its tensor, and this one the accumulator: it gets another of the same metadata.
  const WithoutInterception as_local;
  accumulator_ = make_node<part_tensor::AccumulatePart>(wrap(local_, of_), of_);
  metadata->grad_accumulator_ = decltype(metadata->grad_accumulator_)(accumulator_);
}

/// libtorch has recorded the whole's geometry of a view that a program's function has written.
void PartTensor::mend_written_view() {
  const auto* const view = torch::autograd::impl::get_view_autograd_meta(local_);
  if (view == nullptr || !view->has_bw_view()) return;
  const auto* const base = part_tensor::metadata(view->get_backward_view().base_);
  if (base == nullptr || base->grad_fn_ == nullptr) return;
  auto* const written = dynamic_cast<torch::autograd::CopySlices*>(base->grad_fn_.get());
  if (written == nullptr || written->fn == nullptr || !speaks_of_wholes(*written->fn, 0)) return;
  written->view = at::TensorGeometry(local_);
  written->fn = make_node<part_tensor::WrittenView>(of_, local_, written->fn);
}

void PartTensor::check_known() const {
  if (!is_known_)
    part_tensor::refuse("of what it is a view of, the whole is not known; keep the tensor by its own name");
}

at::Tensor PartTensor::local() {
  mend();
  return local_;
}

/// The node that a program is told: edges that it makes take parts.
const NodePtr& PartTensor::node_for_program() {
  const WithoutInterception as_local;
  mend_written_view();
  mend();
  const NodePtr& node = local_.grad_fn();  // that of a view may be made here
  mend();
  torch::autograd::Edge edge;
  if (node != nullptr)
    edge = {node, static_cast<uint32_t>(local_.output_nr())};
  else if (accumulator_ != nullptr && local_.requires_grad())
    edge = {accumulator_, 0};
  if (!edge.is_valid())
    asked_ = nullptr;
  else if (asked_ == nullptr || !(asked_->next_edge(0) == edge))
    asked_ = make_node<part_tensor::LocalGradient>(of_, local_, std::move(edge));
  return asked_;
}

const c10::Storage& PartTensor::storage() const {
  part_tensor::refuse("its memory is not a program's; read it by an operator");
}

c10::IntArrayRef PartTensor::sizes_custom() const {
  if (!program_looks()) return local_.sizes();
  check_known();
  return of_->sizes;
}
c10::IntArrayRef PartTensor::strides_custom() const {
  return program_looks() ? c10::IntArrayRef(strides_) : local_.strides();
}
int64_t PartTensor::numel_custom() const { return program_looks() ? numel_of_whole_ : local_.numel(); }
int64_t PartTensor::dim_custom() const { return static_cast<int64_t>(of_->sizes.size()); }
c10::SymIntArrayRef PartTensor::sym_sizes_custom() const { return c10::fromIntArrayRefSlow(sizes_custom()); }
c10::SymIntArrayRef PartTensor::sym_strides_custom() const { return c10::fromIntArrayRefSlow(strides_custom()); }
c10::SymInt PartTensor::sym_numel_custom() const { return numel_custom(); }
c10::SymBool PartTensor::sym_is_contiguous_custom(at::MemoryFormat format) const {
  return local_.is_contiguous(format);
}
c10::SymBool PartTensor::sym_is_non_overlapping_and_dense_custom() const {
  return local_.unsafeGetTensorImpl()->is_non_overlapping_and_dense();
}
bool PartTensor::is_strides_like_custom(at::MemoryFormat format) const {
  return local_.unsafeGetTensorImpl()->is_strides_like(format);
}

c10::intrusive_ptr<c10::TensorImpl> PartTensor::shallow_copy_and_detach(const c10::VariableVersion& version,
                                                                        bool allow_metadata_change) const {
  auto copied = local_.unsafeGetTensorImpl()->shallow_copy_and_detach(version, allow_metadata_change);
  auto copy = c10::make_intrusive<PartTensor>(at::Tensor(std::move(copied)), of_, /*shares_metadata=*/false);
  copy->set_allow_tensor_metadata_change(allow_metadata_change);
  return copy;
}

c10::intrusive_ptr<c10::TensorImpl> PartTensor::shallow_copy_and_detach(c10::VariableVersion&& version,
                                                                        bool allow_metadata_change) const {
  const c10::VariableVersion kept = std::move(version);
  return shallow_copy_and_detach(kept, allow_metadata_change);
}

void PartTensor::shallow_copy_from(const c10::intrusive_ptr<TensorImpl>&) {
  part_tensor::refuse("it cannot become another tensor");
}

void PartTensor::release_resources() {
  forget();
  heard_ = nullptr;
  asked_ = nullptr;
  accumulator_ = nullptr;
  base_.reset();
  local_.reset();
  TensorImpl::release_resources();
}

at::Tensor local_gradient(const at::Tensor& gradient, const std::shared_ptr<const PartOf>& of,
                          at::IntArrayRef local_sizes) {
  if (!gradient.defined()) return gradient;
  PartTensor* part = PartTensor::of(gradient);
  const auto local = [&](PartTensor& found) {
    const WithoutInterception as_local;
    return of->shares == 1 ? found.local() : found.local() * of->shares;
  };
  if (part != nullptr && part_tensor::is_same(part->known(), of)) return local(*part);
  // The pass knows how to cut a whole, and to move what is cut otherwise: it adds it to a part.
  at::Tensor zeros;
  {
    const WithoutInterception as_local;
    zeros = PartTensor::wrap(at::zeros(local_sizes, gradient.options()), of);
  }
  const at::Tensor sum = zeros + gradient;
  part = PartTensor::of(sum);
  if (part == nullptr || !part_tensor::is_same(part->known(), of))
    part_tensor::refuse("a program's own function, or a hook, gave a gradient that is not cut as it is");
  return local(*part);
}

}  // namespace trireme
