#include "trireme/checkpoint/reshard.h"

#include <algorithm>
#include <map>
#include <string_view>
#include <tuple>
#include <unordered_map>

#include "trireme/base/error.h"

namespace trireme {
namespace {

constexpr int64_t kNumelLimit = int64_t{1} << 62;

std::string shape_text(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

std::string kind_text(const std::vector<int64_t>& shape, at::ScalarType dtype) {
  return shape_text(shape) + " " + safetensors_dtype(dtype);
}

void check_inside(const SliceSpec& slice, const std::string& where) {
  const int64_t numel = checked_numel(slice.shape, slice.name);
  if (slice.begin < 0 || slice.numel < 0 || slice.begin > numel - slice.numel) {
    throw CheckpointError(
        str(where, ": elements [", slice.begin, ", ", slice.begin + slice.numel, ") are outside of its ", numel));
  }
}

/// A range of one tensor and the ranks that hold it.
struct Held {
  int64_t begin = 0;
  int64_t numel = 0;
  std::vector<SliceWrite> holders;
};

/// Everything that the tables say about one tensor.
struct Gathered {
  SliceSpec first;
  int first_rank = 0;
  std::map<std::pair<int64_t, int64_t>, std::vector<SliceWrite>> holders_of_range;
};

void check_same(const Gathered& gathered, const SliceSpec& slice, int rank) {
  if (slice.shape == gathered.first.shape && slice.dtype == gathered.first.dtype) return;
  throw CheckpointError(str("tensor \"", slice.name, "\" is ", kind_text(gathered.first.shape, gathered.first.dtype),
                            " on rank ", gathered.first_rank, " and ", kind_text(slice.shape, slice.dtype), " on rank ",
                            rank));
}

/// The ranges in order; throws where they leave a gap or overlap in part.
std::vector<Held> cover(const Gathered& gathered) {
  const std::string where = str("tensor \"", gathered.first.name, "\"");
  const int64_t numel = checked_numel(gathered.first.shape, gathered.first.name);
  std::vector<Held> ranges;
  int64_t end = 0;
  for (const auto& [range, holders] : gathered.holders_of_range) {
    const auto& [begin, length] = range;
    if (length == 0 && numel > 0) continue;
    if (begin > end) throw CheckpointError(str(where, ": no rank holds elements [", end, ", ", begin, ")"));
    if (begin < end) {
      throw CheckpointError(str(where, ": slices overlap in part: rank ", holders.front().rank, " holds elements [",
                                begin, ", ", begin + length, "), rank ", ranges.back().holders.front().rank, " holds [",
                                ranges.back().begin, ", ", end, ")"));
    }
    ranges.push_back({begin, length, holders});
    end = begin + length;
  }
  if (end != numel) throw CheckpointError(str(where, ": no rank holds elements [", end, ", ", numel, ")"));
  return ranges;
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

std::vector<TensorWrites> plan_writes(const std::vector<std::vector<SliceSpec>>& table_of_rank) {
  std::vector<Gathered> tensors;
  std::unordered_map<std::string, size_t> index_of;
  for (size_t rank = 0; rank < table_of_rank.size(); ++rank) {
    for (size_t i = 0; i < table_of_rank[rank].size(); ++i) {
      const SliceSpec& slice = table_of_rank[rank][i];
      check_inside(slice, str("tensor \"", slice.name, "\" on rank ", rank));
      const auto [entry, is_new] = index_of.try_emplace(slice.name, tensors.size());
      if (is_new) tensors.push_back({slice, static_cast<int>(rank), {}});
      Gathered& gathered = tensors[entry->second];
      check_same(gathered, slice, static_cast<int>(rank));
      gathered.holders_of_range[{slice.begin, slice.numel}].push_back({static_cast<int>(rank), i});
    }
  }

  std::vector<TensorWrites> writes;
  std::vector<int64_t> bytes_of_rank(table_of_rank.size());
  for (const Gathered& gathered : tensors) {
    TensorWrites tensor{gathered.first.name, gathered.first.shape, gathered.first.dtype, {}};
    for (const Held& range : cover(gathered)) {
      const auto least =
          std::min_element(range.holders.begin(), range.holders.end(),
                           [&](const auto& a, const auto& b) { return bytes_of_rank[a.rank] < bytes_of_rank[b.rank]; });
      bytes_of_rank[least->rank] += range.numel * static_cast<int64_t>(c10::elementSize(gathered.first.dtype));
      tensor.slices.push_back(*least);
    }
    writes.push_back(std::move(tensor));
  }
  return writes;
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
    if (saved.shape != wanted.shape || saved.dtype != wanted.dtype) {
      throw CheckpointError(str("tensor \"", wanted.name, "\": expected ", kind_text(wanted.shape, wanted.dtype),
                                ", found in the checkpoint ", kind_text(saved.shape, saved.dtype),
                                saved.shape == wanted.shape ? "; load it into a model of that dtype (bf16.enabled, "
                                                              "fp16.enabled or neither in the configuration)"
                                                            : "; it was saved from another model"));
    }
    check_inside(wanted, str("tensor \"", wanted.name, "\""));
    const int64_t wanted_end = wanted.begin + wanted.numel;
    // The first saved slice that ends behind the beginning of what is wanted.
    auto slice = std::partition_point(saved.slices.begin(), saved.slices.end(),
                                      [&](const SavedSlice& s) { return s.begin + s.numel <= wanted.begin; });
    for (; slice != saved.slices.end() && slice->begin < wanted_end; ++slice) {
      const int64_t begin = std::max(slice->begin, wanted.begin);
      const int64_t end = std::min(slice->begin + slice->numel, wanted_end);
      if (begin >= end) continue;
      reads.push_back({.tensor = found->second,
                       .slice = static_cast<size_t>(slice - saved.slices.begin()),
                       .destination = d,
                       .begin = begin - slice->begin,
                       .destination_begin = begin - wanted.begin,
                       .numel = end - begin});
    }
  }
  std::stable_sort(reads.begin(), reads.end(), [&](const SliceRead& a, const SliceRead& b) {
    const SavedSlice& x = manifest.tensors[a.tensor].slices[a.slice];
    const SavedSlice& y = manifest.tensors[b.tensor].slices[b.slice];
    return std::tie(x.file, x.offset, a.begin) < std::tie(y.file, y.offset, b.begin);
  });
  return reads;
}

}  // namespace trireme
