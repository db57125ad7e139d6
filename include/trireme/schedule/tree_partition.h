// Places a tree of modules on stages by the algorithm that SageMaker's smp has published.
#pragma once

#include <cstdint>
#include <vector>

namespace trireme::pipeline {

/// A module. Children stand after their parents, and children of one parent in the order in which a program calls them.
struct TreeModule {
  int parent = -1;       ///< its index; of the first module, the root: -1
  int64_t own_cost = 0;  ///< without its children, in any unit
};

/// The stage of each module. Breadth first: a module with several devices cuts its children into as many contiguous
/// segments, so that the heaviest is as light as possible, and gives its devices, in order, to the segment of the
/// highest quotient of D'Hondt, cost / (devices that it has + 1); a segment without one gets the first of its parent's.
/// A module's own parameters are on the first of its devices.
///
/// Stages may be empty, and need not follow the order of the program: ordered_partition() makes better pipelines.
///
/// Throws    ConfigError: a cost below 0, or a parent that does not stand before its child.
/// Source    Karakus et al., Amazon SageMaker Model Parallelism, arXiv:2111.05972, Algorithms 1 to 3.
std::vector<int> tree_partition(const std::vector<TreeModule>& modules, int stages);

}  // namespace trireme::pipeline
