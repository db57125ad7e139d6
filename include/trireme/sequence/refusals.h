// Texts of errors for features that do not go together with sequence parallelism, with "{}" for values
// (base/pattern.h). They are rows of exclusions() in trireme/parallel.
#pragma once

namespace trireme {

inline constexpr const char* kRingRefusal =
    "scaled_dot_product_attention in a ring: {}; use SequenceAttention::kUlysses";
inline constexpr const char* kMadeByLength =
    "{} joins {}, sharded along the sequence in dim {}, with {}, which is not: the model made it by the length that it "
    "has seen, so it is that of the first tokens on every rank. Pass it through cut(), or give the model position_ids "
    "that are";

}  // namespace trireme
