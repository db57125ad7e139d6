#include "trireme/checkpoint/reshard.h"

#include <algorithm>
#include <string_view>
#include <tuple>

#include "trireme/base/error.h"
#include "trireme/formats/safetensors_header.h"

namespace trireme {
namespace {

std::string kind_text(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  return shape_text(shape) + " " + safetensors_dtype(dtype);
}

std::string named(const std::string& name, const TensorPart& part = {}) {
  const std::string cut = part_text(part);
  return cut.empty() ? str("tensor \"", name, "\"") : str("tensor \"", name, "\" (", cut, ")");
}

void check_inside(const SliceSpec& slice, const std::string& where) {
  (void)checked_numel(slice.part.shape, slice.name);
  if (const std::string problem = part_problem(slice.part); !problem.empty())
    throw CheckpointError(str(where, ": ", problem));
  const int64_t numel = local_numel(slice.part);
  if (slice.begin < 0 || slice.numel < 0 || slice.begin > numel - slice.numel) {
    throw CheckpointError(
        str(where, ": elements [", slice.begin, ", ", slice.begin + slice.numel, ") are outside of its ", numel));
  }
}

/// The saved slices of one part, which stand together.
using SliceIterator = std::vector<SavedSlice>::const_iterator;
std::pair<SliceIterator, SliceIterator> slices_of_part(const SavedTensor& saved, int part) {
  const auto begin = std::partition_point(saved.slices.begin(), saved.slices.end(),
                                          [&](const SavedSlice& slice) { return slice.part < part; });
  return {begin,
          std::partition_point(begin, saved.slices.end(), [&](const SavedSlice& slice) { return slice.part == part; })};
}

}  // namespace

void check_parts(const std::vector<TensorPart>& parts, const std::string& where,
                 const std::function<std::string(size_t)>& who) {
  struct Piece {
    Interval interval;
    size_t part;
  };
  std::vector<Piece> pieces;
  const int dim = parts.front().dim;
  for (size_t i = 0; i < parts.size(); ++i) {
    // Parts that are cut along different dims always share elements.
    if (parts[i].dim != dim)
      throw CheckpointError(str(where, ": parts overlap: ", who(i), " holds ",
                                parts[i].dim < 0 ? "all of it" : part_text(parts[i]), ", ", who(0), " ",
                                dim < 0 ? "all of it" : part_text(parts.front())));
    for (const Interval& interval : parts[i].intervals) pieces.push_back({interval, i});
  }
  if (dim < 0) return;
  std::sort(pieces.begin(), pieces.end(),
            [](const Piece& a, const Piece& b) { return a.interval.begin < b.interval.begin; });
  const int64_t extent = parts.front().shape[dim];
  pieces.push_back({{extent, extent}, 0});
  int64_t end = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    const Interval& interval = pieces[i].interval;
    if (interval.begin > end)
      throw CheckpointError(str(where, ": no rank holds dim ", dim, ": ", end, "-", interval.begin));
    if (interval.begin < end)
      throw CheckpointError(str(where, ": parts overlap: ", who(pieces[i].part), " holds ",
                                part_text(parts[pieces[i].part]), ", ", who(pieces[i - 1].part), " ",
                                part_text(parts[pieces[i - 1].part])));
    end = interval.end;
  }
}

WritePlanner::Tensor& WritePlanner::tensor_of(int rank, const SliceSpec& slice) {
  const auto [entry, is_new] = index_of_.try_emplace(slice.name, tensors_.size());
  if (is_new) tensors_.push_back({slice.name, slice.dtype, rank, {}, 0, {}});
  Tensor& tensor = tensors_[entry->second];
  if (!is_new && (slice.part.shape != tensor.cuts.front().part.shape || slice.dtype != tensor.dtype))
    throw CheckpointError(str(named(slice.name), " is ", kind_text(tensor.cuts.front().part.shape, tensor.dtype),
                              " on rank ", tensor.first_rank, " and ", kind_text(slice.part.shape, slice.dtype),
                              " on rank ", rank));
  if (slice.values.empty()) return tensor;
  if (tensor.values.empty()) {
    tensor.values = slice.values;
    tensor.values_rank = rank;
  } else if (tensor.values != slice.values) {
    throw CheckpointError(str(named(slice.name), " has the values ", tensor.values, " on rank ", tensor.values_rank,
                              " and ", slice.values, " on rank ", rank));
  }
  return tensor;
}

void WritePlanner::add(int rank, std::vector<SliceSpec> table) {
  bytes_of_rank_.resize(rank + 1);
  for (size_t i = 0; i < table.size(); ++i) {
    SliceSpec& slice = table[i];
    check_inside(slice, str(named(slice.name, slice.part), " on rank ", rank));
    Tensor& tensor = tensor_of(rank, slice);
    auto cut = std::find_if(tensor.cuts.begin(), tensor.cuts.end(),
                            [&](const Cut& known) { return known.part == slice.part; });
    if (cut == tensor.cuts.end()) cut = tensor.cuts.insert(cut, {std::move(slice.part), {}});
    cut->holders[{slice.begin, slice.numel}].push_back({rank, i});
  }
}

void WritePlanner::add_slices(const Tensor& tensor, const Cut& cut, TensorWrites& writes) {
  const std::string where = named(tensor.name, cut.part);
  const int64_t numel = local_numel(cut.part);
  const auto part = static_cast<int>(writes.parts.size()) - 1;
  int64_t end = 0;
  for (const auto& [range, holders] : cut.holders) {
    const auto& [begin, length] = range;
    if (length == 0 && numel > 0) continue;
    if (begin > end) throw CheckpointError(str(where, ": no rank holds elements [", end, ", ", begin, ")"));
    if (begin < end) {
      const SliceWrite& former = writes.slices.back();
      throw CheckpointError(str(where, ": slices overlap in part: rank ", holders.front().rank, " holds elements [",
                                begin, ", ", begin + length, "), rank ", former.rank, " holds [", former.begin, ", ",
                                end, ")"));
    }
    const Holder& least = *std::min_element(holders.begin(), holders.end(), [&](const Holder& a, const Holder& b) {
      return bytes_of_rank_[a.rank] < bytes_of_rank_[b.rank];
    });
    bytes_of_rank_[least.rank] += length * static_cast<int64_t>(c10::elementSize(tensor.dtype));
    writes.slices.push_back({part, begin, length, least.rank, least.index});
    end = begin + length;
  }
  if (end != numel) throw CheckpointError(str(where, ": no rank holds elements [", end, ", ", numel, ")"));
}

std::vector<TensorWrites> WritePlanner::finish() {
  std::vector<TensorWrites> result;
  for (Tensor& tensor : tensors_) {
    // A rank without elements of a tensor may name any part of it.
    if (tensor.cuts.size() > 1) {
      const auto is_empty = [](const Cut& cut) {
        return std::all_of(cut.holders.begin(), cut.holders.end(),
                           [](const auto& entry) { return entry.first.second == 0; });
      };
      const Cut first = tensor.cuts.front();
      std::erase_if(tensor.cuts, is_empty);
      if (tensor.cuts.empty()) tensor.cuts = {first};
    }
    std::sort(tensor.cuts.begin(), tensor.cuts.end(), [](const Cut& a, const Cut& b) {
      const auto first = [](const Cut& cut) { return cut.part.intervals.empty() ? 0 : cut.part.intervals[0].begin; };
      return first(a) < first(b);
    });
    std::vector<TensorPart> parts;
    for (const Cut& cut : tensor.cuts) parts.push_back(cut.part);
    check_parts(parts, named(tensor.name),
                [&](size_t i) { return str("rank ", tensor.cuts[i].holders.begin()->second.front().rank); });
    TensorWrites writes{.name = tensor.name, .dtype = tensor.dtype, .parts = {}, .slices = {}, .values = tensor.values};
    for (const Cut& cut : tensor.cuts) {
      writes.parts.push_back(cut.part);
      add_slices(tensor, cut, writes);
    }
    result.push_back(std::move(writes));
  }
  return result;
}

std::vector<TensorWrites> plan_writes(const std::vector<std::vector<SliceSpec>>& table_of_rank) {
  WritePlanner planner;
  for (size_t rank = 0; rank < table_of_rank.size(); ++rank) planner.add(static_cast<int>(rank), table_of_rank[rank]);
  return planner.finish();
}

std::vector<SliceRead> plan_tensor_reads(const SavedTensor& saved, const TensorPart& part, const Interval& range) {
  std::vector<SliceRead> reads;
  const auto count = static_cast<int>(std::max<size_t>(saved.parts.size(), 1));
  for (int index = 0; index < count; ++index) {
    std::vector<PartRun> runs;
    int64_t begin = INT64_MAX, end = 0;  // in the saved part
    for (const PartRun& run : intersect(saved.parts.empty() ? TensorPart{saved.shape} : saved.parts[index], part))
      for (const PartRun& wanted : clip(run, {0, INT64_MAX}, range)) {
        begin = std::min(begin, wanted.a);
        end = std::max(end, wanted.a_end());
        runs.push_back(wanted);
      }
    const auto [first, last] = slices_of_part(saved, index);
    auto slice = std::partition_point(first, last, [&](const SavedSlice& s) { return s.begin + s.numel <= begin; });
    for (; slice != last && slice->begin < end; ++slice) {
      SliceRead read{
          .tensor = 0, .slice = static_cast<size_t>(slice - saved.slices.begin()), .destination = 0, .runs = {}};
      for (const PartRun& run : runs)
        for (PartRun piece : clip(run, {slice->begin, slice->begin + slice->numel}, range)) {
          piece.a -= slice->begin;
          piece.b -= range.begin;
          read.runs.push_back(piece);
        }
      if (!read.runs.empty()) reads.push_back(std::move(read));
    }
  }
  return reads;
}

std::vector<SliceRead> plan_reads(const Manifest& manifest, const std::vector<SliceSpec>& destinations) {
  std::unordered_map<std::string_view, size_t> index_of;
  for (size_t i = 0; i < manifest.tensors.size(); ++i) index_of.emplace(manifest.tensors[i].name, i);

  std::vector<SliceRead> reads;
  for (size_t d = 0; d < destinations.size(); ++d) {
    const SliceSpec& wanted = destinations[d];
    const auto found = index_of.find(wanted.name);
    if (found == index_of.end()) continue;
    const SavedTensor& saved = manifest.tensors[found->second];
    if (saved.shape != wanted.part.shape || saved.dtype != wanted.dtype) {
      throw CheckpointError(str(named(wanted.name), ": expected ", kind_text(wanted.part.shape, wanted.dtype),
                                ", found in the checkpoint ", kind_text(saved.shape, saved.dtype),
                                saved.shape == wanted.part.shape
                                    ? "; load it into a model of that dtype (bf16.enabled, "
                                      "fp16.enabled or neither in the configuration)"
                                    : "; it was saved from another model, or the program had cut it over another "
                                      "number of ranks, and it loads at as many"));
    }
    check_inside(wanted, named(wanted.name, wanted.part));
    for (SliceRead& read : plan_tensor_reads(saved, wanted.part, {wanted.begin, wanted.begin + wanted.numel})) {
      read.tensor = found->second;
      read.destination = d;
      reads.push_back(std::move(read));
    }
  }
  std::stable_sort(reads.begin(), reads.end(), [&](const SliceRead& a, const SliceRead& b) {
    const SavedSlice& x = manifest.tensors[a.tensor].slices[a.slice];
    const SavedSlice& y = manifest.tensors[b.tensor].slices[b.slice];
    return std::tie(x.file, x.offset, a.runs.front().a) < std::tie(y.file, y.offset, b.runs.front().a);
  });
  return reads;
}

}  // namespace trireme
