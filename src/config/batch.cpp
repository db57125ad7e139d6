#include <limits>

#include "config/read_parts.h"

namespace trireme {
namespace {

constexpr int64_t kAbsent = 0;
constexpr int64_t kLargest = std::numeric_limits<int32_t>::max();

struct Size {
  const char* key;
  const char* words;  ///< in DeepSpeed's texts
};
constexpr Size kTrain = {"train_batch_size", "Train batch size"};
constexpr Size kMicro = {"train_micro_batch_size_per_gpu", "Micro batch size per gpu"};
constexpr Size kSteps = {"gradient_accumulation_steps", "Gradient accumulation steps"};

void check_positive(const Size& size, int64_t value) {
  if (value <= 0) throw ConfigError(str(size.words, ": ", value, " has to be greater than 0"), ErrorCode::kBatchSize);
}

int64_t read_size(Section& top, const Size& size) {
  if (!top.has(size.key)) return kAbsent;
  // DeepSpeed's own text for what is too small.
  const int64_t value = top.integer_or(size.key, kAbsent, {.max = kLargest, .words = "an integer up to 2147483647"});
  check_positive(size, value);
  return value;
}

/// Of positive factors; saturates.
int64_t product(int64_t a, int64_t b, int64_t c) {
  int64_t ab = 0, abc = 0;
  const bool overflow = __builtin_mul_overflow(a, b, &ab) || __builtin_mul_overflow(ab, c, &abc);
  return overflow ? std::numeric_limits<int64_t>::max() : abc;
}

}  // namespace

BatchSizes read_batch_sizes(Section& top, int world_size) {
  int64_t train = read_size(top, kTrain);
  int64_t micro = read_size(top, kMicro);
  int64_t steps = read_size(top, kSteps);
  if (train == kAbsent && micro == kAbsent)
    throw ConfigError("Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
                      ErrorCode::kBatchSize);

  if (train != kAbsent && micro != kAbsent) {
    if (steps == kAbsent) steps = train / micro / world_size;
  } else {
    if (steps == kAbsent) steps = 1;
    if (micro == kAbsent) micro = train / world_size / steps;
    if (train == kAbsent) train = product(micro, steps, world_size);
  }
  check_positive(kMicro, micro);
  check_positive(kSteps, steps);
  const int64_t expected = product(micro, steps, world_size);
  if (train != expected)
    throw ConfigError(str("Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
                          "gradient_acc_step * world_size ",
                          train, " != ", micro, " * ", steps, " * ", world_size, "\nSet train_batch_size to ", expected,
                          ", or leave one of the three out: it follows from the other two."),
                      ErrorCode::kBatchSize);
  return {.train_batch_size = train, .train_micro_batch_size_per_gpu = micro, .gradient_accumulation_steps = steps};
}

}  // namespace trireme
