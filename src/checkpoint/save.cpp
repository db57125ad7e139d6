// A save in four steps, each of which succeeds on all ranks or throws on all: plan; temporary folder, shards, commit.
#include <torch/version.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "checkpoint/directory.h"
#include "checkpoint/save_job.h"
#include "checkpoint/slices.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/json_limits.h"
#include "trireme/base/log.h"
#include "trireme/base/utf8.h"
#include "trireme/base/version.h"
#include "trireme/comm/agreement.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

void check_json(const std::string& text, const char* what) {
  // The manifest has them one level deeper, and must be readable again.
  constexpr size_t kMostLevels = 450;
  if (parse_plain_json(text, kMostLevels).is_discarded())
    throw CheckpointError(str("the state's ", what, " are not JSON, have a key twice, or nest deeper than ",
                              kMostLevels, " levels: ", excerpt(text, 100)));
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

/// The topology of the ranks that save: the caller's, or one axis.
std::vector<Axis> topology_of(const Group& group, const SaveOptions& options) {
  if (options.topology.empty()) return {{"data", group.size()}};
  if (const Topology topology(options.topology); topology.size() != group.size())
    throw CheckpointError(
        str("save_checkpoint: the topology has ", topology.size(), " ranks, the group ", group.size()));
  return options.topology;
}

/// The plan of a save, made by rank 0: the ranks' tables come one after the other, and none is kept. Collective.
SavePlan plan_together(Group& group, const StateTree& state, const SaveOptions& options) {
  WritePlanner planner;
  SavePlan plan;
  std::vector<std::string> rank_values;
  collect_or_throw(
      group,
      [&] {
        check_json(state.values, "values");
        check_json(state.rank_values, "rank_values");
        (void)topology_of(group, options);
        return state.rank_values + '\n' + dump_slices(slices_of(state));
      },
      [&](int rank, const std::string& text) {
        // dump_slices writes no line break, rank_values may have some.
        const size_t split = text.rfind('\n');
        rank_values.push_back(text.substr(0, split));
        planner.add(rank, parse_slices(std::string_view(text).substr(split + 1)));
        if (rank + 1 == group.size()) plan = plan_shards(planner.finish(), group.size());
      });
  if (group.rank() != 0) return plan;
  plan.manifest.topology = topology_of(group, options);
  plan.manifest.software = Json{{"trireme", kVersion}, {"torch", TORCH_VERSION}}.dump();
  plan.manifest.values = state.values;
  plan.manifest.rank_values = std::move(rank_values);
  return plan;
}

/// The orders for rank `rank`: a line of JSON that names entries of its table in the order of its shard, then the
/// shard's header, whose first bytes are no text.
std::string orders_of(const SavePlan& plan, int rank, int64_t tensor_bytes) {
  Json orders = {{"tensor_bytes", tensor_bytes}, {"file", ""}, {"slices", Json::array()}};
  std::string header;
  for (size_t i = 0; i < plan.shards.size(); ++i) {
    const ShardPlan& shard = plan.shards[i];
    if (shard.rank != rank) continue;
    orders["file"] = plan.manifest.files[i].name;
    header = shard.header;
    for (const ShardSlice& slice : shard.slices) orders["slices"].push_back(slice.source);
  }
  return orders.dump() + '\n' + header;
}

/// Writes this rank's shard; returns the checksums of its slices, one block after the other, as raw bytes.
std::string write_own_shard(FileSystem& files, const Path& folder, const SaveJob& job) {
  std::string raw;
  if (job.file_name.empty()) return raw;
  for (const auto& checksums : write_shard(files, folder / job.file_name, job.header, job.slices))
    raw.append(reinterpret_cast<const char*>(checksums.data()), checksums.size() * sizeof(uint64_t));
  return raw;
}

void add_checksums(SavePlan& plan, int rank, const std::string& raw) {
  for (const ShardPlan& shard : plan.shards) {
    if (shard.rank != rank) continue;
    const char* next = raw.data();
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
  job.plan = plan_together(group, state, options);
  int64_t tensor_bytes = 0;
  for (const SavedFile& file : job.plan.manifest.files) tensor_bytes += file.bytes - file.header_bytes;
  const std::string text = distribute(group, [&](int rank) { return orders_of(job.plan, rank, tensor_bytes); });
  const size_t line_end = text.find('\n');
  const Json orders = Json::parse(text.substr(0, line_end));
  job.tensor_bytes = orders["tensor_bytes"].get<int64_t>();
  job.file_name = orders["file"].get<std::string>();
  job.header = text.substr(line_end + 1);
  for (const auto& index : orders["slices"]) job.slices.emplace_back(state.tensors[index.get<size_t>()]);
  return job;
}

SavedCheckpoint write_save(Group& group, const Path& directory, SaveJob job, const SaveOptions& options) {
  const auto start = std::chrono::steady_clock::now();
  FileSystem& files = options.files ? *options.files : posix_file_system();
  std::optional<SaveTransaction> transaction;  // on rank 0
  const Path temporary = broadcast_or_throw(
      group, [&] { return transaction.emplace(files, directory, job.tag, options).temporary().string(); });
  collect_or_throw(
      group, [&] { return write_own_shard(files, temporary, job); },
      [&](int rank, const std::string& raw) { add_checksums(job.plan, rank, raw); });
  const auto seconds = broadcast_or_throw(group, [&] {
    transaction->commit(dump_manifest(job.plan.manifest));
    return std::to_string(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  });
  SavedCheckpoint saved{.path = directory / job.tag, .tensor_bytes = job.tensor_bytes, .seconds = std::stod(seconds)};
  saved.blocked_seconds = saved.seconds;
  return saved;
}

SavedCheckpoint save_checkpoint(Group& group, const Path& directory, const std::string& tag, const StateTree& state,
                                const SaveOptions& options) {
  return write_save(group, directory, prepare_save(group, tag, state, options), options);
}

}  // namespace trireme
