#include <limits>

#include "config/options.h"

namespace trireme {
namespace {

constexpr int64_t kAbsent = 0;

struct Size {
  const char* key;
  const char* words;  ///< in DeepSpeed's texts
};
constexpr Size kTrain = {"train_batch_size", "Train batch size"};
constexpr Size kMicro = {"train_micro_batch_size_per_gpu", "Micro batch size per gpu"};
constexpr Size kSteps = {"gradient_accumulation_steps", "Gradient accumulation steps"};

/// DeepSpeed's own text, which people search for, and below it key, value and fix as in every other error.
[[noreturn]] void refuse(const Document& file, const Size& size, const std::string& their_text,
                         const std::string& our_text) {
  throw KeyError(str(their_text, "\n", file.origin(), ": ", our_text), ErrorCode::kBatchSize, file.path_of(size.key));
}

std::string too_small(const Size& size, int64_t value) {
  return str(size.words, ": ", value, " has to be greater than 0");
}

int64_t read_size(const Document& file, const Size& size) {
  if (!file.has(size.key)) return kAbsent;
  const int64_t value = file.integer_or(size.key, kAbsent, kBatchSize);
  if (value <= 0)
    refuse(file, size, too_small(size, value),
           str("`", file.path_of(size.key), "` is ", value, "; expected an integer >= 1"));
  return value;
}

/// The product of positive factors; saturates.
int64_t product(int64_t a, int64_t b, int64_t c) {
  int64_t ab = 0, abc = 0;
  const bool overflow = __builtin_mul_overflow(a, b, &ab) || __builtin_mul_overflow(ab, c, &abc);
  return overflow ? std::numeric_limits<int64_t>::max() : abc;
}

}  // namespace

BatchSizes read_batch_sizes(const Document& file, int data_degree) {
  int64_t train = read_size(file, kTrain);
  int64_t micro = read_size(file, kMicro);
  int64_t steps = read_size(file, kSteps);
  if (train == kAbsent && micro == kAbsent)
    refuse(file, kMicro, "Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided",
           str("`", kMicro.key, "` is missing; set it to the samples of one rank's forward pass"));

  const auto refuse_small_train = [&](const Size& derived, const std::string& other, int64_t least) {
    refuse(file, kTrain, too_small(derived, 0),
           str("`", kTrain.key, "` is ", train, ", which is not enough for ", data_degree,
               data_degree == 1 ? " rank" : " ranks", other, "; set it to ", least, " or a multiple of that"));
  };
  if (train != kAbsent && micro != kAbsent) {
    if (steps == kAbsent) steps = train / micro / data_degree;
    if (steps == 0) refuse_small_train(kSteps, str(" with micro-batches of ", micro), product(micro, 1, data_degree));
  } else {
    if (steps == kAbsent) steps = 1;
    if (micro == kAbsent) micro = train / data_degree / steps;
    if (micro == 0)
      refuse_small_train(kMicro, steps == 1 ? "" : str(" and ", steps, " accumulation steps"),
                         product(1, steps, data_degree));
    if (train == kAbsent) train = product(micro, steps, data_degree);
  }
  const int64_t expected = product(micro, steps, data_degree);
  if (train != expected)
    refuse(file, kTrain,
           str("Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
               "gradient_acc_step * world_size ",
               train, " != ", micro, " * ", steps, " * ", data_degree),
           str("`", kTrain.key, "` is ", train, "; set it to ", expected,
               ", or leave one of the three out: it follows from the other two"));
  return {.train_batch_size = train, .train_micro_batch_size_per_gpu = micro, .gradient_accumulation_steps = steps};
}

}  // namespace trireme
