// How the tokens of an operator's result follow from those of its arguments.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "sequence/cut_table.h"
#include "trireme/intercept.h"

namespace trireme::sequence {

/// Operators by what they do with tokens.
enum class TokenRule : uint8_t {
  kEach,     ///< each token by itself, along no dim that the operator names
  kProduct,  ///< a matrix product
  kView,     ///< reads no data
  kPart,     ///< a view of part of a dim
  kLookup,   ///< the result has more dims behind those of its argument
  kNorm,     ///< over the last dims
  kAttention,
  kLoss,  ///< cross entropy
  kPad,
  kTotal,  ///< sum or mean
  kMixes,  ///< over tokens, in a way that its arguments do not tell
};

TokenRule token_rule_of(const c10::OperatorHandle& op);

/// The dims that the operator names, of a tensor of `dims` dims.
std::vector<int64_t> named_dims(const OperatorCall& call, int64_t dims);

/// The dim along which the sequence runs in a product of `left` and `right`; -1: in none of both. Nothing where the
/// product sums over tokens or pairs tokens with tokens.
std::optional<int64_t> product_dim(const at::Tensor& left, int64_t left_dim, const at::Tensor& right,
                                   int64_t right_dim);

}  // namespace trireme::sequence
