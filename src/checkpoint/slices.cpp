#include "checkpoint/slices.h"

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/utf8.h"

namespace trireme {
namespace {

void check(const TensorSlice& slice) {
  const std::string where = str("tensor \"", slice.name, "\"");
  if (const std::string problem = part_problem(slice.part); !problem.empty())
    throw CheckpointError(str(where, ": ", problem));
  if (!slice.values.empty() && parse_plain_json(slice.values, kSavedValues.levels).is_discarded())
    throw CheckpointError(str(where, ": its values are not JSON, have a key twice, or nest deeper than ",
                              kSavedValues.levels, " levels: ", excerpt(slice.values, 100)));
  if (slice.store) return;
  if (!slice.data.defined()) throw CheckpointError(where + " has no data");
  if (!slice.data.is_cpu() || !slice.data.is_contiguous())
    throw CheckpointError(str(where, " must be contiguous on the host, it is on ", slice.data.device().str(),
                              "; pass slice.data.cpu().contiguous()"));
}

}  // namespace

std::vector<SliceSpec> slices_of(const StateTree& state) {
  std::vector<SliceSpec> slices;
  for (const TensorSlice& slice : state.tensors) {
    check(slice);
    slices.push_back({.name = slice.name,
                      .part = canonical(slice.part),
                      .dtype = slice.store ? slice.store->dtype() : slice.data.scalar_type(),
                      .begin = slice.begin,
                      .numel = slice.store ? slice.store->numel() : slice.data.numel(),
                      .values = slice.values});
  }
  return slices;
}

std::string dump_slices(const std::vector<SliceSpec>& slices) {
  Json json = Json::array();
  for (const SliceSpec& slice : slices) {
    Json intervals = Json::array();
    for (const Interval& interval : slice.part.intervals) intervals.push_back({interval.begin, interval.end});
    json.push_back({slice.name, slice.part.shape, slice.part.dim, std::move(intervals), static_cast<int>(slice.dtype),
                    slice.begin, slice.numel, slice.values});
  }
  return json.dump();
}

std::vector<SliceSpec> parse_slices(std::string_view text) {
  std::vector<SliceSpec> slices;
  for (const auto& item : Json::parse(text)) {
    SliceSpec& slice = slices.emplace_back();
    slice.name = item[0].get<std::string>();
    slice.part.shape = item[1].get<std::vector<int64_t>>();
    slice.part.dim = item[2].get<int>();
    for (const auto& interval : item[3])
      slice.part.intervals.push_back({interval[0].get<int64_t>(), interval[1].get<int64_t>()});
    slice.dtype = static_cast<at::ScalarType>(item[4].get<int>());
    slice.begin = item[5].get<int64_t>();
    slice.numel = item[6].get<int64_t>();
    slice.values = item[7].get<std::string>();
  }
  return slices;
}

}  // namespace trireme
