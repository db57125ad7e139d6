// Cases of the tests of collectives: providers of memory, worlds, dtypes, lengths; and tensors whose sums are
// known.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "tests/support/run_ranks.h"

namespace trireme {

struct CollectiveCase {
  RankBackend backend;
  int size;
};

inline std::string name_of(const ::testing::TestParamInfo<CollectiveCase>& info) {
  static const std::map<RankBackend, std::string> names{
      {RankBackend::kThreads, "Threads"}, {RankBackend::kShm, "Shm"}, {RankBackend::kC10d, "C10d"}};
  return names.at(info.param.backend) + std::to_string(info.param.size);
}

/// Worlds that divide nothing evenly, on every backend.
class OnEveryWorld : public ::testing::TestWithParam<CollectiveCase> {
 protected:
  void run(const std::function<void(Rank&)>& body) const {
    run_ranks(GetParam().size, body, {.backend = GetParam().backend});
  }
};

inline std::vector<CollectiveCase> cases_of(const std::vector<RankBackend>& backends) {
  std::vector<CollectiveCase> cases;
  for (const RankBackend backend : backends)
    for (int size = 1; size <= 4; ++size) cases.push_back({backend, size});
  return cases;
}

#define TRIREME_ON_EVERY_WORLD(suite)                                                                               \
  INSTANTIATE_TEST_SUITE_P(                                                                                         \
      Worlds, suite, ::testing::ValuesIn(cases_of({RankBackend::kThreads, RankBackend::kShm, RankBackend::kC10d})), \
      [](const auto& info) { return name_of(info); })
#define TRIREME_ON_EVERY_SHARED_WORLD(suite)                                                                         \
  INSTANTIATE_TEST_SUITE_P(Worlds, suite, ::testing::ValuesIn(cases_of({RankBackend::kThreads, RankBackend::kShm})), \
                           [](const auto& info) { return name_of(info); })

inline const std::vector<at::ScalarType>& all_dtypes() {
  static const std::vector<at::ScalarType> dtypes{at::kFloat, at::kDouble, at::kBFloat16, at::kHalf, at::kByte,
                                                  at::kChar,  at::kShort,  at::kInt,      at::kLong, at::kBool};
  return dtypes;
}

/// 0, 1, shorter than the world, not divisible, direct and in blocks; several steps where elements are wide.
inline std::vector<int64_t> lengths(at::ScalarType dtype = at::kFloat) {
  std::vector<int64_t> all{0, 1, 3, 1000, 8209};
  if (dtype == at::kFloat || dtype == at::kDouble) all.push_back(300007);
  return all;
}

/// Element i of rank r is (i % 7 + r) % 5: sums over 4 ranks are exact in every dtype.
inline at::Tensor numbers(int64_t numel, int rank, at::ScalarType dtype) {
  const at::Tensor values = (at::arange(numel, at::kLong).remainder(7) + rank).remainder(5);
  return dtype == at::kBool ? values.gt(2) : values.to(dtype);
}

}  // namespace trireme
