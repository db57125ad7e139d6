// The reduced gradients of a window that is open, of which each rank has some elements: for programs that clip and step
// by themselves, as FSDP's do.
#pragma once

#include "trireme/training/training.h"

namespace trireme {

/// How many ranks have each element: more than one where shards have replicas, or nothing is sharded.
int copies_of_gradients(const Training& training);

/// Their L2 norm, in fp64. Reduces what is not reduced yet. Collective.
double norm_of_gradients(Training& training);

/// Multiplies them, which is then a write of the program's. Local; after they were reduced.
void scale_gradients(Training& training, double factor);

}  // namespace trireme
