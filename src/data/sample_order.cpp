#include "data/hash.h"
#include "trireme/base/error.h"
#include "trireme/data/loader.h"

namespace trireme {
namespace {

constexpr int kRounds = 4;

}  // namespace

SampleOrder::SampleOrder(int64_t size, uint64_t seed, Order order) : size_(size), seed_(seed), order_(order) {
  TRIREME_CHECK(size > 0, "size ", size);
  while (half_bits_ < 31 && (int64_t{1} << (2 * half_bits_)) < size) ++half_bits_;
}

int64_t SampleOrder::operator()(int64_t global_sample) const {
  TRIREME_CHECK(global_sample >= 0, "sample ", global_sample);
  const auto position = static_cast<uint64_t>(global_sample % size_);
  if (order_ == Order::kInOrder) return static_cast<int64_t>(position);
  const uint64_t key = mix64(mix64(seed_) ^ static_cast<uint64_t>(global_sample / size_));
  // The network permutes a power of four, at least `size_` and below 4 * size_ or 4: walking on along its cycle until
  // it comes back below size_ permutes just those.
  uint64_t value = encrypt(position, key);
  while (value >= static_cast<uint64_t>(size_)) value = encrypt(value, key);
  return static_cast<int64_t>(value);
}

uint64_t SampleOrder::encrypt(uint64_t value, uint64_t key) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_;
  uint64_t right = value & mask;
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t next = left ^ (mix64(key + static_cast<uint64_t>(round) + (right << 8)) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

}  // namespace trireme
