// Texts of the pager's errors for features that do not go together, with "{}" for values (base/pattern.h). They are
// rows of exclusions() in trireme/parallel.
#pragma once

namespace trireme {

inline constexpr const char* kSharedOnDevice =
    "trireme.gather: \"shared\" is for parameters on the host, and these are on {}; set it to \"copy\" or \"auto\"";
inline constexpr const char* kSharedWithoutMemory =
    "trireme.gather: \"shared\" needs ranks that share memory, and group '{}' does not; set it to \"copy\" or \"auto\"";
inline constexpr const char* kWeightsOnDiskOfDevice =
    "zero_optimization.offload_param.device: \"nvme\" is for models on the host so far, and this one is on {}; use "
    "\"cpu\", or leave it out";
inline constexpr const char* kReducedOnce =
    "backward: '{}' got a gradient after this window's gradients were read or reduced; with \"deterministic\" do so "
    "after the window's last backward only";
inline constexpr const char* kNoLeafModule =
    "zero_optimization.leaf_module.{}: no module is called \"{}\"; the model has: {}";

}  // namespace trireme
