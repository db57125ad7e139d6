#include "checkpoint/slices.h"

#include <nlohmann/json.hpp>

#include "trireme/base/error.h"
#include "trireme/base/json.h"

namespace trireme {

std::vector<SliceSpec> slices_of(const StateTree& state) {
  std::vector<SliceSpec> slices;
  for (const TensorSlice& slice : state.tensors) {
    if (!slice.data.defined()) throw CheckpointError(str("tensor \"", slice.name, "\" has no data"));
    if (!slice.data.is_cpu() || !slice.data.is_contiguous()) {
      throw CheckpointError(str("tensor \"", slice.name, "\" must be contiguous on the host, it is on ",
                                slice.data.device().str(), "; pass slice.data.cpu().contiguous()"));
    }
    slices.push_back({slice.name, slice.shape, slice.data.scalar_type(), slice.begin, slice.data.numel()});
  }
  return slices;
}

std::string dump_slices(const std::vector<SliceSpec>& slices) {
  Json json = Json::array();
  for (const auto& slice : slices)
    json.push_back({slice.name, slice.shape, static_cast<int>(slice.dtype), slice.begin, slice.numel});
  return json.dump();
}

std::vector<SliceSpec> parse_slices(std::string_view text) {
  std::vector<SliceSpec> slices;
  for (const auto& item : Json::parse(text)) {
    slices.push_back({item[0].get<std::string>(), item[1].get<std::vector<int64_t>>(),
                      static_cast<at::ScalarType>(item[2].get<int>()), item[3].get<int64_t>(), item[4].get<int64_t>()});
  }
  return slices;
}

}  // namespace trireme
