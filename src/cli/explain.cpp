#include "cli/explain.h"

#include <array>
#include <cstdio>
#include <cstdlib>
#include <new>

#include "trireme/base/error.h"

namespace trireme::cli {
namespace {

constexpr const char* kWhatToLower =
    "lower the micro-batch (--batch, or train_micro_batch_size_per_gpu in the configuration) or --seq, or take a "
    "smaller "
    "model";

// 141000000000000 -> "141 TB"
std::string short_bytes(double bytes) {
  constexpr std::array kUnits = {"bytes", "kB", "MB", "GB", "TB", "PB", "EB"};
  size_t unit = 0;
  for (; bytes >= 999.5 && unit + 1 < kUnits.size(); ++unit) bytes /= 1000;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.3g %s", bytes, kUnits[unit]);
  return text.data();
}

}  // namespace

std::string explain(const std::exception& error) {
  const std::string text = error.what();
  if (dynamic_cast<const Error*>(&error)) return text;
  if (dynamic_cast<const std::bad_alloc*>(&error)) return str("out of memory; ", kWhatToLower);
  // The words of libtorch's CPU allocator. The type of the error is that of all its errors.
  if (text.find("can't allocate memory") != std::string::npos) {
    const std::string mark = "you tried to allocate ";
    const auto at = text.find(mark);
    const double bytes = at == std::string::npos ? 0 : std::atof(text.c_str() + at + mark.size());
    return str("out of memory: ", short_bytes(bytes), " were asked for at once; ", kWhatToLower);
  }
  return text.substr(0, text.find('\n'));
}

}  // namespace trireme::cli
