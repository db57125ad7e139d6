// zero::GatheredParameters: a scope in which sharded parameters are whole on every rank, to read or to write.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "trireme/intercept.h"

namespace torch::nn {
class Module;
}

namespace trireme {
class HeldStorage;
}

namespace trireme::zero {

/// Options of GatheredParameters, as in DeepSpeed.
struct GatheredOptions {
  /// The rank (of the parameters' group) whose values all ranks get at close(). Without one no rank may write.
  std::optional<int> modifier_rank = {};
  /// False: the scope does nothing.
  bool enabled = true;
};

/// While it lives, parameters are whole: their data may be read directly, and with a modifier_rank written, by
/// operators or through data_ptr(). Works at every ZeRO stage, and before initialize() for parameters that zero::Init
/// has sharded. Under tensor parallelism the parameter is still this rank's slice: safe_get_full_fp32_param() joins
/// slices.
///
///   zero::GatheredParameters whole({net->head->weight}, {.modifier_rank = 0});
///   if (rank == 0) torch::nn::init::normal_(net->head->weight);
///   whole.close();
///
/// Ordering  the constructor and close() are collective over the parameters' group, the destructor is local. step(),
///           zero_grad(), load_checkpoint() and destroy() are refused inside, with a modifier_rank save_checkpoint()
///           too.
/// Cost      memory for the whole parameters on every rank (without modifier_rank none where they are whole anyway);
///           close() broadcasts their bytes.
/// Throws    StateError that names the parameter: it is in another scope, and one of the two has a modifier_rank; a
///           write by an operator without modifier_rank, when it happens; a modifier_rank where layers are cut.
///           ConfigError: no such rank. Tensors that nobody shards are whole as they are; a modifier_rank other than 0
///           is a StateError for them (initialize() takes rank 0's).
class [[nodiscard]] GatheredParameters {
 public:
  explicit GatheredParameters(const std::vector<at::Tensor>& parameters, const GatheredOptions& options = {});
  /// All parameters of a module (or a ModuleHolder) and of the modules in it.
  template <class Net>
  requires requires(const Net& net) { net.parameters(); } || requires(const Net& net) {
    net->parameters();
  }
  explicit GatheredParameters(const Net& net, const GatheredOptions& options = {})
      : GatheredParameters(parameters_of(net), options) {}
  /// Ends the scope. One with a modifier_rank that ends without close() (an error inside of it) leaves its parameters
  /// unusable for step(), save_checkpoint() and initialize(), which say so, until another such scope was closed.
  ~GatheredParameters();
  GatheredParameters(const GatheredParameters&) = delete;
  GatheredParameters& operator=(const GatheredParameters&) = delete;

  /// Gives every rank modifier_rank's values, and ends the scope. Collective where there is a modifier_rank.
  void close();

 private:
  class Hold;

  template <class Net>
  static std::vector<at::Tensor> parameters_of(const Net& net) {
    if constexpr (requires { net.parameters(); })
      return net.parameters();
    else
      return net->parameters();
  }

  const GatheredOptions options_;
  std::vector<std::unique_ptr<Hold>> holds_;
  std::optional<InterceptScope> scope_;  ///< so that writes are seen before initialize() as well
};

/// Does nothing; for programs written for DeepSpeed. A parameter that another module uses is found by its storage, so
/// it need not be registered. Throws ShapeError: not a parameter.
void register_external_parameter(const torch::nn::Module& module, const at::Tensor& parameter);
/// As register_external_parameter.
void unregister_external_parameter(const torch::nn::Module& module, const at::Tensor& parameter);

}  // namespace trireme::zero
