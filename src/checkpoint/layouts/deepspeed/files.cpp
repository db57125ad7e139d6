#include <algorithm>
#include <set>

#include "checkpoint/layouts/deepspeed/parts.h"
#include "checkpoint/layouts/layout.h"
#include "trireme/base/error.h"
#include "trireme/base/file.h"

namespace trireme {
namespace deepspeed {
namespace {

constexpr std::string_view kModelEnd = "_mp_rank_00_model_states.pt";
constexpr std::string_view kOptimizerEnd = "_mp_rank_00_optim_states.pt";
constexpr std::string_view kRankBegin = "zero_pp_rank_";
constexpr std::string_view kWholeModel = "mp_rank_00_model_states.pt";

/// [bf16_]zero_pp_rank_N`end` of N = 0, 1, …: all of them.
std::vector<std::string> files_of_ranks(const std::filesystem::path& folder, const std::vector<std::string>& names,
                                        std::string_view end) {
  std::map<int, std::string> found;
  for (const std::string& name : names) {
    const size_t begin = name.starts_with("bf16_") ? 5 : 0;
    if (name.compare(begin, kRankBegin.size(), kRankBegin) != 0 || !name.ends_with(end)) continue;
    const std::string digits =
        name.substr(begin + kRankBegin.size(), name.size() - end.size() - begin - kRankBegin.size());
    if (digits.empty() || digits.size() > 7 || digits.find_first_not_of("0123456789") != std::string::npos) continue;
    if (!found.emplace(std::stoi(digits), name).second)
      throw CheckpointError(str(folder.string(), ": two files of rank ", digits, ": ", found[std::stoi(digits)],
                                " and ", name, "; remove those of the older run"));
  }
  std::vector<std::string> files;
  for (const auto& [rank, name] : found) {
    if (rank != static_cast<int>(files.size()))
      throw CheckpointError(
          str(folder.string(), ": there is ", name, ", but none of rank ", files.size(), ": the file is missing"));
    files.push_back(name);
  }
  return files;
}

}  // namespace

FileNames find_files(const std::filesystem::path& folder) {
  const std::vector<std::string> names = posix_file_system().list(folder);
  for (const std::string& name : names) {
    const auto refuse = [&](const char* what) {
      throw CheckpointError(str((folder / name).string(), ": ", what, " is not supported yet"));
    };
    if (!name.ends_with(".pt")) continue;
    if (name.starts_with("layer_") || name.starts_with("expp_rank_"))
      refuse("a checkpoint with pipeline stages or experts");
    if (name.find("mp_rank_") != std::string::npos && name.find("mp_rank_00_") == std::string::npos)
      refuse("a checkpoint of a model in several model-parallel parts");
  }
  FileNames files{.model = files_of_ranks(folder, names, kModelEnd),
                  .optimizer = files_of_ranks(folder, names, kOptimizerEnd)};
  files.weights_are_sharded = !files.model.empty();
  const bool has_whole = std::find(names.begin(), names.end(), kWholeModel) != names.end();
  if (has_whole && files.weights_are_sharded)
    throw CheckpointError(str(folder.string(), ": both ", kWholeModel, " and ", files.model[0],
                              ": checkpoints of two ZeRO stages lie in one folder; remove the files of one"));
  if (has_whole) files.model.emplace_back(kWholeModel);
  if (files.weights_are_sharded && files.optimizer.size() != files.model.size())
    throw CheckpointError(str(folder.string(), ": ", files.model.size(), " files *_model_states.pt, but ",
                              files.optimizer.size(),
                              " *_optim_states.pt; ZeRO stage 3 has one of each for every rank"));
  return files;
}

}  // namespace deepspeed

bool is_deepspeed_checkpoint(const std::filesystem::path& path) {
  std::error_code ignored;
  for (const char* name : {"mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"})
    if (std::filesystem::is_regular_file(path / name, ignored)) return true;
  return false;
}

}  // namespace trireme
