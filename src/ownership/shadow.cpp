#include "ownership/shadow.h"

#include <ATen/EmptyTensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>

#include <deque>
#include <mutex>
#include <typeinfo>

#include "trireme/base/error.h"

namespace trireme::ownership {
namespace {

struct StubNode final : torch::autograd::Node {
  using Node::Node;
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    throw StateError(
        "smp: a backward pass was started inside of a step function, at or through a tensor of another stage; call "
        "model.backward(loss), which runs when the forward pass has ended (torch.autograd.grad() and create_graph are "
        "not there yet)");
  }
  std::string name() const override { return "TriremeOtherStage"; }
};

std::string place_text(int stage, const std::string& name) { return str("'", name, "' is on stage ", stage); }

std::string text_of(int stage, const std::string& name) {
  if (!name.empty())
    return str(place_text(stage, name),
               ": inside of a step function every stage may use it in operators, elsewhere stage ", stage,
               " alone; local_parameters() and local_buffers() are what this stage has");
  return str("this tensor was computed by stage ", stage,
             ", and its numbers are there alone: read it by an operator inside of the step function (item() too), or "
             "return it from there");
}

/// One text for all results of a stage: libtorch keeps one in each storage.
const std::string& text_of_results(int stage) {
  static std::mutex mutex;
  static std::deque<std::string> texts;
  const std::lock_guard lock(mutex);
  while (static_cast<int>(texts.size()) <= stage) texts.push_back(text_of(static_cast<int>(texts.size()), ""));
  return texts[stage];
}

}  // namespace

void RemoteStorage::before_access(Access) { throw StateError(text_of(home_.stage, name_)); }

at::Tensor make_shadow(const ToldTensor& told, c10::Device device, const Home& home) {
  const size_t bytes = at::detail::computeStorageNbytes(told.sizes, told.strides, c10::elementSize(told.dtype));
  c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, c10::DataPtr(nullptr, device), nullptr, false);
  StorageHandle::release(*storage.unsafeGetStorageImpl(), std::make_shared<RemoteStorage>(home, ""),
                         text_of_results(home.stage));
  at::Tensor shadow = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::computeDispatchKey(told.dtype, at::kStrided, device)),
      c10::scalarTypeToTypeMeta(told.dtype));
  shadow.unsafeGetTensorImpl()->set_sizes_and_strides(told.sizes, told.strides);
  if (told.is_conjugated) shadow._set_conj(true);
  if (told.is_negated) shadow._set_neg(true);
  return shadow;
}

void make_remote(const at::Tensor& tensor, const Home& home, const std::string& name) {
  StorageHandle::release(*tensor.storage().unsafeGetStorageImpl(), std::make_shared<RemoteStorage>(home, name),
                         text_of(home.stage, name));
}

namespace {
const RemoteStorage* remote_owner(c10::StorageImpl& storage) noexcept {
  ManagedStorage* const owner = StorageHandle::owner_of(storage);
  if (owner == nullptr || typeid(*owner) != typeid(RemoteStorage)) return nullptr;
  return static_cast<const RemoteStorage*>(owner);
}
}  // namespace

const Home* remote_home(c10::StorageImpl& storage) noexcept {
  const RemoteStorage* const owner = remote_owner(storage);
  return owner != nullptr ? &owner->home() : nullptr;
}

NodePtr make_stub(const std::vector<at::Tensor>& arguments) {
  return make_node<StubNode>(torch::autograd::collect_next_edges(arguments));
}

void note_write(const at::Tensor& shadow, const std::vector<at::Tensor>& arguments, bool requires_grad) {
  torch::autograd::impl::bump_version(shadow);
  if (!requires_grad) return;
  NodePtr stub = make_stub(arguments);
  const uint32_t input = stub->add_input_metadata(shadow);
  torch::autograd::impl::rebase_history(shadow, {std::move(stub), input});
}

}  // namespace trireme::ownership

namespace trireme {

std::optional<std::string> elsewhere(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return std::nullopt;
  const auto* const owner = ownership::remote_owner(*tensor.storage().unsafeGetStorageImpl());
  if (owner == nullptr) return std::nullopt;
  return ownership::place_text(owner->home().stage, owner->name());
}

}  // namespace trireme
