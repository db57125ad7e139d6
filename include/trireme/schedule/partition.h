// Which layers are on which stage.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace trireme::pipeline {

/// Stage s has the layers [result[s], result[s + 1]); result [stages + 1]. As DeepSpeed's partition_uniform: the first
/// ones get one layer more. With fewer layers than stages the last stages have none.
std::vector<int64_t> partition_uniform(int64_t layers, int stages);

/// The partition whose heaviest and lightest stages differ least, by `weights` of layers, such as parameters or times.
/// As DeepSpeed's partition_balanced.
/// Throws    ConfigError: a negative weight.
std::vector<int64_t> partition_balanced(const std::vector<int64_t>& weights, int stages);
/// The partition whose heaviest stage is the lightest, among those whose stages take at most `limit_bytes`; layer i
/// takes bytes[i].
/// Throws    ConfigError: there is none, with the least limit for which there is one.
std::vector<int64_t> partition_within(const std::vector<int64_t>& weights, int stages,
                                      const std::vector<int64_t>& bytes, int64_t limit_bytes);

/// partition_balanced() over the layers whose class name matches `regex` (ECMAScript), anywhere and in any case: each
/// counts 1, the others 0.
/// Throws    ConfigError: no layer matches, or `regex` is no regular expression.
std::vector<int64_t> partition_by_type(const std::vector<std::string>& classes, const std::string& regex, int stages);

}  // namespace trireme::pipeline
