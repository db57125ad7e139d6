#include "sequence/same_batch.h"

#include <vector>

#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/intercept.h"

namespace trireme::sequence {

void check_same_batch(Group& group, const SequenceInputs& whole) {
  if (group.size() == 1) return;
  const WithoutInterception guard;
  constexpr const char* kNames[] = {"input_ids", "labels", "position_ids", "attention_mask"};
  constexpr size_t kPerTensor = 4;  // whether it is there, samples, tokens, a digest
  std::vector<int64_t> told;
  for (const at::Tensor& tensor : {whole.input_ids, whole.labels, whole.position_ids, whole.attention_mask}) {
    const bool is_there = tensor.defined() && tensor.dim() > 0;
    const bool has_values = is_there && at::isIntegralType(tensor.scalar_type(), /*includeBool=*/true);
    const int64_t dim = is_there ? (whole.dim < 0 ? whole.dim + tensor.dim() : whole.dim) : 0;
    const int64_t tokens = is_there && dim < tensor.dim() ? tensor.size(dim) : 0;
    const int64_t samples = tokens > 0 ? tensor.numel() / tokens : 0;
    told.insert(told.end(), {is_there, samples, tokens, has_values ? digest_of(tensor.contiguous().view(-1)) : 0});
  }
  const auto found = first_difference(group, told);
  if (!found) return;
  const int64_t first = *found->of_rank_0, other = *found->of_rank;
  const int rank = found->rank;
  const size_t what = found->index % kPerTensor;
  const std::string difference =
      what == 0   ? str("is given by rank ", first != 0 ? 0 : rank, " and not by rank ", first != 0 ? rank : 0)
      : what == 1 ? str("has ", first, " samples on rank 0 and ", other, " on rank ", rank)
      : what == 2 ? str("has ", first, " tokens on rank 0 and ", other, " on rank ", rank)
                  : str("has other values on rank ", rank, " than on rank 0");
  throw StateError(str("cut: ", kNames[found->index / kPerTensor], " ", difference, " of group '", group.name(),
                       "'; ranks that share a sequence get the same batch (a sampler over data_place().size, no "
                       "shuffling of their own)"));
}

}  // namespace trireme::sequence
