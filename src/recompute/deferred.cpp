#include "recompute/deferred.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Type.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <typeinfo>

#include "trireme/base/error.h"

namespace trireme::detail {
namespace {

using torch::autograd::Node;

// An operator makes fewer autograd nodes than this in a row.
constexpr int kNodesPerOperator = 64;

/// Not a custom function of a program, which may do anything with the gradient.
bool is_of_libtorch(const Node& node) {
  return c10::demangle(typeid(node).name()).starts_with("torch::autograd::generated::");
}

/// This thread's dispatch keys, without what excludes autograd.
c10::impl::LocalDispatchKeySet with_autograd() {
  c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  keys.excluded_ = keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  return keys;
}

}  // namespace

/// Autograd's node of a deferred tensor. Passes gradients on to the operators of the expression, once they have run.
class Deferred::Join final : public Node {
 public:
  /// The edges stand for those of the operators: libtorch orders nodes by the length of their way to the leaves.
  Join(torch::autograd::edge_list edges, int operators) : Node(std::move(edges)) {
    topological_nr_ += static_cast<uint64_t>(operators) * kNodesPerOperator;
  }
  void lead_to(torch::autograd::Edge edge) {
    TRIREME_CHECK(edge.function->topological_nr() < topological_nr_, edge.function->name());
    next_edges_ = {std::move(edge)};
    is_joined_ = true;
  }
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    TRIREME_CHECK(is_joined_, "gradient of a tensor that was not computed");
    return std::move(gradients);
  }
  std::string name() const override { return "TriremeDeferred"; }

 private:
  bool is_joined_ = false;
};

at::Tensor Deferred::make(Parts parts, at::IntArrayRef sizes, const at::Tensor& sample) {
  auto deferred = std::make_shared<Deferred>();
  deferred->parts_ = std::move(parts);
  deferred->sizes_ = sizes.vec();
  deferred->width_ = sample.size(-1);
  deferred->dtype_ = sample.scalar_type();
  const Parts& own = deferred->parts_;
  std::vector<at::Tensor> inputs = own.expression->captured();
  inputs.push_back(own.rows);
  for (const at::Tensor& input : inputs)
    deferred->versions_.push_back({input, static_cast<uint32_t>(input._version())});
  deferred->join_ = make_node<Join>(torch::autograd::collect_next_edges(inputs), own.expression->size());

  const int64_t bytes = c10::multiply_integers(sizes) * static_cast<int64_t>(sample.element_size());
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, sample.device()), nullptr, false);
  deferred->storage_ = storage.getWeakStorageImpl();
  StorageHandle::release(*storage.unsafeGetStorageImpl(), deferred,
                         "This tensor is computed in tiles, and its data are not there: read it by an operator first, "
                         "such as clone() or detach()");
  at::Tensor tensor = at::empty({0}, sample.options());
  tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  torch::autograd::set_history(tensor, deferred->join_);
  return tensor;
}

std::shared_ptr<Deferred> Deferred::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  c10::StorageImpl& storage = *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  if (dynamic_cast<Deferred*>(StorageHandle::owner_of(storage)) == nullptr) return nullptr;
  return std::static_pointer_cast<Deferred>(StorageHandle::share_owner_of(storage));
}

void Deferred::materialize() {
  const auto self = shared_from_this();  // the storage lets go of it below
  const auto storage = storage_.lock();
  if (!storage || StorageHandle::owner_of(*storage) != this) return;
  check_versions();
  // The operators are as if the program had called them where it called the product: with a graph, also where a factory
  // of libtorch's (zeros_like()) has gone below autograd, and seen by the hooks on saved tensors of then alone.
  const at::AutoGradMode with_graph(true);
  const c10::impl::ForceDispatchKeyGuard above_factories(with_autograd());
  const SaveMoment::Scope as_then(moment_);
  const at::Tensor value = parts_.expression->evaluate({parts_.rows}).contiguous().view(sizes_);
  static_cast<Join&>(*join_).lead_to(torch::autograd::impl::gradient_edge(value));
  // Autograd may have saved `value` itself, so both storages share the memory.
  auto* shared = new c10::Storage(value.storage());
  c10::DataPtr data(
      value.data_ptr(), shared, [](void* context) { delete static_cast<c10::Storage*>(context); }, value.device());
  StorageHandle::give(*storage, std::move(data), storage->nbytes());
}

bool Deferred::starts_from(const c10::StorageImpl* storage) const {
  return parts_.rows.storage().unsafeGetStorageImpl() == storage;
}

void Deferred::check_versions() const {
  for (const Version& input : versions_)
    if (static_cast<uint32_t>(input.tensor._version()) != input.version)
      throw StateError(
          str("a tensor of ", width_, " columns that is computed in tiles was read after the weight or input ",
              input.tensor.sizes(), " that it depends on was written; read it before the optimizer's step"));
}

bool Deferred::is_plain_view(const at::Tensor& tensor) const {
  Node* node = tensor.grad_fn().get();
  while (node != nullptr) {
    if (!node->tensor_pre_hooks().empty() || !node->pre_hooks().empty() || !node->post_hooks().empty() ||
        !node->retains_grad_hooks().empty())
      return false;
    if (node == join_.get()) return true;
    if (!is_of_libtorch(*node) || node->num_outputs() != 1) return false;
    node = node->next_edge(0).function.get();
  }
  return false;
}

at::Tensor DeferredRows::leaf() const {
  const at::Tensor& rows = deferred->parts().rows;
  return row_numbers.defined() ? rows.index_select(0, row_numbers) : rows;
}

std::optional<DeferredRows> deferred_rows(const at::Tensor& tensor) {
  auto deferred = Deferred::of(tensor);
  if (!deferred || tensor.dim() < 2 || tensor.numel() == 0 || tensor.scalar_type() != deferred->dtype()) return {};
  const int64_t width = deferred->width();
  const int64_t begin = tensor.storage_offset() % width, columns = tensor.size(-1);
  if (begin + columns > width || (columns > 1 && tensor.stride(-1) != 1)) return {};
  std::vector<int64_t> sizes, strides;
  for (int64_t dim = 0; dim < tensor.dim() - 1; ++dim) {
    if (tensor.size(dim) == 1) continue;
    if (tensor.stride(dim) % width != 0) return {};
    sizes.push_back(tensor.size(dim));
    strides.push_back(tensor.stride(dim) / width);
  }
  DeferredRows result{.deferred = deferred, .expression = deferred->parts().expression, .row_numbers = {}};
  if (columns != width) result.expression = RowExpression::columns(result.expression, begin, columns);
  const int64_t rows = deferred->parts().rows.size(0), first = tensor.storage_offset() / width;
  int64_t expected = 1;
  bool in_order = first == 0 && tensor.numel() == rows * columns;
  for (size_t dim = sizes.size(); dim-- > 0; expected *= sizes[dim]) in_order = in_order && strides[dim] == expected;
  if (!in_order)
    result.row_numbers = at::arange(rows, tensor.options().dtype(at::kLong).requires_grad(false))
                             .as_strided(sizes, strides, first)
                             .reshape(-1);
  return result;
}

}  // namespace trireme::detail
