// A save in four steps, each of which succeeds on all ranks or throws on all: plan; temporary folder, shards, commit.
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/agreement.h"
#include "checkpoint/directory.h"
#include "checkpoint/save_job.h"
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

/// The slices of this rank's shard, in its order.
std::vector<std::span<const std::byte>> parts_of(const SavePlan& plan, int rank, const StateTree& state) {
  std::vector<std::span<const std::byte>> parts;
  for (const ShardPlan& shard : plan.shards) {
    if (shard.rank != rank) continue;
    for (const ShardSlice& slice : shard.slices) {
      const at::Tensor& data = state.tensors[slice.source].data;
      parts.emplace_back(static_cast<const std::byte*>(data.const_data_ptr()), data.nbytes());
    }
  }
  return parts;
}

/// Writes this rank's shard; returns the checksums of its slices, one block after the other, as raw bytes.
std::string write_own_shard(FileSystem& files, const Path& folder, const SaveJob& job, int rank) {
  std::string raw;
  for (size_t i = 0; i < job.plan.shards.size(); ++i) {
    const ShardPlan& shard = job.plan.shards[i];
    if (shard.rank != rank) continue;
    for (const auto& checksums : write_shard(files, folder / job.plan.manifest.files[i].name, shard.header, job.parts))
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

SaveJob prepare_save(Group& group, const std::string& rank_tag, const StateTree& state, const SaveOptions& options) {
  SaveJob job;
  job.tag = agree_on_tag(group, rank_tag, options.tags);
  check_tag(job.tag);
  Tables tables = exchange(group, state);
  job.plan = plan_shards(tables.slices_of_rank);  // the same, or the same error, on every rank
  job.values = state.values;
  job.values_of_rank = std::move(tables.values_of_rank);
  job.parts = parts_of(job.plan, group.rank(), state);
  return job;
}

SavedCheckpoint write_save(Group& group, const Path& directory, SaveJob job, const SaveOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  FileSystem& files = options.files ? *options.files : posix_file_system();
  std::optional<SaveTransaction> transaction;  // on rank 0
  const Path temporary = broadcast_or_throw(
      group, [&] { return transaction.emplace(files, directory, job.tag, options).temporary().string(); });
  const auto checksums = gather_or_throw(group, [&] { return write_own_shard(files, temporary, job, group.rank()); });

  SavedCheckpoint saved{.path = directory / job.tag};
  Manifest& manifest = job.plan.manifest;
  for (const SavedFile& file : manifest.files) saved.tensor_bytes += file.bytes - file.header_bytes;
  const auto seconds = broadcast_or_throw(group, [&] {
    add_checksums(job.plan, checksums);
    manifest.software = Json{{"trireme", kVersion}, {"torch", TORCH_VERSION}}.dump();
    manifest.values = std::move(job.values);
    manifest.rank_values = std::move(job.values_of_rank);
    transaction->commit(dump_manifest(manifest));
    return std::to_string(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  });
  saved.seconds = std::stod(seconds);
  saved.blocked_seconds = saved.seconds;
  return saved;
}

SavedCheckpoint save_checkpoint(Group& group, const Path& directory, const std::string& tag, const StateTree& state,
                                const SaveOptions& options) {
  return write_save(group, directory, prepare_save(group, tag, state, options), options);
}

}  // namespace trireme
