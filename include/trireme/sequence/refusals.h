// Texts of errors for features that do not go together with sequence parallelism, with "{}" for values
// (base/pattern.h). They are rows of exclusions() in trireme/parallel.
#pragma once

namespace trireme {

inline constexpr const char* kRingRefusal =
    "scaled_dot_product_attention in a ring: {}; use SequenceAttention::kUlysses";

}  // namespace trireme
