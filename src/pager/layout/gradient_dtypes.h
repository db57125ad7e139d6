// In which dtypes gradients are summed and travel.
#pragma once

#include <c10/core/ScalarType.h>

#include "trireme/pager/layout/layout.h"
#include "trireme/pager/layout/policy.h"

namespace trireme {

/// The dtype in which gradients of `unit` are summed: a 16-bit one is for 16-bit parameters, fp32 is never rounded.
inline at::ScalarType accumulation_dtype(const UnitLayout& unit, const PagerPolicy& policy) {
  return unit.dtype == at::kFloat ? at::kFloat : policy.accumulation_dtype;
}

/// In which dtype gradients of `unit` travel that are kept in `kept`: a wider one would tell peers no more.
inline at::ScalarType wire_dtype(const UnitLayout& unit, at::ScalarType kept) {
  const at::ScalarType asked = unit.communication_dtype;
  return asked == at::ScalarType::Undefined || asked == at::kFloat ? kept : asked;
}

}  // namespace trireme
