#include "sequence/stages.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <sstream>
#include <utility>

#include "trireme/base/error.h"
#include "trireme/intercept.h"

namespace trireme::sequence {
namespace {

using Kind = Sharding::Kind;

/// A message's words on how its tensor is cut; numbers, since the next stage alone reads them.
class CutText {
 public:
  static std::string of(const Sharding& sharding, bool is_whole) {
    std::ostringstream text;
    text << static_cast<int>(sharding.kind) << ' ' << is_whole << ' ' << sharding.outer << ' ' << sharding.inner;
    put(text, sharding.dims);
    put(text, sharding.split->lengths);
    std::vector<int64_t> counts;
    if (sharding.counts != nullptr)
      for (const double count : *sharding.counts) counts.push_back(std::bit_cast<int64_t>(count));
    put(text, counts);
    return text.str();
  }

  explicit CutText(const std::string& text) : stream_(text) {}

  /// The sharding of a tensor of these sizes for `rank` of `ranks`, and whether all of it was sent. Nothing of the text
  /// is trusted. Throws CommError.
  std::pair<Sharding, bool> read(at::IntArrayRef sizes, int rank, int ranks) {
    Sharding sharding;
    sharding.kind = static_cast<Kind>(number(0, static_cast<int64_t>(Kind::kCounting)));
    const bool is_whole = number(0, 1) != 0;
    sharding.outer = number(1, kMost);
    sharding.inner = number(1, kMost);
    const auto dims = numbers(2, 0, static_cast<int64_t>(sizes.size()) - 1);
    sharding.dims.assign(dims.begin(), dims.end());
    auto split = std::make_shared<TokenSplit>();
    split->lengths = numbers(ranks, 0, kMost);
    split->rank = rank;
    const std::vector<int64_t> counts = numbers(kMost, INT64_MIN, INT64_MAX);
    if (!counts.empty()) {
      auto known = std::make_shared<std::vector<double>>();
      for (const int64_t count : counts) known->push_back(std::bit_cast<double>(count));
      sharding.counts = std::move(known);
    }
    if (sharding.kind == Kind::kTokens) {
      const bool fits = static_cast<int>(split->lengths.size()) == ranks && !dims.empty();
      const int64_t tokens = fits ? (is_whole ? split->total() : split->local()) : -1;
      for (const int64_t dim : dims)
        if (sizes[static_cast<size_t>(dim)] != sharding.outer * tokens * sharding.inner) fail();
      if (!fits) fail();
    }
    sharding.split = std::move(split);
    return {std::move(sharding), is_whole};
  }

 private:
  static constexpr int64_t kMost = int64_t{1} << 40;

  template <class Numbers>
  static void put(std::ostringstream& text, const Numbers& numbers) {
    text << ' ' << numbers.size();
    for (const int64_t number : numbers) text << ' ' << number;
  }
  [[noreturn]] static void fail() {
    throw CommError(ErrorCode::kDiverged,
                    "pipeline: a message does not say how its tensor is cut along the sequence; the stages do not run "
                    "the same step");
  }
  int64_t number(int64_t least, int64_t most) {
    int64_t number = 0;
    if (!(stream_ >> number) || number < least || number > most) fail();
    return number;
  }
  std::vector<int64_t> numbers(int64_t most, int64_t least_number, int64_t most_number) {
    std::vector<int64_t> numbers;
    for (int64_t left = number(0, most); left > 0; --left) numbers.push_back(number(least_number, most_number));
    return numbers;
  }

  std::istringstream stream_;
};

/// Why a tensor that is sharded so neither goes to another stage nor becomes whole; null: it does.
const char* obstacle(const Sharding& sharding) {
  if (sharding.kind == Kind::kSelected || sharding.selector.defined() || sharding.selected.defined())
    return "tokens that a mask has selected; select them where they are used, and hand on the mask";
  if (sharding.kind == Kind::kWithin)
    return "written at this rank's tokens alone; write by torch.where() instead, or into a tensor of the program's";
  if (sharding.kind == Kind::kMerged || (sharding.dims.size() > 1 && !sharding.whole.defined()))
    return "whose tokens went into other dims; keep tokens in a dim of their own there";
  return nullptr;
}

}  // namespace

SentTensor sent(const at::Tensor& tensor, std::optional<Sharding> sharding) {
  if (!sharding) return {tensor};
  if (tensor.requires_grad()) sharding->whole.reset();  // the part's gradient comes back
  if (const char* const why = obstacle(*sharding))
    throw StateError(str("pipeline: a stage hands on ", tensor.sizes(), ", ", why));
  const bool is_whole = sharding->kind == Kind::kTokens && sharding->whole.defined();
  return {is_whole ? sharding->whole : tensor, CutText::of(*sharding, is_whole)};
}

TakenTensor taken(const at::Tensor& tensor, const std::string& cut, const Group& group) {
  const WithoutInterception own_operators;
  auto [sharding, is_whole] = CutText(cut).read(tensor.sizes(), group.rank(), group.size());
  at::Tensor part = tensor;
  if (is_whole) {
    sharding.whole = tensor;
    part = part_of(tensor, sharding);
  }
  return {part, std::move(sharding)};
}

at::Tensor whole(const at::Tensor& tensor, const std::optional<Sharding>& sharding, Group& group) {
  if (!sharding || sharding->kind == Kind::kTotal || sharding->kind == Kind::kConstant) return tensor;
  const char* const why = sharding->kind == Kind::kCounting
                              ? "made by the length of a part; make it from tensors that are cut, such as position_ids"
                              : obstacle(*sharding);
  if (why != nullptr) throw StateError(str("pipeline: the last stage returns ", tensor.sizes(), ", ", why));
  if (sharding->whole.defined()) return sharding->whole;
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  const TokenSplit& split = *sharding->split;
  const int64_t dim = sharding->dim(), longest = *std::max_element(split.lengths.begin(), split.lengths.end());
  const at::Tensor own = tensor.unflatten(dim, {sharding->outer, split.local(), sharding->inner}).movedim(dim + 1, 0);
  std::vector<int64_t> sizes = own.sizes().vec();
  sizes[0] = longest;
  const at::Tensor padded = at::empty(sizes, own.options());
  padded.narrow(0, 0, split.local()).copy_(own);
  padded.narrow(0, split.local(), longest - split.local()).zero_();
  sizes[0] = longest * group.size();
  const at::Tensor all = at::empty(sizes, own.options());
  group.all_gather(all.view(-1), padded.view(-1)).wait();
  std::vector<at::Tensor> of_rank;
  for (int rank = 0; rank < group.size(); ++rank)
    of_rank.push_back(all.narrow(0, rank * longest, split.lengths[static_cast<size_t>(rank)]));
  return at::cat(of_rank).movedim(0, dim + 1).flatten(dim, dim + 2);
}

}  // namespace trireme::sequence
