// Hooks by which libtorch answers about a tensor's history outside of operators, and others in front of them.
#pragma once

#include <ATen/core/TensorBase.h>
#include <ATen/core/VariableHooksInterface.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "trireme/base/torch/nodes.h"

namespace trireme {

/// Hands every call on to `real`. A function that a later libtorch adds is pure there: this class no longer compiles.
class ForwardingVariableHooks : public at::impl::VariableHooksInterface {
 public:
  using Base = at::TensorBase;
  explicit ForwardingVariableHooks(const at::impl::VariableHooksInterface& real) : real_(real) {}

  Base tensor_data(const Base& self) const override { return real_.tensor_data(self); }
  Base variable_data(const Base& self) const override { return real_.variable_data(self); }
  const NodePtr& grad_fn(const Base& self) const override { return real_.grad_fn(self); }
  unsigned _register_hook(const Base& self, std::function<Base(const Base&)> hook) const override {
    return real_._register_hook(self, std::move(hook));
  }
  void remove_hook(const Base& self, unsigned place) const override { real_.remove_hook(self, place); }
  bool is_view(const Base& self) const override { return real_.is_view(self); }
  const Base& base(const Base& self) const override { return real_.base(self); }
  const std::string& name(const Base& self) const override { return real_.name(self); }
  bool is_leaf(const Base& self) const override { return real_.is_leaf(self); }
  int64_t output_nr(const Base& self) const override { return real_.output_nr(self); }
  void set_data(const Base& self, const Base& data) const override { real_.set_data(self, data); }
  Base data(const Base& self) const override { return real_.data(self); }
  int64_t _version(const Base& self) const override { return real_._version(self); }
  void retain_grad(const Base& self) const override { real_.retain_grad(self); }
  bool retains_grad(const Base& self) const override { return real_.retains_grad(self); }
  void _backward(const at::Tensor& self, at::TensorList inputs, const std::optional<at::Tensor>& gradient,
                 std::optional<bool> keep_graph, bool create_graph) const override {
    real_._backward(self, inputs, gradient, keep_graph, create_graph);
  }
  void requires_grad_(const Base& self, bool requires_grad) const override {
    real_.requires_grad_(self, requires_grad);
  }
  void basic_autograd_not_implemented_fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                                               torch::jit::Stack* stack) const override {
    real_.basic_autograd_not_implemented_fallback(op, keys, stack);
  }
  std::optional<c10::ScalarType> grad_dtype(const Base& self) const override { return real_.grad_dtype(self); }
  void set_grad_dtype(const Base& self, const std::optional<c10::ScalarType>& dtype) const override {
    real_.set_grad_dtype(self, dtype);
  }

 protected:
  const at::impl::VariableHooksInterface& real() const { return real_; }

 private:
  const at::impl::VariableHooksInterface& real_;
};

}  // namespace trireme
