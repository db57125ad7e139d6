// Cuts a model over stages in the order in which a program uses its parameters.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::pipeline {

/// Parameters that stay together, such as a module's own. Atoms stand in the order in which a program first uses them.
struct Atom {
  std::string name;            ///< of the module, for errors
  int64_t cost = 0;            ///< in any unit
  int64_t bytes = 0;           ///< of memory that it takes on its stage
  int64_t crossing_bytes = 0;  ///< of messages per micro-batch, where a stage ends with it
};

/// Stage s has the atoms [result[s], result[s + 1]); result [stages + 1]. Of the cuts whose stages take at most
/// `limit_bytes` each, and whose heaviest stage is at most 2 % heavier than that of the best one, the cut with the
/// fewest crossing bytes; of these the one whose heaviest stage is the lightest; of equal ones stages begin later. Each
/// stage has an atom where there are as many; with fewer, the last stages have none.
///
/// Cost      atoms² · stages.
/// Throws    ConfigError: a number below 0, or no cut stays within `limit_bytes`; names what takes too much, and the
///           least limit for which there is one.
std::vector<int64_t> ordered_partition(const std::vector<Atom>& atoms, int stages, int64_t limit_bytes);

}  // namespace trireme::pipeline
