// A save in four steps, each of which succeeds on all ranks or throws on all: plan, temporary folder, shards, commit.
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/agreement.h"
#include "checkpoint/directory.h"
#include "checkpoint/shard.h"
#include "checkpoint/slices.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/log.h"
#include "trireme/base/version.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

void check_json(const std::string& text, const char* what) {
  if (!Json::accept(text)) throw CheckpointError(str("the state's ", what, " are not JSON: ", text.substr(0, 100)));
}

std::string agree_on_tag(Group& group, const std::string& tag, TagValidation validation) {
  const std::vector<std::string> tags = gather_or_throw(group, [&] { return tag; });
  const auto other = std::find_if(tags.begin(), tags.end(), [&](const std::string& its) { return its != tags[0]; });
  if (other == tags.end() || validation == TagValidation::kIgnore) return tags[0];
  const std::string message = str("save_checkpoint: ranks disagree on the tag; rank 0 says '", tags[0], "', rank ",
                                  other - tags.begin(), " '", *other, "'");
  if (validation == TagValidation::kFail) throw CheckpointError(message + "; checkpoint.tag_validation is Fail");
  if (group.rank() == 0) log(LogLevel::kWarning, message + "; rank 0's is used");
  return tags[0];
}

/// Slices and values of all ranks.
struct Tables {
  std::vector<std::vector<SliceSpec>> slices_of_rank;
  std::vector<std::string> values_of_rank;
};

Tables exchange(Group& group, const StateTree& state) {
  const auto texts = gather_or_throw(group, [&] {
    check_json(state.values, "values");
    check_json(state.rank_values, "rank_values");
    return state.rank_values + '\n' + dump_slices(slices_of(state));
  });
  Tables tables;
  for (const auto& text : texts) {
    // dump_slices writes no line break, rank_values may have some.
    const size_t split = text.rfind('\n');
    tables.values_of_rank.push_back(text.substr(0, split));
    tables.slices_of_rank.push_back(parse_slices(std::string_view(text).substr(split + 1)));
  }
  return tables;
}

/// Writes this rank's shard; returns the checksums of its slices, one block after the other, as raw bytes.
std::string write_own_shard(FileSystem& files, const Path& folder, const SavePlan& plan, int rank,
                            const StateTree& state) {
  std::string raw;
  for (size_t i = 0; i < plan.shards.size(); ++i) {
    const ShardPlan& shard = plan.shards[i];
    if (shard.rank != rank) continue;
    std::vector<std::span<const std::byte>> parts;
    for (const ShardSlice& slice : shard.slices) {
      const at::Tensor& data = state.tensors[slice.source].data;
      parts.emplace_back(static_cast<const std::byte*>(data.const_data_ptr()), data.nbytes());
    }
    for (const auto& checksums : write_shard(files, folder / plan.manifest.files[i].name, shard.header, parts))
      raw.append(reinterpret_cast<const char*>(checksums.data()), checksums.size() * sizeof(uint64_t));
  }
  return raw;
}

void add_checksums(SavePlan& plan, const std::vector<std::string>& raw_of_rank) {
  for (const ShardPlan& shard : plan.shards) {
    const char* next = raw_of_rank[shard.rank].data();
    for (const ShardSlice& place : shard.slices) {
      SavedSlice& slice = plan.manifest.tensors[place.tensor].slices[place.slice];
      slice.checksums.resize((slice.bytes + kChecksumBlockBytes - 1) / kChecksumBlockBytes);
      const size_t bytes = slice.checksums.size() * sizeof(uint64_t);
      std::memcpy(slice.checksums.data(), next, bytes);
      next += bytes;
    }
  }
}

}  // namespace

SavedCheckpoint save_checkpoint(Group& group, const Path& directory, const std::string& rank_tag,
                                const StateTree& state, const SaveOptions& options) {
  const std::string tag = agree_on_tag(group, rank_tag, options.tags);
  const auto start = std::chrono::steady_clock::now();
  FileSystem& files = options.files ? *options.files : posix_file_system();

  const Tables tables = exchange(group, state);
  SavePlan plan = plan_shards(tables.slices_of_rank);  // the same, or the same error, on every rank

  std::optional<SaveTransaction> transaction;  // on rank 0
  const Path temporary = broadcast_or_throw(
      group, [&] { return transaction.emplace(files, directory, tag, options).temporary().string(); });
  const auto checksums =
      gather_or_throw(group, [&] { return write_own_shard(files, temporary, plan, group.rank(), state); });

  SavedCheckpoint saved{.path = directory / tag};
  for (const SavedFile& file : plan.manifest.files) saved.tensor_bytes += file.bytes - file.header_bytes;
  const auto seconds = broadcast_or_throw(group, [&] {
    add_checksums(plan, checksums);
    plan.manifest.software = Json{{"trireme", kVersion}, {"torch", TORCH_VERSION}}.dump();
    plan.manifest.values = state.values;
    plan.manifest.rank_values = tables.values_of_rank;
    transaction->commit(dump_manifest(plan.manifest));
    return std::to_string(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  });
  saved.seconds = std::stod(seconds);
  return saved;
}

}  // namespace trireme
