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
  for (const CuttingPass& pass : cuts)
    for (const auto& axis : pass.axes) axis->check_loss(loss);
}

bool OperatorPasses::is_part(const at::Tensor& tensor) const {
  return std::any_of(cuts.begin(), cuts.end(),
                     [&](const CuttingPass& pass) { return pass.of_tensors().is_part(tensor); });
}

std::optional<std::vector<int64_t>> OperatorPasses::whole_sizes(const at::Tensor& tensor) const {
  for (const CuttingPass& pass : cuts)
    if (auto sizes = pass.of_tensors().whole_sizes(tensor)) return sizes;
  return std::nullopt;
}

void OperatorPasses::count_exchanges(bool counts) const {
  for (const CuttingPass& pass : cuts)
    for (const auto& axis : pass.axes) axis->count_exchanges(counts);
}

std::vector<ExchangeRow> OperatorPasses::exchanges() const {
  std::vector<ExchangeRow> rows;
  for (const CuttingPass& pass : cuts)
    for (const auto& axis : pass.axes)
      for (ExchangeRow& row : axis->exchanges()) rows.push_back(std::move(row));
  return by_bytes(std::move(rows));
}

SentTensor OperatorPasses::sent(const at::Tensor& tensor) const {
  SentTensor result{tensor};
  for (const CuttingPass& pass : cuts) {
    if (!tensor.defined()) break;
    SentTensor by_pass = pass.of_tensors().sent(result.tensor);
    if (!by_pass.cut.empty() && !result.cut.empty())
      throw Error(ErrorCode::kInternal, str("a tensor of ", tensor.sizes(), " is sent as a part of two passes"));
    result.tensor = std::move(by_pass.tensor);
    if (!by_pass.cut.empty()) result.cut = std::move(by_pass.cut);
  }
  return result;
}

at::Tensor OperatorPasses::taken(const at::Tensor& tensor, const std::string& cut) const {
  at::Tensor result = tensor;
  for (const CuttingPass& pass : cuts)
    if (!cut.empty()) result = pass.of_tensors().taken(result, cut);
  return result;
}

at::Tensor OperatorPasses::whole(const at::Tensor& tensor) const {
  at::Tensor result = tensor;
  for (const CuttingPass& pass : cuts)
    if (result.defined()) result = pass.of_tensors().whole(result);
  return result;
}

}  // namespace trireme
