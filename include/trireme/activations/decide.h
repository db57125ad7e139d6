// Exchanges of ranks, decided so that each runs an operator on what it has: a pure function of a row and placements.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "trireme/activations/placement.h"
#include "trireme/activations/steps.h"
#include "trireme/operators/row.h"

namespace trireme {

/// The needs, the call and the results of each rank, alike on all.
struct Decision {
  std::vector<Placement> arguments;  ///< that they must have, by tensor
  std::vector<Placement> results;    ///< that they get
  std::vector<Placement> returned;   ///< that these are exchanged to afterwards
  /// Results along an axis on which ranks have reduced a factor.
  struct Join {
    int axis;
    FactorKind kind;
    std::vector<double> shares;  ///< by position: how much of the factor it has, the weight of a mean
  };
  std::vector<Join> joins;   ///< to be undone from the last one on
  std::vector<int> divided;  ///< axes along which ranks compute something else
  /// An axis that gathers small tensors alone, along which nothing is known but to gather a large one.
  struct Refusal {
    int axis;
    size_t argument;  ///< the largest that is cut along it
    FactorKind kind;  ///< of the factor that it is cut along; kEach where there is none
  };
  std::optional<Refusal> refusal = {};
  std::vector<LocalRow> local;  ///< by position
};

/// Along each axis a factor is chosen, or none: then all that is cut along it becomes whole. Any choice of a factor
/// that is not mixed gives right results; this one moves few elements. `row` outlives the decision.
///
/// An axis of kMove gathers an argument only where its whole has no more elements than the largest tensor that a rank
/// has anyway. Where no factor can be divided as it is cut, in this order: pieces that leave a rank nothing get ranges
/// of which each rank has an equal share; fewer elements than ranks are computed where they are, and every rank gets
/// the result; another factor, that arguments and results have, is divided, and results that have the first one come
/// back to it.
///
/// `leads`: by argument; factors of one with a greater number come first (a parameter's, before those of activations);
/// empty: none leads.
///
/// Where an axis cuts what another one leaves, every position on that one is looked at: ranks that decided by their own
/// sizes alone would decide differently, and the next exchange would join unlike tensors.
/// `undivided`: by axis; empty: all gather.
Decision decide(const Row& row, const std::vector<Placement>& arguments, const AxisGrid& grid,
                const std::vector<int>& leads = {}, const std::vector<Undivided>& undivided = {});

}  // namespace trireme
