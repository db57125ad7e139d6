// The version of this library, as checkpoints and reports record it. The same as in CMakeLists.txt.
#pragma once

namespace trireme {

inline constexpr char kVersion[] = "0.1.0";

}  // namespace trireme
