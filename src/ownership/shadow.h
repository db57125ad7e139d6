// Tensors whose numbers are on another stage.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "ownership/sizes.h"
#include "trireme/base/torch/nodes.h"
#include "trireme/intercept.h"
#include "trireme/ownership/home.h"

namespace trireme::ownership {

/// The storage of a tensor of another stage: no bytes, and an error for whoever asks for them.
class RemoteStorage final : public ManagedStorage {
 public:
  /// `name`: of a parameter or buffer; empty: a result.
  RemoteStorage(const Home& home, std::string name) : home_(home), name_(std::move(name)) {}
  const Home& home() const { return home_; }
  const std::string& name() const { return name_; }
  /// Throws StateError: what to do instead.
  void before_access(Access access) override;

 private:
  const Home home_;
  const std::string name_;
};

/// A tensor of `told`'s sizes, strides, dtype and device, without memory and without a graph. Views of it are views.
at::Tensor make_shadow(const ToldTensor& told, c10::Device device, const Home& home);

/// Takes the memory of `tensor` away; sizes, strides and the tensor itself stay.
void make_remote(const at::Tensor& tensor, const Home& home, const std::string& name);

/// The home of a storage that is remote; null: it is not.
const Home* remote_home(c10::StorageImpl& storage) noexcept;

/// A node of autograd's with edges to `arguments` that never runs: it makes grad_fn, is_leaf and checks of writes
/// right.
NodePtr make_stub(const std::vector<at::Tensor>& arguments);

/// `shadow` has been written, by an operator whose result needs a gradient or not.
void note_write(const at::Tensor& shadow, const std::vector<at::Tensor>& arguments, bool requires_grad);

}  // namespace trireme::ownership
