// The values that layers hand to each other, any nesting of tensors, and their flat form.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

#include <string>
#include <vector>

namespace trireme {

/// A nested value as a list of its tensors and a text that describes the rest, from which it can be rebuilt.
struct FlatValue {
  std::vector<at::Tensor> tensors;  ///< in the order of a walk; undefined ones count
  std::string structure;
};

/// `value` is a tensor, None, a number, a text, or a tuple, list or dictionary (its keys texts or integers) of these.
/// Throws    ShapeError that names another kind of value.
FlatValue flatten(const c10::IValue& value);

/// The inverse of flatten(), with `flat.tensors` in the value.
/// Throws    ShapeError: another number of tensors.
c10::IValue unflatten(const FlatValue& flat);

}  // namespace trireme
