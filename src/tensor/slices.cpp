#include "tensor/slices.h"

#include <algorithm>
#include <utility>

namespace trireme::tensor {

std::optional<Ranges> within(const Ranges& ranges, int64_t begin, int64_t end) {
  std::vector<std::vector<Interval>> of_rank;
  for (int rank = 0; rank < ranges.ranks(); ++rank) {
    of_rank.push_back(clipped(ranges.of_rank(rank), begin, end));
    if (of_rank.back().empty()) return {};
  }
  return Ranges(end - begin, std::move(of_rank));
}

std::optional<std::vector<int64_t>> resolved_sizes(std::vector<int64_t> sizes, int64_t numel) {
  int64_t product = 1;
  int64_t* open = nullptr;
  for (int64_t& size : sizes) {
    if (size == -1 && open == nullptr) {
      open = &size;
      continue;
    }
    if (size < 0) return {};
    product *= size;
  }
  if (open != nullptr) {
    if (product == 0 || numel % product != 0) return {};
    *open = numel / product;
    return sizes;
  }
  if (product != numel) return {};
  return sizes;
}

std::optional<Cut> cut_of_view(const std::vector<int64_t>& from, const Cut& cut, const std::vector<int64_t>& to) {
  if (std::ranges::find(to, 0) != to.end()) return {};
  const Row row = view_row(from, to);
  const LocalRow whole(row);
  const auto found = along(row.arguments[0][cut.dim], whole.sizes, cut);
  if (!found) return {};
  return cut_by(cut.axis, row.results[0], whole.sizes, found->first, found->second);
}

}  // namespace trireme::tensor
