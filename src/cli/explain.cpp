#include "cli/explain.h"

#include <cstdlib>
#include <new>

#include "trireme/base/error.h"
#include "trireme/observe/progress.h"

namespace trireme::cli {
namespace {

std::string what_to_lower(const std::string& command) {
  if (command.ends_with(" train"))
    return "lower the micro-batch (--batch, or train_micro_batch_size_per_gpu in the configuration) or --seq, or take "
           "a smaller model";
  if (command.ends_with(" generate"))
    return "the weights, and a pass over prompt and --tokens, must fit: give fewer --tokens or a shorter --prompt, or "
           "more memory";
  if (command.ends_with(" launch") || command.ends_with(" deepspeed")) return "start fewer ranks (--num_gpus)";
  return "end other programs, or run it where there is more memory";
}

}  // namespace

std::string explain(const std::exception& error, const std::string& command) {
  const std::string text = error.what();
  if (dynamic_cast<const Error*>(&error)) return text;
  if (dynamic_cast<const std::bad_alloc*>(&error)) return str("out of memory; ", what_to_lower(command));
  // The words of libtorch's CPU allocator. The type of the error is that of all its errors.
  if (text.find("can't allocate memory") != std::string::npos) {
    const std::string mark = "you tried to allocate ";
    const auto at = text.find(mark);
    const double bytes = at == std::string::npos ? 0 : std::atof(text.c_str() + at + mark.size());
    return str("out of memory: ", short_quantity(bytes, "B"), " were asked for at once; ", what_to_lower(command));
  }
  return text.substr(0, text.find('\n'));
}

}  // namespace trireme::cli
