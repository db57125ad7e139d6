#include "activations/selections.h"

#include <ATen/ExpandUtils.h>
#include <ATen/TensorOperators.h>

#include <algorithm>
#include <utility>

#include "activations/held.h"
#include "trireme/base/error.h"

namespace trireme {
namespace {

bool is_mask(const at::Tensor& index) {
  return index.defined() && (index.scalar_type() == at::kBool || index.scalar_type() == at::kByte);
}

/// The elements that `mask` takes, in its order, by the rank that has them where `cut` cuts it.
std::shared_ptr<const Ranges> taken_of(const at::Tensor& mask, const Cut& cut) {
  const int64_t whole = cut.ranges->whole();
  std::vector<int> owner(static_cast<size_t>(whole));
  for (int rank = 0; rank < cut.ranges->ranks(); ++rank)
    for (const Interval& one : cut.ranges->of_rank(rank))
      std::fill(owner.begin() + one.begin, owner.begin() + one.end, rank);
  const at::Tensor places = mask.nonzero().select(1, cut.dim).contiguous().cpu();
  const auto* const place = places.const_data_ptr<int64_t>();
  std::vector<std::vector<Interval>> of_rank(static_cast<size_t>(cut.ranges->ranks()));
  for (int64_t i = 0; i < places.numel(); ++i) {
    std::vector<Interval>& own = of_rank[static_cast<size_t>(owner[static_cast<size_t>(place[i] % whole)])];
    if (own.empty() || own.back().end != i)
      own.push_back({i, i + 1});
    else
      own.back().end = i + 1;
  }
  return std::make_shared<const Ranges>(places.numel(), std::move(of_rank));
}

/// One operator that takes or writes elements of a part by a mask.
class Selection {
 public:
  Selection(AxisPass& pass, OperatorCall& call, Next next, const PlacedArguments& found)
      : pass_(pass), call_(call), next_(next), found_(found) {}

  /// False: the mask is not one of a single axis's cut, or not the only index.
  bool run(OperatorRole role) {
    if (role == OperatorRole::kNonzero) return run_nonzero();
    const bool is_index = role == OperatorRole::kIndex, is_put = role == OperatorRole::kPut;
    const bool is_indexed = (is_index || is_put) && call_.arguments()[1].isOptionalTensorList();
    if (found_[0].index != 0) return is_put && is_indexed && run_into_whole();
    self_ = &found_[0];
    if (role == OperatorRole::kMaskedSelect) return run_masked_select();
    return is_indexed && run_indexed(is_put);
  }

 private:
  bool run_nonzero() {
    const PlacedArgument one = found_[0];
    const at::Tensor whole = next_.run(call_, [&] { return pass_.whole({0, one.tensor.ne(0), one.known}); });
    argument(call_, 0) = whole;
    next_(call_);
    return true;
  }

  bool run_masked_select() {
    const at::Tensor mask = whole_of(call_.arguments()[1].toTensor());
    const std::vector<int64_t> sizes = at::infer_size(pass_.whole_sizes_of(*self_), mask.sizes());
    const auto added = static_cast<int64_t>(sizes.size()) - self_->tensor.dim();
    const auto cut = cut_among(0, static_cast<int64_t>(sizes.size()), added);
    if (!cut || self_->tensor.size(cut->dim - added) != cut->local(rank_along(*cut))) return false;
    const auto [own, taken] = next_.run(call_, [&] {
      const at::Tensor all = mask.expand(sizes);
      return std::pair(slice_of(all, *cut, rank_along(*cut)), taken_of(all, *cut));
    });
    argument(call_, 1) = own;
    next_(call_);
    give_taken(*taken, placement_by(*cut, taken, 0, 0));
    return true;
  }

  /// Into a tensor that every rank has, by a mask that is cut: into this rank's part of it.
  bool run_into_whole() {
    const std::vector<at::Tensor> indices = tensors_among(call_.arguments().slice(1, 1));
    const auto found = std::ranges::find_if(indices, is_mask);
    const auto known = found != indices.end() ? pass_.find(known_to_program(*found)) : nullptr;
    const at::Tensor written = call_.arguments()[0].toTensor();
    if (known == nullptr || !known->is_cut()) return false;
    Placement placement = *known->placement;
    for (Placement::Cuts& cuts : placement)
      for (Cut& cut : cuts) cut.dim += found - indices.begin();
    const auto within = pass_.kept().placement(std::move(placement));
    const bool in_place = writes_first(call_);
    if (in_place && !may_hold_within(pass_, *within)) return false;
    PlacedArgument self{0, written, part_by(within)};
    next_.run(call_, [&] {
      for (const Cut& cut : within->at(pass_.position()))
        self.tensor = slice_of(in_place ? self.tensor : pass_.enter(self.tensor, cut.axis), cut, rank_along(cut));
    });
    argument(call_, 0) = self.tensor;
    self_ = &self;
    if (!run_indexed(/*is_put=*/true)) {
      argument(call_, 0) = written;
      return false;
    }
    if (!in_place) return true;
    call_.stack.back() = written;
    pass_.hold_within(written, within);
    return true;
  }

  /// The argument as the program gave it.
  const at::Tensor& known_to_program(const at::Tensor& argument) const {
    for (const PlacedArgument& one : found_)
      if (one.part.defined() && one.tensor.is_same(argument)) return one.part;
    return argument;
  }

  bool run_indexed(bool is_put) {
    std::vector<at::Tensor> indices = tensors_among(call_.arguments().slice(1, 1));
    const auto found = std::ranges::find_if(indices, is_mask);
    if (found == indices.end() ||
        std::ranges::count_if(indices, [](const at::Tensor& one) { return one.defined(); }) != 1)
      return false;
    const auto first = static_cast<int64_t>(found - indices.begin());
    const at::Tensor mask = whole_of(*found);
    const auto cut = cut_among(first, first + mask.dim(), 0);
    if (!cut) return false;
    Cut of_mask = *cut;
    of_mask.dim -= first;
    if (mask.size(of_mask.dim) != cut->whole())
      pass_.refuse(call_, self_->tensor, str("takes by a mask ", mask.sizes(), " elements"),
                   str("give it the whole's size, ", cut->whole(), " in dim ", of_mask.dim));
    const auto [own, taken] =
        next_.run(call_, [&] { return std::pair(slice_of(mask, of_mask, rank_along(*cut)), taken_of(mask, of_mask)); });
    *found = own;
    argument(call_, 1) = with_tensors({call_.arguments()[1]}, indices)[0];
    const auto placement = placement_by(*cut, taken, first, mask.dim());
    if (!is_put) {
      next_(call_);
      give_taken(*taken, placement);
      return true;
    }
    const int64_t dims = self_->tensor.dim() - mask.dim() + 1;
    if (!take_values(first - dims, *cut, *taken)) return false;
    const auto self = self_->known->placement;
    next_(call_);
    if (!writes_first(call_)) call_.stack.back() = pass_.as_part(call_.stack.back().toTensor(), self);
    return true;
  }

  /// Fewer elements than ranks every rank gets.
  void give_taken(const Ranges& taken, const std::shared_ptr<const Placement>& placement) {
    const at::Tensor own = call_.stack.back().toTensor();
    if (taken.whole() == 0) return;  // every rank has nothing
    if (taken.whole() < taken.ranks())
      call_.stack.back() = next_.run(call_, [&] { return pass_.whole({0, own, part_by(placement)}); });
    else
      call_.stack.back() = pass_.as_part(own, placement);
  }

  /// The values that are written, of this rank's elements; `dim`: theirs, counted from behind.
  bool take_values(int64_t dim, const Cut& cut, const Ranges& taken) {
    const at::Tensor values = call_.arguments()[2].toTensor();
    const auto known = std::ranges::find(found_, size_t{2}, &PlacedArgument::index);
    const Cut of_values{.axis = cut.axis, .dim = values.dim() + dim, .ranges = std::make_shared<const Ranges>(taken)};
    if (known != found_.end()) {
      const Cut* const own = pass_.cut_of(*known->known, cut.axis);
      return own != nullptr && *own == of_values && known->known->placement->at(pass_.position()).size() == 1;
    }
    if (of_values.dim < 0 || values.size(of_values.dim) == 1) return true;
    if (values.size(of_values.dim) != taken.whole()) return false;
    argument(call_, 2) =
        next_.run(call_, [&] { return slice_of(pass_.enter(values, cut.axis), of_values, rank_along(cut)); });
    return true;
  }

  /// The only cut of the first argument in dims [first, last) of it, with `added` dims before; nothing: none, several,
  /// or one of which ranks share elements.
  std::optional<Cut> cut_among(int64_t first, int64_t last, int64_t added) const {
    std::optional<Cut> found;
    for (Cut cut : self_->known->placement->at(pass_.position())) {
      cut.dim += added;
      if (cut.dim < first || cut.dim >= last) continue;
      if (found || cut.ranges->overlaps()) return std::nullopt;
      found = cut;
    }
    return found;
  }

  /// How the result is cut, of which dim `first` has what was taken in place of `count` dims.
  std::shared_ptr<const Placement> placement_by(const Cut& cut, const std::shared_ptr<const Ranges>& taken,
                                                int64_t first, int64_t count) {
    Placement placement(pass_.grid().positions());
    for (int position = 0; position < pass_.grid().positions(); ++position)
      for (const Cut& one : self_->known->placement->at(position)) {
        Cut made = one;
        if (one.axis == cut.axis)
          made = {.axis = cut.axis, .dim = first, .ranges = taken};
        else if (one.dim >= first)
          made.dim += 1 - count;
        placement.at(position).push_back(made);
      }
    return pass_.kept().placement(std::move(placement));
  }

  at::Tensor whole_of(const at::Tensor& mask) {
    const auto known =
        std::ranges::find_if(found_, [&](const PlacedArgument& one) { return one.tensor.is_same(mask); });
    return known == found_.end() ? mask : next_.run(call_, [&] { return pass_.whole(*known); });
  }

  int rank_along(const Cut& cut) const { return pass_.grid().rank(pass_.position(), cut.axis); }

  AxisPass& pass_;
  OperatorCall& call_;
  const Next next_;
  const PlacedArguments& found_;
  const PlacedArgument* self_ = nullptr;
};

}  // namespace

bool run_selection(AxisPass& pass, OperatorCall& call, Next next, const PlacedArguments& found, OperatorRole role) {
  return Selection(pass, call, next, found).run(role);
}

bool goes_by_mask(const OperatorCall& call) {
  if (call.traits.arguments < 2 || !call.arguments()[1].isOptionalTensorList()) return false;
  return std::ranges::any_of(tensors_among(call.arguments().slice(1, 1)), is_mask);
}

}  // namespace trireme
