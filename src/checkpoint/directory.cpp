#include "checkpoint/directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <system_error>
#include <tuple>

#include "checkpoint/zero_to_fp32.h"
#include "trireme/base/error.h"
#include "trireme/base/json.h"
#include "trireme/base/log.h"

namespace trireme {
namespace {

using Path = std::filesystem::path;

constexpr char kManifestName[] = "manifest.json";
constexpr char kLatestName[] = "latest";
constexpr std::string_view kTemporaryPrefix = ".tmp-";
constexpr std::string_view kOldPrefix = ".old-";
/// The name of a temporary file that a killed writer of `latest` leaves; its process id follows.
constexpr std::string_view kLatestTemporaryPrefix = "latest.tmp";
/// Leaves room for prefix and process id in a file name of 255 bytes.
constexpr size_t kTagLimit = 200;

std::string tag_problem(const std::string& tag) {
  if (tag.empty()) return "it is empty";
  if (tag.size() > kTagLimit) return str("it has ", tag.size(), " characters, more than ", kTagLimit);
  if (tag[0] == '.') return "it begins with a dot";
  if (tag.front() == ' ' || tag.back() == ' ') return "it begins or ends with a blank";
  if (tag == kLatestName) return "that file names the tag to resume from";
  if (tag.starts_with(kLatestTemporaryPrefix)) return "such names are temporary files of `latest`";
  for (const unsigned char c : tag)
    if (c == '/' || c == '\\' || c < 0x20 || c == 0x7f) return "it has a slash or a control character";
  return "";
}

std::string list_text(const std::vector<std::string>& tags) {
  std::string text;
  for (const auto& tag : tags) text += (text.empty() ? "" : ", ") + tag;
  return text;
}

/// Errors of `work` become a warning: the checkpoint itself is complete, and the next save tidies up.
template <class Work>
void tidy(const char* what, const Work& work) noexcept {
  try {
    work();
  } catch (const std::exception& error) {
    log(LogLevel::kWarning, str(what, ": ", error.what()));
  }
}

}  // namespace

void check_tag(const std::string& tag) {
  if (const auto problem = tag_problem(tag); !problem.empty())
    throw CheckpointError(
        str("tag \"", tag, "\" cannot name a checkpoint: ", problem, "; use a plain name such as global_step100"));
}

std::optional<std::string> latest_tag(const Path& directory) {
  FileSystem& files = posix_file_system();
  const Path path = directory / kLatestName;
  if (!files.exists(path)) return std::nullopt;
  constexpr size_t kMostBytes = 4096;  // a tag, and blanks
  if (const size_t bytes = files.size(path); bytes > kMostBytes)
    throw CheckpointError(str(path.string(), ": ", bytes,
                              " bytes are no tag; complete checkpoints: ", list_text(complete_tags(directory))));
  std::string tag = files.read(path);
  while (!tag.empty() && (tag.back() == '\n' || tag.back() == '\r' || tag.back() == ' ')) tag.pop_back();
  if (const auto problem = tag_problem(tag); !problem.empty()) {
    // Whatever bytes stand there: one line of plain characters.
    const std::string shown =
        Json(tag.substr(0, 40)).dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace);
    throw CheckpointError(str(path.string(), ": ", shown, " is no tag: ", problem,
                              "; complete checkpoints: ", list_text(complete_tags(directory))));
  }
  return tag;
}

std::vector<std::string> complete_tags(const Path& directory) {
  struct Found {
    std::filesystem::file_time_type written;
    std::string tag;
    // Two saves within the clock's resolution: step9 comes before step10.
    auto key() const { return std::tuple(written, tag.size(), std::string_view(tag)); }
  };
  std::error_code reason;
  std::vector<Found> found;
  for (const auto& entry : std::filesystem::directory_iterator(directory, reason)) {
    const std::string name = entry.path().filename().string();
    const auto written = std::filesystem::last_write_time(entry.path() / kManifestName, reason);
    if (!reason && tag_problem(name).empty()) found.push_back({written, name});
  }
  std::sort(found.begin(), found.end(), [](const Found& a, const Found& b) { return a.key() < b.key(); });
  std::vector<std::string> tags;
  for (auto& item : found) tags.push_back(std::move(item.tag));
  return tags;
}

Path find_checkpoint(FileSystem& files, const Path& directory, const std::string& tag) {
  for (const Path& path : {directory / tag, directory / (std::string(kOldPrefix) + tag)})
    if (files.exists(path / kManifestName)) return path;
  const auto tags = complete_tags(directory);
  throw CheckpointError(str((directory / tag).string(), ": no complete checkpoint; ",
                            tags.empty()
                                ? str("there is none in ", directory.string())
                                : str("the newest complete one is ", tags.back(), " (all: ", list_text(tags), ")")));
}

SaveLock::SaveLock(const Path& directory) : directory_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  const auto reason = [] { return std::error_code(errno, std::generic_category()).message(); };
  if (directory_ < 0) throw IoError(str(directory.string(), ": open directory failed: ", reason()));
  if (::flock(directory_, LOCK_EX | LOCK_NB) == 0) return;
  const bool busy = errno == EWOULDBLOCK;
  const std::string why = reason();
  if (busy || (errno != ENOTSUP && errno != ENOLCK && errno != EINVAL)) ::close(directory_);
  if (busy)
    throw CheckpointError(
        str(directory.string(), ": another run is saving into this directory; give each run its own"));
  if (errno != ENOTSUP && errno != ENOLCK && errno != EINVAL)
    throw IoError(str(directory.string(), ": lock failed: ", why));
  log(LogLevel::kWarning,
      str(directory.string(), ": this file system has no locks (", why, "): two runs must not save here"));
}

SaveLock::~SaveLock() { ::close(directory_); }

SaveTransaction::SaveTransaction(FileSystem& files, const Path& directory, const std::string& tag,
                                 const SaveOptions& options)
    : files_(files),
      directory_(directory),
      tag_(tag),
      options_(options),
      final_(directory / tag),
      old_(directory / (std::string(kOldPrefix) + tag)),
      temporary_(directory / str(kTemporaryPrefix, tag, "-", ::getpid())) {
  check_tag(tag);
  if (!files_.exists(directory_)) {
    files_.create_directories(directory_);
    files_.sync_directory(directory_.has_parent_path() ? directory_.parent_path() : Path("."));
  }
  lock_ = std::make_unique<SaveLock>(directory_);
  recover();
  if (options_.existing == ExistingTag::kRefuse && files_.exists(final_))
    throw CheckpointError(str(final_.string(), ": this tag exists already; choose another, or remove it first"));
  files_.create_directories(temporary_);
  temporary_exists_ = true;
}

SaveTransaction::~SaveTransaction() {
  if (temporary_exists_) tidy("removing a temporary folder", [&] { files_.remove_all(temporary_); });
}

void SaveTransaction::recover() {
  for (const std::string& name : files_.list(directory_)) {
    if (name.starts_with(kTemporaryPrefix) || name.starts_with(kLatestTemporaryPrefix) ||
        name.starts_with(str(kZeroToFp32Name, ".tmp")))
      files_.remove_all(directory_ / name);
    if (!name.starts_with(kOldPrefix)) continue;
    const Path owner = directory_ / name.substr(kOldPrefix.size());
    if (files_.exists(owner / kManifestName)) {
      files_.remove_all(directory_ / name);
    } else {
      files_.rename(directory_ / name, owner);
      files_.sync_directory(directory_);
    }
  }
}

void SaveTransaction::put_in_place() {
  const bool replaces = files_.exists(final_);
  if (replaces) files_.rename(final_, old_);
  bool renamed = false;
  try {
    files_.rename(temporary_, final_);
    renamed = true;
    files_.sync_directory(directory_);
  } catch (...) {
    if (renamed) tidy("undoing a save", [&] { files_.rename(final_, temporary_); });
    if (replaces) tidy("undoing a save", [&] { files_.rename(old_, final_); });
    throw;
  }
  temporary_exists_ = false;
  if (replaces) tidy("removing the replaced checkpoint", [&] { files_.remove_all(old_); });
}

void SaveTransaction::commit(const std::string& manifest) {
  const auto file = files_.create(temporary_ / kManifestName);
  file->write(manifest.data(), manifest.size());
  file->sync();
  file->close();
  files_.sync_directory(temporary_);
  put_in_place();
  if (options_.latest == UpdateLatest::kYes) write_file_atomically(files_, directory_ / kLatestName, tag_ + "\n");
  tidy("writing zero_to_fp32.py", [&] { write_zero_to_fp32(files_, directory_); });
  prune();
}

void SaveTransaction::prune() noexcept {
  if (options_.keep_last <= 0) return;
  tidy("removing old checkpoints", [&] {
    auto tags = complete_tags(directory_);
    const auto latest = latest_tag(directory_);
    std::erase_if(tags, [&](const auto& tag) { return tag == tag_ || tag == latest; });
    // This checkpoint, and where it is another one the one that `latest` names, stay in any case.
    const int always = latest && *latest != tag_ ? 2 : 1;
    const auto spare = static_cast<int64_t>(tags.size()) - std::max(options_.keep_last - always, 0);
    for (int64_t i = 0; i < spare; ++i) {
      // Under a temporary name first: a crash in the middle must not leave half a checkpoint under a tag.
      const Path doomed = directory_ / str(kTemporaryPrefix, "removed-", tags[i]);
      files_.rename(directory_ / tags[i], doomed);
      files_.remove_all(doomed);
    }
  });
}

}  // namespace trireme
