// The values of a training that a checkpoint holds besides tensors, with their only reader and writer.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "trireme/checkpoint/manifest.h"

namespace trireme {

/// LossScaler::State, as saved.
struct LossScalerValues {
  double scale = 1;
  int64_t steps = 0;
  int64_t last_overflow = -1;
  int64_t hysteresis = 1;
};

/// The values of one parameter. They are saved with the parameter's weight, by any rank that has a slice of it.
struct ParameterValues {
  std::optional<int64_t> steps = {};  ///< how often the optimizer has updated it
  int group = -1;                     ///< parameter group; -1: none
  int position = 0;                   ///< among the parameters of its group
  std::vector<std::string> aliases = {};
};

/// JSON text; empty where nothing is known.
std::string to_text(const ParameterValues& values);

/// One parameter group.
struct GroupValues {
  std::string options = "{}";  ///< JSON text: "lr", "betas", … as torch's optimizers call them
  std::vector<std::string> names;
};

/// The values of a training that ranks share, and those of its parameters by name.
struct TrainingValues {
  std::optional<int64_t> global_steps = {};
  std::optional<int64_t> micro_steps = {};
  std::optional<int64_t> skipped_steps = {};
  std::optional<int64_t> global_samples = {};
  std::optional<double> lr = {};
  std::vector<double> group_lrs = {};
  std::vector<GroupValues> groups = {};
  std::optional<LossScalerValues> loss_scaler = {};
  std::optional<uint64_t> micro_batch_seed = {};
  std::optional<bool> exclude_frozen_parameters = {};
  std::vector<std::string> parameters = {};         ///< those in `steps`, in the order of the checkpoint
  std::map<std::string, int64_t> steps = {};        ///< by parameter; 0: never updated, for example frozen
  std::map<std::string, std::string> aliases = {};  ///< other name of a tied parameter -> its name
  std::optional<std::string> config = {};           ///< JSON text
  std::optional<std::string> client_state = {};     ///< JSON text
  std::string others = "{}";                        ///< JSON text: keys that are none of these

  void set_steps(const std::string& parameter, int64_t count);
};

/// JSON text, as Manifest::values.
std::string to_text(const TrainingValues& values);

/// Parses Manifest::values and the values of tensors (by tensor name), which take precedence. In format version 1 all
/// are in the former.
/// Throws    CheckpointError: a value of the wrong kind.
TrainingValues parse_training_values(const std::string& values,
                                     const std::vector<std::pair<std::string, std::string>>& tensor_values = {});

/// The same of a whole manifest. Throws likewise.
TrainingValues training_values(const Manifest& manifest);

}  // namespace trireme
