#include "optim/client.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <iterator>
#include <set>
#include <sstream>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/optim/client_trial.h"

namespace trireme {
namespace {

using torch::optim::OptimizerParamState;

constexpr const char* kSteps = "step";  // the one value beside tensors that torch's optimizers keep

torch::serialize::InputArchive reread(torch::serialize::OutputArchive& written) {
  std::stringstream bytes;
  written.save_to(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(bytes);
  return archive;
}

}  // namespace

class ClientOptimizer::Impl {
 public:
  Impl(const ClientOptimizerFactory& factory, std::vector<at::Tensor> parts, std::vector<std::string> names)
      : parts_(std::move(parts)), names_(std::move(names)), optimizer_(factory(parts_, names_)) {
    const char* fix = "; return a torch::optim optimizer of just the tensors that the factory was given";
    if (!optimizer_) throw ConfigError(str("client_optimizer: the factory returned none", fix));
    if (dynamic_cast<torch::optim::LBFGS*>(optimizer_.get()))
      throw ConfigError("client_optimizer: LBFGS needs a closure, which step() has not; use another optimizer");
    std::set<void*> expected, found;
    for (const at::Tensor& part : parts_) expected.insert(part.unsafeGetTensorImpl());
    for (const auto& group : optimizer_->param_groups())
      for (const at::Tensor& tensor : group.params()) found.insert(tensor.unsafeGetTensorImpl());
    if (expected != found)
      throw ConfigError(str("client_optimizer: the optimizer has ", found.size(), " tensors, the rank ",
                            expected.size(), " parts of parameters, or they are not the same", fix));
  }

  std::vector<double> learning_rates() const {
    std::vector<double> rates;
    for (const auto& group : optimizer_->param_groups()) rates.push_back(group.options().get_lr());
    return rates;
  }

  void step(const std::vector<at::Tensor>& gradients, const std::vector<double>& learning_rates) {
    for (size_t group = 0; group < learning_rates.size(); ++group)
      optimizer_->param_groups()[group].options().set_lr(learning_rates[group]);
    set_gradients(gradients);
    optimizer_->step();
    set_gradients({});
  }

  std::vector<ClientState> states() {
    const at::NoGradGuard no_grad;
    const std::set<size_t> made = make_missing_states();
    std::vector<ClientState> result;
    for (size_t part = 0; part < parts_.size(); ++part) {
      if (!state_of(part)) continue;
      torch::serialize::OutputArchive written;
      state_of(part)->serialize(written);
      torch::serialize::InputArchive archive = reread(written);
      for (const std::string& name : archive.keys()) {
        c10::IValue value;
        archive.read(name, value);
        append(result, part, name, value, made.contains(part));
      }
    }
    for (const size_t part : made) optimizer_->state().erase(key_of(part));
    return result;
  }

  void set_states(const std::vector<ClientState>& states, const std::vector<int64_t>& steps) {
    const at::NoGradGuard no_grad;
    const std::set<size_t> made = make_missing_states();
    for (size_t part = 0; part < parts_.size(); ++part) {
      if (made.contains(part) && steps[part] == 0) {
        optimizer_->state().erase(key_of(part));
        continue;
      }
      if (!state_of(part)) continue;
      torch::serialize::OutputArchive archive;
      archive.write(kSteps, c10::IValue(steps[part]));
      for (const ClientState& state : states)
        if (state.part == part) archive.write(state.name, c10::IValue(state.tensor));
      torch::serialize::InputArchive input = reread(archive);
      state_of(part)->serialize(input);
    }
  }

 private:
  void* key_of(size_t part) const { return parts_[part].unsafeGetTensorImpl(); }

  OptimizerParamState* state_of(size_t part) const {
    const auto found = optimizer_->state().find(key_of(part));
    return found == optimizer_->state().end() ? nullptr : found->second.get();
  }

  void set_gradients(const std::vector<at::Tensor>& gradients) {
    for (size_t part = 0; part < parts_.size(); ++part)
      parts_[part].mutable_grad() = gradients.empty() ? at::Tensor() : gradients[part];
  }

  /// A step without gradients to speak of makes the states of parts that have none; the parts themselves are put back.
  std::set<size_t> make_missing_states() {
    std::set<size_t> missing;
    std::vector<at::Tensor> gradients(parts_.size()), before(parts_.size());
    for (size_t part = 0; part < parts_.size(); ++part) {
      if (state_of(part)) continue;
      missing.insert(part);
      gradients[part] = at::zeros_like(parts_[part]);
      before[part] = parts_[part].clone();
    }
    if (missing.empty()) return missing;
    set_gradients(gradients);
    optimizer_->step();
    set_gradients({});
    for (auto part = missing.begin(); part != missing.end();) {
      parts_[*part].copy_(before[*part]);
      part = state_of(*part) ? std::next(part) : missing.erase(part);  // plain SGD keeps none
    }
    return missing;
  }

  void append(std::vector<ClientState>& result, size_t part, const std::string& name, const c10::IValue& value,
              bool is_made) const {
    if (value.isNone() || (value.isTensor() && !value.toTensor().defined())) return;
    if (value.isInt() && name == kSteps) return;  // saved as the parameter's step count
    const bool fits = value.isTensor() && value.toTensor().sizes() == parts_[part].sizes();
    if (!fits)
      throw CheckpointError(
          str("client_optimizer: its state '", name, "' of parameter '", names_[part], "' is ",
              value.isTensor() ? str("a tensor of shape ", value.toTensor().sizes()) : value.tagKind(),
              ", not a tensor of the shard's shape ", parts_[part].sizes(),
              ", so it cannot be saved; use an optimizer that works element by element"));
    result.push_back({part, name, is_made ? at::zeros_like(value.toTensor()) : value.toTensor()});
  }

  std::vector<at::Tensor> parts_;
  std::vector<std::string> names_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
};

ClientOptimizer::ClientOptimizer(const ClientOptimizerFactory& factory, std::vector<at::Tensor> parts,
                                 std::vector<std::string> names)
    : impl_(std::make_unique<Impl>(factory, std::move(parts), std::move(names))) {}
ClientOptimizer::~ClientOptimizer() = default;

std::vector<double> ClientOptimizer::learning_rates() const { return impl_->learning_rates(); }

void ClientOptimizer::step(const std::vector<at::Tensor>& gradients, const std::vector<double>& learning_rates) {
  impl_->step(gradients, learning_rates);
}

std::vector<ClientState> ClientOptimizer::states() { return impl_->states(); }

void ClientOptimizer::set_states(const std::vector<ClientState>& states, const std::vector<int64_t>& steps) {
  impl_->set_states(states, steps);
}

void try_client_optimizer(const ClientOptimizerFactory& factory, const std::vector<ParameterSpec>& parameters,
                          c10::Device device) {
  std::vector<at::Tensor> parts;
  std::vector<std::string> names;
  for (const ParameterSpec& parameter : parameters) {
    if (!parameter.trainable) continue;
    parts.push_back(at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(device)));
    names.push_back(parameter.name);
  }
  const ClientOptimizer tried(factory, std::move(parts), std::move(names));
}

}  // namespace trireme
