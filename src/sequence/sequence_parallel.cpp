#include "trireme/sequence/sequence_parallel.h"

#include <utility>
#include <vector>

#include "sequence/token_policy.h"
#include "trireme/activations/axis_pass.h"
#include "trireme/activations/sent_parts.h"
#include "trireme/base/error.h"
#include "trireme/base/log.h"
#include "trireme/comm/agreement.h"
#include "trireme/intercept.h"

namespace trireme {

ShardRange sequence_range(int64_t tokens, int size, int rank) {
  return {.begin = tokens * rank / size, .end = tokens * (rank + 1) / size};
}

namespace {

constexpr int64_t kFewestTokens = 2;

int64_t checked_dim(const at::Tensor& whole, int64_t dim, int ranks) {
  const int64_t along = dim < 0 ? dim + whole.dim() : dim;
  if (along < 0 || along >= whole.dim())
    throw ShapeError(str("cut: ", whole.sizes(), " has no dim ", dim, "; name the dim that the tokens run along"));
  if (whole.size(along) < kFewestTokens * ranks)
    throw ShapeError(str("cut: ", whole.sizes(), " has ", whole.size(along), " tokens in dim ", along,
                         ", fewer than two for each of ", ranks, " ranks; use a longer sequence or fewer ranks"));
  return along;
}

/// Whether all ranks of the group cut the same batch: a small gather.
///
/// Throws    StateError on every rank: sizes or ids differ.
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

std::shared_ptr<AxisPass> pass_of(Group& group, SequenceAttention attention) {
  std::vector<PassAxis> axes;
  axes.push_back(SequenceParallel::axis(group, attention, 0));
  return std::make_shared<AxisPass>(PassOrder::kSequence, std::move(axes));
}

}  // namespace

SequenceParallel::SequenceParallel(Group& group, SequenceAttention attention)
    : SequenceParallel(pass_of(group, attention), 0) {}
SequenceParallel::SequenceParallel(std::shared_ptr<AxisPass> pass, int axis) : pass_(std::move(pass)), axis_(axis) {
  pass_->give_parts();
}
SequenceParallel::~SequenceParallel() = default;

PassAxis SequenceParallel::axis(Group& group, SequenceAttention attention, int number) {
  auto exchanges = std::make_shared<AxisExchanges>(group, GradientLaw::kShares, "sequence parallelism");
  exchanges->forget_record();
  return {std::move(exchanges), std::make_unique<sequence::TokenPolicy>(number, attention)};
}

at::Tensor SequenceParallel::cut(const at::Tensor& whole, int64_t dim) {
  const int ranks = pass_->group(axis_).size();
  const int64_t along = checked_dim(whole, dim, ranks);
  if (is_part(whole))
    throw StateError(str("cut: ", whole.sizes(), " is a part of a sequence already; cut() takes whole tensors"));
  has_cut_ = true;
  if (ranks == 1) return whole;
  const Cut cut{
      .axis = axis_, .dim = along, .ranges = std::make_shared<const Ranges>(Ranges::even(whole.size(along), ranks))};
  PlacedTensor known = pass_->with_cut({}, cut);
  const WithoutInterception own_operators;
  if (whole.requires_grad())
    return pass_->as_part(slice_of(whole, cut, pass_->group(axis_).rank()).clone(at::MemoryFormat::Contiguous),
                          known.placement);
  known.held = Held::kWhole;
  const at::Tensor held = whole.clone(at::MemoryFormat::Contiguous);
  pass_->add(held, std::move(known));
  return held;
}

SequenceInputs SequenceParallel::cut(const SequenceInputs& whole) {
  SequenceInputs result{.dim = whole.dim};
  const auto part = [&](const at::Tensor& tensor) { return tensor.defined() ? cut(tensor, whole.dim) : tensor; };
  check_same_batch(pass_->group(axis_), whole);
  result.input_ids = part(whole.input_ids);
  result.labels = part(whole.labels);
  result.position_ids = part(whole.position_ids);
  result.attention_mask = part(whole.attention_mask);
  return result;
}

bool SequenceParallel::is_part(const at::Tensor& tensor) {
  const auto known = pass_->find(tensor);
  return known && (known->is_cut() || known->is_unknown);
}

at::Tensor SequenceParallel::whole_of(const at::Tensor& part) {
  const auto known = pass_->find(part);
  return known && known->held == Held::kWhole ? part : at::Tensor();
}

std::optional<std::vector<int64_t>> SequenceParallel::whole_sizes(const at::Tensor& tensor) {
  return pass_->whole_sizes(tensor);
}

void SequenceParallel::check_loss(const at::Tensor& loss) {
  const auto known = pass_->find(loss);
  if (known && known->is_cut() && known->held == Held::kPart)
    throw StateError(
        "backward: the loss is of this rank's tokens alone; take the sum() or mean() of all tokens' losses");
  const Group& group = pass_->group(axis_);
  if (!has_cut_ && !std::exchange(told_uncut_, true) && group.world_rank(group.rank()) == 0)
    log(LogLevel::kWarning,
        str("sequence_parallel_size=", group.size(),
            ", and the program has cut no batch: each rank trains on all tokens of its own batch, which saves nothing, "
            "and the ranks' gradients are averaged; pass batches through engine.cut()"));
}

void SequenceParallel::count_exchanges(bool counts) { pass_->exchanges(axis_).count(counts); }
std::vector<ExchangeRow> SequenceParallel::exchanges() const { return pass_->exchanges(axis_).counted("sequence"); }

SentTensor SequenceParallel::sent(const at::Tensor& tensor) { return trireme::sent(*pass_, tensor); }
at::Tensor SequenceParallel::taken(const at::Tensor& tensor, const std::string& cut) {
  has_cut_ = true;
  return trireme::taken(*pass_, tensor, cut);
}
at::Tensor SequenceParallel::whole(const at::Tensor& tensor) { return whole_tensor(*pass_, tensor); }

}  // namespace trireme
