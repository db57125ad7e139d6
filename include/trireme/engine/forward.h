// What is different while the engine's forward runs.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <optional>
#include <type_traits>

#include "trireme/precision/autocast.h"

namespace trireme {

/// Autocast as configured, and inputs in the weights' dtype where fp16.auto_cast asks for that.
class [[nodiscard]] ForwardScope {
 public:
  ForwardScope(const PrecisionOptions& precision, at::DeviceType device) : autocast_(precision.autocast, device) {
    if (precision.casts_inputs) input_dtype_ = precision.weight_dtype;
  }

  /// What the module is given for `value`: a floating tensor cast, if need be; all else as it is.
  template <class T>
  T&& input(T&& value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<T>, at::Tensor>) {
      const bool casts = input_dtype_ && value.defined() && at::isFloatingType(value.scalar_type());
      if (casts && value.scalar_type() != *input_dtype_)
        return static_cast<T&&>(cast_inputs_.emplace_back(value.to(*input_dtype_)));
    }
    return static_cast<T&&>(value);
  }

 private:
  AutocastScope autocast_;
  std::optional<at::ScalarType> input_dtype_;
  std::deque<at::Tensor> cast_inputs_;
};

}  // namespace trireme
