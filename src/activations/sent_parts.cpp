#include "trireme/activations/sent_parts.h"

#include <sstream>
#include <utility>

#include "activations/held.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

constexpr int64_t kMost = int64_t{1} << 40;

/// A message's words on how its tensor is cut; numbers, since the next stage alone reads them.
class CutText {
 public:
  static std::string of(const PlacedTensor& known, int positions) {
    std::ostringstream text;
    text << static_cast<int>(known.held) << ' ' << positions;
    for (int position = 0; position < positions; ++position) {
      const Placement::Cuts& cuts = known.placement->at(position);
      text << ' ' << cuts.size();
      for (const Cut& cut : cuts) put(text, cut);
    }
    return text.str();
  }

  CutText(const std::string& text, const AxisGrid& grid) : stream_(text), grid_(grid) {}

  /// Nothing of the text is trusted. Throws CommError.
  PlacedTensor read(int64_t dims) {
    PlacedTensor known{.held = static_cast<Held>(number(0, static_cast<int64_t>(Held::kWhole)))};
    number(grid_.positions(), grid_.positions());
    Placement placement(grid_.positions());
    for (int position = 0; position < grid_.positions(); ++position)
      for (int64_t left = number(0, grid_.axes()); left > 0; --left) placement.at(position).push_back(cut(dims));
    known.placement = std::make_shared<const Placement>(std::move(placement));
    return known;
  }
  [[noreturn]] static void fail() {
    throw CommError(ErrorCode::kDiverged,
                    "pipeline: a message does not say how its tensor is cut over ranks; the stages do not run the same "
                    "step");
  }

 private:
  static void put(std::ostringstream& text, const Cut& cut) {
    text << ' ' << cut.axis << ' ' << cut.dim << ' ' << cut.outer << ' ' << cut.ranges->whole();
    for (int rank = 0; rank < cut.ranges->ranks(); ++rank) {
      text << ' ' << cut.ranges->of_rank(rank).size();
      for (const Interval& one : cut.ranges->of_rank(rank)) text << ' ' << one.begin << ' ' << one.end;
    }
  }
  Cut cut(int64_t dims) {
    Cut cut;
    cut.axis = static_cast<int>(number(0, grid_.axes() - 1));
    cut.dim = number(0, dims - 1);
    cut.outer = number(1, kMost);
    const int64_t whole = number(0, kMost);
    std::vector<std::vector<Interval>> of_rank(static_cast<size_t>(grid_.ranks(cut.axis)));
    for (std::vector<Interval>& intervals : of_rank) {
      int64_t at = 0;
      for (int64_t left = number(0, whole); left > 0; --left) {
        const int64_t begin = number(at, whole);
        at = number(begin, whole);
        intervals.push_back({begin, at});
      }
    }
    cut.ranges = std::make_shared<const Ranges>(whole, std::move(of_rank));
    return cut;
  }
  int64_t number(int64_t least, int64_t most) {
    int64_t number = 0;
    if (!(stream_ >> number) || number < least || number > most) fail();
    return number;
  }

  std::istringstream stream_;
  const AxisGrid& grid_;
};

}  // namespace

SentTensor sent(AxisPass& pass, const at::Tensor& tensor) {
  const auto known = pass.find(tensor);
  if (!known) return {tensor};
  if (known->is_unknown)
    throw StateError(str("pipeline: a stage hands on ", tensor.sizes(),
                         ", a view of a part, whose dims are not known; "
                         "make views by libtorch's operators"));
  if (!known->is_cut()) return {tensor};
  if (known->held == Held::kWithin)
    throw StateError(str("pipeline: a stage hands on ", tensor.sizes(),
                         ", written at this rank's part alone; write by "
                         "torch.where() instead, or into a part"));
  return {placed_argument(tensor, known).tensor, CutText::of(*known, pass.grid().positions())};
}

at::Tensor taken(AxisPass& pass, const at::Tensor& tensor, const std::string& cut) {
  const WithoutInterception own_operators;
  PlacedTensor known = CutText(cut, pass.grid()).read(tensor.dim());
  const int64_t numel = tensor.numel();
  for (const Cut& one : known.placement->at(pass.position())) {
    const int64_t here =
        known.held == Held::kWhole ? one.whole() : one.local(pass.grid().rank(pass.position(), one.axis));
    if (numel > 0 && tensor.size(one.dim) != here) CutText::fail();
  }
  known.placement = pass.kept().placement(*known.placement);
  if (known.held == Held::kPart) return pass.as_part(tensor, known.placement);
  pass.add(tensor, std::move(known));
  return tensor;
}

at::Tensor whole_tensor(AxisPass& pass, const at::Tensor& tensor) {
  const auto known = pass.find(tensor);
  if (!known || !known->is_cut() || known->held == Held::kWhole) return tensor;
  const WithoutInterception own_operators;
  const at::NoGradGuard no_grad;
  PlacedArgument one = placed_argument(tensor, known);
  if (known->held == Held::kWithin) one.tensor = part_of_whole(pass, one.tensor, *known->placement);
  return pass.whole(one);
}

}  // namespace trireme
