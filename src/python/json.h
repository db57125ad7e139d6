// JSON values as Python has them: dicts, lists, strings, numbers, booleans and None. With this header a function of the
// binding takes and returns Json.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <nlohmann/json.hpp>

#include "trireme/base/json.h"

namespace trireme::python {

/// Infinite numbers stay that, and integers beyond 64 bits become doubles, as where a text is parsed. Requires the GIL.
/// Throws    py::type_error: what JSON has not; ConfigError: half of a character; more than JsonLimits allow.
Json json_of(const pybind11::handle& value);
/// An infinite number is None, as in a text. Requires the GIL.
pybind11::object object_of(const Json& json);

}  // namespace trireme::python

namespace pybind11::detail {

template <>
struct type_caster<trireme::Json> {
  PYBIND11_TYPE_CASTER(trireme::Json, const_name("Any"));

  bool load(handle source, bool) {
    value = trireme::python::json_of(source);
    return true;
  }
  static handle cast(const trireme::Json& json, return_value_policy, handle) {
    return trireme::python::object_of(json).release();
  }
};

}  // namespace pybind11::detail
