#include "trireme/training/operator_passes.h"

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {

OperatorPasses::OperatorPasses(const Config& config, const Pager& pager) {
  const auto is_own = [&pager](const at::Tensor& tensor) {
    const auto place = find_managed(tensor);
    return place && place->pager == &pager;
  };
  if (config.recompute.mode == RecomputeMode::kSelective)
    recompute = std::make_unique<SelectiveRecompute>(config.recompute.selective, is_own);
  if (config.tiled.is_on()) tiled = std::make_unique<TiledComputation>(config.tiled, is_own);
}

void OperatorPasses::check_loss(const at::Tensor& loss) const {
  for (const auto& cut : cuts) cut->check_loss(loss);
}

bool OperatorPasses::is_part(const at::Tensor& tensor) const {
  return std::any_of(cuts.begin(), cuts.end(), [&](const auto& cut) { return cut->is_part(tensor); });
}

std::optional<std::vector<int64_t>> OperatorPasses::whole_sizes(const at::Tensor& tensor) const {
  for (const auto& cut : cuts)
    if (auto sizes = cut->whole_sizes(tensor)) return sizes;
  return std::nullopt;
}

SentTensor OperatorPasses::sent(const at::Tensor& tensor) const {
  SentTensor result{tensor};
  for (const auto& axis : cuts) {
    if (!tensor.defined()) break;
    SentTensor along_axis = axis->sent(result.tensor);
    if (!along_axis.cut.empty() && !result.cut.empty())
      throw Error(ErrorCode::kInternal, str("a tensor of ", tensor.sizes(), " is sent as a part along two axes"));
    result.tensor = std::move(along_axis.tensor);
    if (!along_axis.cut.empty()) result.cut = std::move(along_axis.cut);
  }
  return result;
}

at::Tensor OperatorPasses::taken(const at::Tensor& tensor, const std::string& cut) const {
  at::Tensor result = tensor;
  for (const auto& axis : cuts)
    if (!cut.empty()) result = axis->taken(result, cut);
  return result;
}

at::Tensor OperatorPasses::whole(const at::Tensor& tensor) const {
  at::Tensor result = tensor;
  for (const auto& axis : cuts)
    if (result.defined()) result = axis->whole(result);
  return result;
}

}  // namespace trireme
