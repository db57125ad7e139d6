// The names of tensors in a checkpoint: "model.NAME" is a weight or buffer, "master.NAME" the fp32 master of a 16-bit
// weight, "optimizer.STATE.NAME" a state that the optimizer keeps of a parameter.
#pragma once

#include <string>
#include <string_view>

namespace trireme {

/// The names above, made of a parameter's or buffer's name in the model.
std::string weight_name(std::string_view parameter);
std::string master_name(std::string_view parameter);
/// `state` has no dot: "exp_avg".
std::string optimizer_state_name(std::string_view state, std::string_view parameter);

enum class StateKind { kWeight, kMaster, kOptimizerState, kOther };

/// A name taken apart. The views are of the text that was parsed.
struct StateName {
  StateKind kind = StateKind::kOther;
  std::string_view parameter;  ///< or buffer; empty: kOther
  std::string_view state;      ///< kOptimizerState: "exp_avg", …
};

/// Takes a name apart; kOther where it has none of the forms above.
StateName parse_state_name(std::string_view name);

}  // namespace trireme
