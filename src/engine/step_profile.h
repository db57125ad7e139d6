// The report that the section flops_profiler asks for, of a C++ program's engine.
#pragma once

#include <torch/nn/module.h>

#include "trireme/engine/run_events.h"

namespace trireme {

class Training;

/// Counts the passes of the step `flops_profiler.profile_step`, and reports them after it: rank 0 writes. A libtorch
/// module has no hooks: an operator belongs to the module of which it uses a parameter, in backward to that of the
/// operator whose gradient it is. Every rank counts alike, since counted operators are taken apart.
///
/// Ordering  called before the first forward; both outlive the functions.
PassWatch flops_profile(const torch::nn::Module& module, const Training& training);

}  // namespace trireme
