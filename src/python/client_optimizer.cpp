#include "python/client_optimizer.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include "trireme/base/error.h"

namespace trireme::python {
namespace {

class RateOptions final : public torch::optim::OptimizerOptions {
 public:
  explicit RateOptions(double lr) : lr_(lr) {}
  std::unique_ptr<OptimizerOptions> clone() const override { return std::make_unique<RateOptions>(lr_); }
  double get_lr() const override { return lr_; }
  void set_lr(const double lr) override { lr_ = lr; }

 private:
  double lr_;
};

/// The state that the Python optimizer keeps of one part; it goes when this goes.
class PartState final : public torch::optim::OptimizerParamState {
 public:
  PartState(std::shared_ptr<py::object> optimizer, size_t part) : optimizer_(std::move(optimizer)), part_(part) {}
  PartState(const PartState&) = delete;
  PartState& operator=(const PartState&) = delete;
  ~PartState() override {
    const py::gil_scoped_acquire gil;
    try {
      optimizer_->attr("drop_state")(part_);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("trireme's client optimizer");
    }
  }

  void serialize(torch::serialize::OutputArchive& archive) const override {
    const py::gil_scoped_acquire gil;
    for (const auto& [name, value] : optimizer_->attr("state")(part_).cast<py::dict>()) {
      const auto key = name.cast<std::string>();
      if (THPVariable_Check(value.ptr()))
        archive.write(key, c10::IValue(value.cast<at::Tensor>()));
      else
        archive.write(key, c10::IValue(value.cast<int64_t>()));
    }
  }

  void serialize(torch::serialize::InputArchive& archive) override {
    const py::gil_scoped_acquire gil;
    py::dict state;
    for (const std::string& name : archive.keys()) {
      c10::IValue value;
      archive.read(name, value);
      state[name.c_str()] = value.isTensor() ? py::cast(value.toTensor()) : py::cast(value.toInt());
    }
    optimizer_->attr("set_state")(part_, state);
  }

 private:
  const std::shared_ptr<py::object> optimizer_;
  const size_t part_;
};

class ClientOfPython final : public torch::optim::Optimizer {
 public:
  ClientOfPython(std::shared_ptr<py::object> optimizer, const std::vector<at::Tensor>& parts,
                 std::vector<torch::optim::OptimizerParamGroup> groups)
      : Optimizer(std::move(groups), std::make_unique<RateOptions>(0)),
        optimizer_(std::move(optimizer)),
        parts_(parts) {}

  at::Tensor step(LossClosure) override {
    const py::gil_scoped_acquire gil;
    std::vector<double> rates;
    for (const auto& group : param_groups_) rates.push_back(group.options().get_lr());
    const auto with_state = optimizer_->attr("step")(rates).cast<std::vector<size_t>>();
    for (const size_t part : with_state) {
      auto& state = state_[parts_[part].unsafeGetTensorImpl()];
      if (!state) state = std::make_unique<PartState>(optimizer_, part);
    }
    return {};
  }

 private:
  const std::shared_ptr<py::object> optimizer_;
  const std::vector<at::Tensor> parts_;
};

std::unique_ptr<torch::optim::Optimizer> make_client(const py::object& make, const std::vector<at::Tensor>& parts,
                                                     const std::vector<std::string>& names) {
  const py::gil_scoped_acquire gil;
  const auto optimizer = shared(make(parts, names));
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const py::handle group : optimizer->attr("groups")().cast<py::list>()) {
    const auto [members, lr] = group.cast<std::pair<std::vector<size_t>, double>>();
    std::vector<at::Tensor> tensors;
    for (const size_t part : members) tensors.push_back(parts[part]);
    groups.emplace_back(std::move(tensors), std::make_unique<RateOptions>(lr));
  }
  return std::make_unique<ClientOfPython>(optimizer, parts, std::move(groups));
}

}  // namespace

ClientOptimizerFactory client_optimizer_factory(const py::object& make) {
  const auto held = shared(make);
  return [held](const std::vector<at::Tensor>& parts, const std::vector<std::string>& names) {
    return make_client(*held, parts, names);
  };
}

}  // namespace trireme::python
