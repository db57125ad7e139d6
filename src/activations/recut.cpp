#include "activations/recut.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace trireme {
namespace {

/// Elements along a dim, where they begin at who has them by `from`, and at who gets them by `to`.
struct Shared {
  int64_t at_holder = 0, at_getter = 0, size = 1;
};

/// The elements of `used` in a part of the intervals `held`, and in one of `got`.
std::vector<Shared> shared_between(const std::vector<Interval>& held, const std::vector<Interval>& used,
                                   const std::vector<Interval>& got) {
  std::vector<Shared> found;
  int64_t at_holder = 0;
  for (const Interval& one : held) {
    for (const Interval& some : used) {
      int64_t at_getter = 0;
      for (const Interval& other : got) {
        const int64_t begin = std::max({one.begin, some.begin, other.begin});
        const int64_t end = std::min({one.end, some.end, other.end});
        if (begin < end) found.push_back({at_holder + begin - one.begin, at_getter + begin - other.begin, end - begin});
        at_getter += other.size();
      }
    }
    at_holder += one.size();
  }
  return found;
}

int64_t count(const std::vector<Shared>& some) {
  int64_t sum = 0;
  for (const Shared& one : some) sum += one.size;
  return sum;
}

/// The same cut of a dim of one stretch.
Cut spelled_out(const Cut& cut) {
  std::vector<std::vector<Interval>> of_rank(cut.ranges->ranks());
  for (int rank = 0; rank < cut.ranges->ranks(); ++rank)
    for (int64_t begin = 0; begin < cut.whole(); begin += cut.ranges->whole())
      for (const Interval& one : cut.ranges->of_rank(rank))
        of_rank[rank].push_back({begin + one.begin, begin + one.end});
  return {cut.axis, cut.dim, 1, std::make_shared<const Ranges>(cut.whole(), std::move(of_rank))};
}

/// The elements that one rank has by `from` and another one gets by `to`.
class Blocks {
 public:
  Blocks(const Cut& from, const Cut& to) : from_(from), to_(to), is_along_one_dim_(from.dim == to.dim) {
    if (!is_along_one_dim_ || from.outer == to.outer) return;
    from_ = spelled_out(from);
    to_ = spelled_out(to);
  }

  struct Block {
    std::vector<Shared> along_from, along_to;  ///< of one dim: the first has all, the second nothing to choose
    int64_t indices() const { return count(along_from) * count(along_to); }
  };
  Block between(int holder, int getter) const {
    const std::vector<Interval> all_from{{0, from_.ranges->whole()}}, all_to{{0, to_.ranges->whole()}};
    const std::vector<Interval>& got = to_.ranges->of_rank(getter);
    return {shared_between(from_.ranges->of_rank(holder), from_.ranges->first_of(holder),
                           is_along_one_dim_ ? got : all_from),
            is_along_one_dim_ ? std::vector<Shared>{Shared{}} : shared_between(all_to, all_to, got)};
  }

  enum class Side : uint8_t { kHolder, kGetter };
  /// Sizes of a rank's part on the other side.
  std::vector<int64_t> sizes_across(const at::Tensor& part, Side side, int rank) const {
    std::vector<int64_t> sizes = part.sizes().vec();
    const Cut &own = side == Side::kHolder ? from_ : to_, &other = side == Side::kHolder ? to_ : from_;
    sizes[own.dim] = own.whole();
    sizes[other.dim] = other.local(rank);
    return sizes;
  }
  /// Elements of a part for each index of a block.
  int64_t elements_of_index(const at::Tensor& part) const {
    int64_t count = from_.outer * (is_along_one_dim_ ? 1 : to_.outer);
    for (int64_t dim = 0; dim < part.dim(); ++dim) count *= dim == from_.dim || dim == to_.dim ? 1 : part.size(dim);
    return count;
  }
  /// Views of a rank's part: the pieces of a block, in the same order on both sides.
  std::vector<at::Tensor> pieces(const at::Tensor& part, Side side, const Block& block) const {
    const auto begin = [side](const Shared& one) { return side == Side::kHolder ? one.at_holder : one.at_getter; };
    at::Tensor open = part;
    const auto unfold = [&open](const Cut& cut) {  // by what the part has of the dim
      open = open.unflatten(cut.dim, {cut.outer, open.size(cut.dim) / cut.outer});
    };
    unfold(from_.dim >= to_.dim ? from_ : to_);  // the last dim first, so that the other one keeps its number
    if (!is_along_one_dim_) unfold(from_.dim >= to_.dim ? to_ : from_);
    const int64_t from = from_.dim + (from_.dim > to_.dim ? 2 : 1), to = to_.dim + (to_.dim > from_.dim ? 2 : 1);
    std::vector<at::Tensor> found;
    for (const Shared& one : block.along_from)
      for (const Shared& other : block.along_to) {
        const at::Tensor rows = open.narrow(from, begin(one), one.size);
        found.push_back(is_along_one_dim_ ? rows : rows.narrow(to, begin(other), other.size));
      }
    return found;
  }

 private:
  Cut from_, to_;
  const bool is_along_one_dim_;
};

}  // namespace

at::Tensor recut_blocks(const at::Tensor& part, const Cut& from, const Cut& to, bool adds, Group& group) {
  using Side = Blocks::Side;
  const Blocks blocks(from, to);
  const Side sending = adds ? Side::kGetter : Side::kHolder, getting = adds ? Side::kHolder : Side::kGetter;
  const auto block = [&](int sender, int getter) {
    return adds ? blocks.between(getter, sender) : blocks.between(sender, getter);
  };
  const int own = group.rank(), ranks = group.size();
  const int64_t of_index = blocks.elements_of_index(part);
  int64_t most = 0;
  for (int sender = 0; sender < ranks; ++sender)
    for (int getter = 0; getter < ranks; ++getter)
      if (sender != getter) most = std::max(most, block(sender, getter).indices() * of_index);

  at::Tensor received;
  if (most > 0) {
    const at::Tensor sent = at::empty({ranks, most}, part.options());
    for (int peer = 0; peer < ranks; ++peer) {
      if (peer == own) continue;
      int64_t at = 0;
      for (const at::Tensor& piece : blocks.pieces(part, sending, block(own, peer))) {
        sent[peer].narrow(0, at, piece.numel()).view(piece.sizes()).copy_(piece);
        at += piece.numel();
      }
    }
    received = at::empty_like(sent);
    group.all_to_all(received.flatten(), sent.flatten()).wait();
  }
  at::Tensor result = at::zeros(blocks.sizes_across(part, sending, own), part.options());
  for (int peer = 0; peer < ranks; ++peer) {
    if (peer != own && !received.defined()) continue;
    const Blocks::Block of_peer = block(peer, own);
    const std::vector<at::Tensor> mine =
        peer == own ? blocks.pieces(part, sending, of_peer) : std::vector<at::Tensor>();
    const std::vector<at::Tensor> places = blocks.pieces(result, getting, of_peer);
    int64_t at = 0;
    for (size_t i = 0; i < places.size(); ++i) {
      const at::Tensor piece =
          peer == own ? mine[i] : received[peer].narrow(0, at, places[i].numel()).view(places[i].sizes());
      at += places[i].numel();
      adds ? places[i].add_(piece) : places[i].copy_(piece);
    }
  }
  return result;
}

}  // namespace trireme
