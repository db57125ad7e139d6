// The scope of one forward of the trained module.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "trireme/base/notices.h"
#include "trireme/precision/autocast.h"

namespace trireme {

class ForwardChecks;

/// While it lives, autocast is as configured; input() casts inputs to the weights' dtype under fp16.auto_cast.
class [[nodiscard]] ForwardScope {
 public:
  /// `checks` outlives this. `micro_batch`: samples that inputs should have. `model` as Notice::of.
  ForwardScope(ForwardChecks& checks, int64_t micro_batch, const PrecisionOptions& precision, at::DeviceType device,
               const void* model)
      : notice_(Notice::Kind::kCall, "forward", model),
        checks_(checks),
        micro_batch_(micro_batch),
        autocast_(precision.autocast, device) {
    if (precision.casts_inputs) input_dtype_ = precision.weight_dtype;
  }

  /// Warns once of inputs whose number of samples is not that of a micro-batch.
  void look_at(const at::Tensor& input);

  /// The module's argument for `value`: a floating tensor cast, if need be; all else as it is.
  template <class T>
  T&& input(T&& value) {
    if constexpr (std::is_same_v<std::remove_cvref_t<T>, at::Tensor>) {
      const bool casts = input_dtype_ && value.defined() && at::isFloatingType(value.scalar_type());
      if (casts && value.scalar_type() != *input_dtype_)
        return static_cast<T&&>(cast_inputs_.emplace_back(value.to(*input_dtype_)));
    }
    return static_cast<T&&>(value);
  }

  /// Throws ShapeError if the error text `problem` of a failed forward, with inputs of these dtypes, is about a dtype.
  void explain(const std::string& problem, const std::vector<at::ScalarType>& inputs) const;

 private:
  const NoticeScope notice_;
  ForwardChecks& checks_;
  int64_t micro_batch_;
  AutocastScope autocast_;
  std::optional<at::ScalarType> input_dtype_;
  std::deque<at::Tensor> cast_inputs_;
};

}  // namespace trireme
