#include "trireme/activations/call_arguments.h"

namespace trireme {

std::vector<int64_t> named_dims(const OperatorCall& call, int64_t dims) {
  std::vector<int64_t> result;
  for (const char* name : {"dim", "dims", "dim0", "dim1", "dimension", "axis0", "axis1"}) {
    const c10::IValue value = value_of(call, name);
    if (value.isInt()) result.push_back(value.toInt());
    if (value.isIntList())
      for (const int64_t dim : value.toIntVector()) result.push_back(dim);
  }
  for (int64_t& dim : result)
    if (dim < 0) dim += dims;
  return result;
}

}  // namespace trireme
