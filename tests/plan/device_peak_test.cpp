#include "trireme/plan/device_peak.h"

#include <gtest/gtest.h>

namespace trireme {
namespace {

struct Published {
  const char* name;
  double half_tflops;
  double fp32_tflops;
};

TEST(DevicePeak, IsThatOfTheDataSheetUnderEachNameThatTheDriverGives) {
  const std::vector<Published> devices = {
      {"NVIDIA A100-SXM4-40GB", 312, 19.5}, {"NVIDIA A100-SXM4-80GB", 312, 19.5}, {"A100-SXM4-40GB", 312, 19.5},
      {"NVIDIA A100-PCIE-40GB", 312, 19.5}, {"NVIDIA A100 80GB PCIe", 312, 19.5}, {"NVIDIA H100 80GB HBM3", 989.4, 67},
      {"NVIDIA H100 PCIe", 756, 51},        {"NVIDIA H200", 989.4, 67},           {"NVIDIA L40S", 362, 91.6}};
  for (const auto& device : devices) {
    EXPECT_EQ(peak_tflops(device.name, at::kBFloat16), device.half_tflops) << device.name;
    EXPECT_EQ(peak_tflops(device.name, at::kHalf), device.half_tflops) << device.name;
    EXPECT_EQ(peak_tflops(device.name, at::kFloat), device.fp32_tflops) << device.name;
  }
  EXPECT_EQ(peak_tflops("NVIDIA B200", at::kBFloat16), 2250);
}

TEST(DevicePeak, IsNotGuessed) {
  for (const char* name :
       {"", "cpu", "NVIDIA", "NVIDIA H100 NVL", "NVIDIA H200 NVL", "NVIDIA GH200 480GB", "NVIDIA GB200", "NVIDIA A100X",
        "NVIDIA A100-SXM-64GB", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA L40S-48Q", "NVIDIA L40", "NVIDIA H20",
        "NVIDIA GeForce RTX 4090", "AMD Instinct MI300X"})
    for (const auto dtype : {at::kBFloat16, at::kFloat}) EXPECT_EQ(peak_tflops(name, dtype), std::nullopt) << name;
  EXPECT_EQ(peak_tflops("NVIDIA H200", at::kDouble), std::nullopt);
  EXPECT_EQ(peak_tflops("NVIDIA B200", at::kFloat), std::nullopt);
}

}  // namespace
}  // namespace trireme
