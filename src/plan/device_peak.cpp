#include "trireme/plan/device_peak.h"

#include <algorithm>
#include <cctype>
#include <string>

namespace trireme {
namespace {

struct DevicePeak {
  std::string_view name;              // as name_without_size() leaves it
  double half_tflops;                 // bf16 and fp16
  std::optional<double> fp32_tflops;  // without TF32
};

// An "H100 80GB HBM3" is the SXM module.
constexpr DevicePeak kDevicePeaks[] = {
    {"a100 sxm4", 312, 19.5},
    {"a100 pcie", 312, 19.5},
    {"h100 hbm3", 989.4, 67},
    {"h100 pcie", 756, 51},
    {"h200", 989.4, 67},
    {"l40s", 362, 91.6},
    // NVIDIA has published 75 and 80 for its fp32.
    {"b200", 2250, std::nullopt},
};

bool is_size(std::string_view word) {
  return word.ends_with("gb") && std::all_of(word.begin(), word.end() - 2, [](char c) { return c >= '0' && c <= '9'; });
}

// "NVIDIA A100-SXM4-80GB" -> "a100 sxm4". Whatever else a name says stays: "MIG 1g.10gb" or "NVL" is another device.
std::string name_without_size(std::string_view name) {
  std::string words, word;
  const auto end_word = [&] {
    if (!word.empty() && word != "nvidia" && !is_size(word)) words += (words.empty() ? "" : " ") + word;
    word.clear();
  };
  for (const char c : name) {
    if (c == ' ' || c == '-') {
      end_word();
    } else {
      word += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    }
  }
  end_word();
  return words;
}

}  // namespace

std::optional<double> peak_tflops(std::string_view device_name, at::ScalarType dtype) {
  const std::string name = name_without_size(device_name);
  for (const auto& device : kDevicePeaks) {
    if (name != device.name) continue;
    if (dtype == at::kBFloat16 || dtype == at::kHalf) return device.half_tflops;
    if (dtype == at::kFloat) return device.fp32_tflops;
  }
  return std::nullopt;
}

}  // namespace trireme
