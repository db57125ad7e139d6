#include "cli/explain.h"

#include <cstdlib>
#include <new>

#include "trireme/base/error.h"
#include "trireme/observe/progress.h"

namespace trireme::cli {
namespace {

constexpr const char* kWhatToLower =
    "lower the micro-batch (--batch, or train_micro_batch_size_per_gpu in the configuration) or --seq, or take a "
    "smaller "
    "model";

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
    return str("out of memory: ", short_quantity(bytes, "B"), " were asked for at once; ", kWhatToLower);
  }
  return text.substr(0, text.find('\n'));
}

}  // namespace trireme::cli
