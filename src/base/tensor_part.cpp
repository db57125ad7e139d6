#include "trireme/base/tensor_part.h"

#include <algorithm>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {
namespace {

constexpr int64_t kNumelLimit = int64_t{1} << 62;

int64_t product(const std::vector<int64_t>& extents, size_t begin, size_t end) {
  int64_t numel = 1;
  for (size_t i = begin; i < end; ++i) numel *= extents[i];
  return numel;
}

int64_t total(const std::vector<Interval>& intervals) {
  int64_t size = 0;
  for (const Interval& interval : intervals) size += interval.size();
  return size;
}

bool is_whole(const TensorPart& part) { return part.dim < 0; }

/// All of a tensor as a cut along `dim`.
TensorPart cut_along(const TensorPart& part, int dim) {
  if (!is_whole(part)) return part;
  std::vector<int64_t> shape = part.shape.empty() ? std::vector<int64_t>{1} : part.shape;
  const int64_t extent = shape[dim];
  return {std::move(shape), dim, extent > 0 ? std::vector<Interval>{{0, extent}} : std::vector<Interval>{}};
}

void append(std::vector<PartRun>& runs, PartRun run) {
  if (run.numel() == 0) return;
  if (run.length == run.a_stride && run.length == run.b_stride) run = {run.a, run.b, run.numel()};
  if (run.count == 1) run.a_stride = run.b_stride = 0;
  runs.push_back(run);
}

std::vector<PartRun> intersect_same_dim(const TensorPart& a, const TensorPart& b) {
  const auto dim = static_cast<size_t>(a.dim);
  const int64_t outer = product(a.shape, 0, dim), inner = product(a.shape, dim + 1, a.shape.size());
  const int64_t a_row = total(a.intervals) * inner, b_row = total(b.intervals) * inner;
  std::vector<PartRun> runs;
  int64_t a_begin = 0, b_begin = 0;  // of the intervals, in the local tensors
  for (size_t i = 0, j = 0; i < a.intervals.size() && j < b.intervals.size();) {
    const Interval &x = a.intervals[i], &y = b.intervals[j];
    const Interval both{std::max(x.begin, y.begin), std::min(x.end, y.end)};
    if (both.size() > 0)
      append(runs, {(a_begin + both.begin - x.begin) * inner, (b_begin + both.begin - y.begin) * inner,
                    both.size() * inner, outer, a_row, b_row});
    if (x.end < y.end) {
      a_begin += x.size();
      ++i;
    } else {
      b_begin += y.size();
      ++j;
    }
  }
  return runs;
}

/// a.dim < b.dim: an interval of `a` is rows, of each of which an interval of `b` is a piece.
std::vector<PartRun> intersect_other_dim(const TensorPart& a, const TensorPart& b) {
  const auto p = static_cast<size_t>(a.dim), q = static_cast<size_t>(b.dim);
  const int64_t outer = product(a.shape, 0, p), mid = product(a.shape, p + 1, q);
  const int64_t inner = product(a.shape, q + 1, a.shape.size());
  const int64_t a_row = a.shape[q] * inner, b_row = total(b.intervals) * inner;
  const int64_t a_rows = total(a.intervals) * mid, b_rows = a.shape[p] * mid;  // of one index of the outer dims
  std::vector<PartRun> runs;
  for (int64_t o = 0; o < outer; ++o) {
    int64_t a_begin = 0;
    for (const Interval& x : a.intervals) {
      int64_t b_begin = 0;
      for (const Interval& y : b.intervals) {
        append(runs, {(o * a_rows + a_begin * mid) * a_row + y.begin * inner,
                      (o * b_rows + x.begin * mid) * b_row + b_begin * inner, y.size() * inner, x.size() * mid, a_row,
                      b_row});
        b_begin += y.size();
      }
      a_begin += x.size();
    }
  }
  return runs;
}

}  // namespace

int64_t checked_numel(const std::vector<int64_t>& shape, const std::string& name) {
  int64_t numel = 1;
  for (const int64_t extent : shape) {
    if (extent < 0 || (extent > 0 && numel > kNumelLimit / extent))
      throw CheckpointError(str("tensor \"", name, "\": shape ", shape_text(shape), " makes no sense"));
    numel *= extent;
  }
  return numel;
}

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string part_text(const TensorPart& part) {
  if (is_whole(part)) return "";
  std::string text = str("dim ", part.dim, ":");
  if (part.intervals.empty()) return text + " none";
  for (size_t i = 0; i < part.intervals.size(); ++i)
    text += str(i ? ", " : " ", part.intervals[i].begin, "-", part.intervals[i].end);
  return text;
}

std::string part_problem(const TensorPart& part) {
  if (is_whole(part)) return part.intervals.empty() ? "" : "intervals without a dim";
  if (part.dim >= static_cast<int>(part.shape.size()))
    return str("dim ", part.dim, " of a tensor of shape ", shape_text(part.shape));
  int64_t end = 0;
  for (const Interval& interval : part.intervals) {
    if (interval.begin < end || interval.end <= interval.begin || interval.end > part.shape[part.dim])
      return str(part_text(part), " of a tensor of shape ", shape_text(part.shape),
                 ": expected intervals that ascend, are not empty and stay inside");
    end = interval.end;
  }
  return "";
}

TensorPart canonical(TensorPart part) {
  if (is_whole(part)) return part;
  std::vector<Interval> merged;
  for (const Interval& interval : part.intervals) {
    if (!merged.empty() && merged.back().end == interval.begin)
      merged.back().end = interval.end;
    else
      merged.push_back(interval);
  }
  if (total(merged) == part.shape[part.dim]) return {std::move(part.shape)};
  part.intervals = std::move(merged);
  return part;
}

std::vector<int64_t> local_shape(const TensorPart& part) {
  std::vector<int64_t> shape = part.shape;
  if (!is_whole(part)) shape[part.dim] = total(part.intervals);
  return shape;
}

int64_t local_numel(const TensorPart& part) {
  const std::vector<int64_t> shape = local_shape(part);
  return product(shape, 0, shape.size());
}

std::vector<Interval> without(const std::vector<Interval>& from, const std::vector<Interval>& taken) {
  std::vector<Interval> left;
  auto next = taken.begin();
  for (Interval one : from) {
    while (next != taken.end() && next->end <= one.begin) ++next;
    for (auto cut = next; cut != taken.end() && cut->begin < one.end; ++cut) {
      if (cut->begin > one.begin) left.push_back({one.begin, cut->begin});
      one.begin = std::max(one.begin, cut->end);
    }
    if (one.size() > 0) left.push_back(one);
  }
  return left;
}

TensorPart first_held(const std::vector<TensorPart>& parts, int rank) {
  int dim = 0;
  for (const TensorPart& part : parts) dim = std::max(dim, part.dim);
  const TensorPart all = cut_along(parts[static_cast<size_t>(rank)], dim);
  TensorPart own = all;
  for (int before = 0; before < rank; ++before)
    own.intervals = without(own.intervals, cut_along(parts[static_cast<size_t>(before)], dim).intervals);
  return canonical(own == all ? parts[static_cast<size_t>(rank)] : std::move(own));
}

std::vector<PartRun> intersect(const TensorPart& a, const TensorPart& b) {
  TRIREME_CHECK(a.shape == b.shape, "parts of tensors of shapes ", shape_text(a.shape), " and ", shape_text(b.shape));
  if (is_whole(a) || is_whole(b)) {
    const int dim = std::max({a.dim, b.dim, 0});
    return intersect_same_dim(cut_along(a, dim), cut_along(b, dim));
  }
  if (a.dim == b.dim) return intersect_same_dim(a, b);
  if (a.dim < b.dim) return intersect_other_dim(a, b);
  std::vector<PartRun> runs = intersect_other_dim(b, a);
  for (PartRun& run : runs) {
    std::swap(run.a, run.b);
    std::swap(run.a_stride, run.b_stride);
  }
  return runs;
}

std::vector<Interval> places_in(const TensorPart& part, const TensorPart& some) {
  std::vector<Interval> places;
  for (const PartRun& run : intersect(part, some))
    for (int64_t i = 0; i < run.count; ++i) {
      const int64_t begin = run.a + i * run.a_stride;
      places.push_back({begin, begin + run.length});
    }
  std::sort(places.begin(), places.end(), [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> joined;
  for (const Interval& one : places)
    if (!joined.empty() && joined.back().end == one.begin)
      joined.back().end = one.end;
    else
      joined.push_back(one);
  return joined;
}

std::vector<PartRun> clip(const PartRun& run, const Interval& a_range, const Interval& b_range) {
  // How many of the run's elements stand before `place`.
  const auto before = [&](int64_t begin, int64_t stride, int64_t place) {
    if (place <= begin) return int64_t{0};
    const int64_t row = run.count > 1 ? std::min((place - begin) / stride, run.count - 1) : 0;
    return row * run.length + std::min(place - begin - row * stride, run.length);
  };
  const int64_t first =
      std::max(before(run.a, run.a_stride, a_range.begin), before(run.b, run.b_stride, b_range.begin));
  const int64_t last = std::min(before(run.a, run.a_stride, a_range.end), before(run.b, run.b_stride, b_range.end));
  std::vector<PartRun> runs;
  for (int64_t next = first; next < last;) {
    const int64_t row = next / run.length, within = next % run.length;
    const int64_t rows = within == 0 ? (last - next) / run.length : 0;
    PartRun piece{run.a + row * run.a_stride + within,
                  run.b + row * run.b_stride + within,
                  run.length,
                  rows,
                  run.a_stride,
                  run.b_stride};
    if (rows == 0) {
      piece.length = std::min(run.length - within, last - next);
      piece.count = 1;
    }
    next += piece.numel();
    append(runs, piece);
  }
  return runs;
}

}  // namespace trireme
