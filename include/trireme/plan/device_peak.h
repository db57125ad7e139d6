// The highest compute rates of accelerators, from their published data sheets. Pure.
#pragma once

#include <c10/core/ScalarType.h>

#include <optional>
#include <string_view>

namespace trireme {

/// Peak of a device in TFLOP/s (10^12 per second), dense, by the name that its driver gives, such as
/// "NVIDIA H100 80GB HBM3", for matrix products of `dtype` (fp32 without TF32). Nothing where no such figure is
/// certain: another dtype or device, a slice of one (MIG, vGPU), a variant with other clocks.
///
/// Source    NVIDIA's data sheets of A100, H100, H200, L40S and HGX B200; where they give figures with sparsity, half.
///           Test: device_peak_test.cpp.
std::optional<double> peak_tflops(std::string_view device_name, at::ScalarType dtype);

}  // namespace trireme
