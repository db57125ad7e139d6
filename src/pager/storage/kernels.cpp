#include "pager/storage/kernels.h"

#include <algorithm>
#include <type_traits>

#include "trireme/base/error.h"
#include "trireme/base/float16.h"
#include "trireme/base/vectorised.h"
#include "trireme/pager/layout/layout.h"

// Every clone of a vectorised function does the same roundings: lanes are explicit.
namespace trireme {
namespace {

constexpr int64_t kBlock = 2048;  // elements; 8 KiB of fp32 stay in the first-level cache
constexpr int kLanes = 16;

template <class Element>
__attribute__((always_inline)) inline void load_as(float* __restrict block, const Element* __restrict source,
                                                   int64_t n) {
  for (int64_t i = 0; i < n; ++i) block[i] = widen(source[i]);
}
template <class Element>
__attribute__((always_inline)) inline void add_as(float* __restrict block, const Element* __restrict source,
                                                  int64_t n) {
  for (int64_t i = 0; i < n; ++i) block[i] += widen(source[i]);
}
template <class Element>
__attribute__((always_inline)) inline void store_as(Element* __restrict target, const float* __restrict block,
                                                    int64_t n) {
  for (int64_t i = 0; i < n; ++i) target[i] = narrow<Element>(block[i]);
}

// Cloned functions cannot be templates, so each type has its own.
TRIREME_VECTORISED void load(float* block, const float* source, int64_t n) { load_as(block, source, n); }
TRIREME_VECTORISED void load(float* block, const BFloat16* source, int64_t n) { load_as(block, source, n); }
TRIREME_VECTORISED void load(float* block, const Float16* source, int64_t n) { load_as(block, source, n); }
TRIREME_VECTORISED void add(float* block, const float* source, int64_t n) { add_as(block, source, n); }
TRIREME_VECTORISED void add(float* block, const BFloat16* source, int64_t n) { add_as(block, source, n); }
TRIREME_VECTORISED void add(float* block, const Float16* source, int64_t n) { add_as(block, source, n); }
TRIREME_VECTORISED void store(float* target, const float* block, int64_t n) { store_as(target, block, n); }
TRIREME_VECTORISED void store(BFloat16* target, const float* block, int64_t n) { store_as(target, block, n); }
TRIREME_VECTORISED void store(Float16* target, const float* block, int64_t n) { store_as(target, block, n); }
TRIREME_VECTORISED void scale(float* block, float factor, int64_t n) {
  for (int64_t i = 0; i < n; ++i) block[i] *= factor;
}

// Squares of fp32 values are exact in fp64. `n` counts whole rows of lanes; the caller pads.
TRIREME_VECTORISED void add_squares(double* __restrict lanes, const float* __restrict block, int64_t n) {
  for (int64_t i = 0; i + kLanes <= n; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      const double value = block[i + lane];
      lanes[lane] += value * value;
    }
}

class SquareSum {
 public:
  void add(const float* block, int64_t n) {
    const int64_t rows = n / kLanes * kLanes;
    add_squares(lanes_, block, rows);
    for (int64_t i = rows; i < n; ++i) lanes_[i - rows] += static_cast<double>(block[i]) * block[i];
  }
  double total() const {
    double sum = 0;
    for (const double lane : lanes_) sum += lane;
    return sum;
  }

 private:
  alignas(64) double lanes_[kLanes] = {};
};

TRIREME_VECTORISED void square_blocks(double* __restrict squares, const float* __restrict block, int64_t blocks) {
  for (int64_t i = 0; i < blocks; ++i) {
    double lanes[kAlignment];
    for (int lane = 0; lane < kAlignment; ++lane) {
      const double value = block[i * kAlignment + lane];
      lanes[lane] = value * value;
    }
    for (int width = kAlignment / 2; width > 0; width /= 2)
      for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
    squares[i] = lanes[0];
  }
}

template <class Element>
void add_squares_of(const Element* data, int64_t numel, ExactSum& sum) {
  alignas(64) float block[kBlock];
  double squares[kBlock / kAlignment];
  for (int64_t at = 0; at < numel; at += kBlock) {
    const int64_t n = std::min(kBlock, numel - at);
    load(block, data + at, n);
    const int64_t blocks = (n + kAlignment - 1) / kAlignment;
    std::fill(block + n, block + blocks * kAlignment, 0.0f);
    square_blocks(squares, block, blocks);
    for (int64_t i = 0; i < blocks; ++i) sum.add(squares[i]);
  }
}

template <class Source, class Target>
double reduce_as(const ReduceTask& task) {
  alignas(64) float block[kBlock];
  SquareSum squares;
  auto* target = static_cast<Target*>(task.target);
  for (int64_t at = 0; at < task.numel; at += kBlock) {
    const int64_t n = std::min(kBlock, task.numel - at);
    load(block, static_cast<const Source*>(task.sources[0]) + at, n);
    for (size_t i = 1; i < task.sources.size(); ++i) add(block, static_cast<const Source*>(task.sources[i]) + at, n);
    if (task.factor != 1) scale(block, task.factor, n);
    if (task.accumulate) {
      // The target is the left operand, as in target.add_(sum); addition commutes bit for bit.
      add(block, target + at, n);
    }
    store(target + at, block, n);
    if constexpr (!std::is_same_v<Target, float>) load(block, target + at, n);
    squares.add(block, n);
  }
  return squares.total();
}

template <class Element>
double sum_of_squares_of(const Element* data, int64_t numel) {
  alignas(64) float block[kBlock];
  SquareSum squares;
  for (int64_t at = 0; at < numel; at += kBlock) {
    const int64_t n = std::min(kBlock, numel - at);
    load(block, data + at, n);
    squares.add(block, n);
  }
  return squares.total();
}

/// Calls `use` with a null pointer of the element type of `dtype`.
template <class Use>
auto with_element(at::ScalarType dtype, Use use) {
  if (dtype == at::kFloat) return use(static_cast<float*>(nullptr));
  if (dtype == at::kBFloat16) return use(static_cast<BFloat16*>(nullptr));
  TRIREME_CHECK(dtype == at::kHalf, "dtype ", dtype);
  return use(static_cast<Float16*>(nullptr));
}

}  // namespace

double sum_of_squares(const void* data, at::ScalarType dtype, int64_t numel) {
  return with_element(
      dtype, [&]<class Element>(Element*) { return sum_of_squares_of(static_cast<const Element*>(data), numel); });
}

void add_squares(const void* data, at::ScalarType dtype, int64_t numel, ExactSum& sum) {
  with_element(dtype, [&]<class Element>(Element*) { add_squares_of(static_cast<const Element*>(data), numel, sum); });
}

double reduce(const ReduceTask& task) {
  return with_element(task.source_dtype, [&]<class Source>(Source*) {
    return with_element(task.target_dtype, [&]<class Target>(Target*) { return reduce_as<Source, Target>(task); });
  });
}

void widen_upper_half(float* data, at::ScalarType dtype, int64_t numel) {
  TRIREME_CHECK(c10::elementSize(dtype) == 2, "dtype ", dtype);
  with_element(dtype, [&]<class Element>(Element*) {
    const auto* source = reinterpret_cast<const Element*>(data) + numel;
    alignas(64) float block[kBlock];
    // Ascending: element i ends at byte 4 i + 4 and was read from byte 2 numel + 2 i, so nothing is overwritten unread.
    for (int64_t at = 0; at < numel; at += kBlock) {
      const int64_t n = std::min(kBlock, numel - at);
      load(block, source + at, n);
      std::copy_n(block, n, data + at);
    }
  });
}

}  // namespace trireme
