// Parts of sequences that go from one stage of a pipeline to the next, and wholes of those that leave the last one.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

#include "trireme/activations/cut_activations.h"
#include "trireme/activations/sharding.h"
#include "trireme/comm/group.h"

namespace trireme::sequence {

/// SequenceParallel::sent() of a tensor that is found so.
SentTensor sent(const at::Tensor& tensor, std::optional<Sharding> sharding);

/// A tensor of sent() on the next stage, and how it is cut there.
struct TakenTensor {
  at::Tensor part;
  Sharding sharding;
};
/// Throws    CommError: `cut` is not what sent() says of a tensor of these sizes.
TakenTensor taken(const at::Tensor& tensor, const std::string& cut, const Group& group);

/// SequenceParallel::whole() of a tensor that is found so.
at::Tensor whole(const at::Tensor& tensor, const std::optional<Sharding>& sharding, Group& group);

}  // namespace trireme::sequence
