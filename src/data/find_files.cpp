#include "data/find_files.h"

#include <fnmatch.h>

#include <algorithm>
#include <system_error>
#include <tuple>
#include <utility>

#include "trireme/base/error.h"

namespace trireme {
namespace {

namespace fs = std::filesystem;

bool has_wildcard(const std::string& text) { return text.find_first_of("*?[") != std::string::npos; }

bool matches(const std::string& pattern, const std::string& name) {
  return ::fnmatch(pattern.c_str(), name.c_str(), FNM_PERIOD) == 0;
}

bool excluded(const fs::path& relative, const std::vector<std::string>& exclude) {
  return std::any_of(relative.begin(), relative.end(), [&](const fs::path& name) {
    return std::any_of(exclude.begin(), exclude.end(),
                       [&](const std::string& pattern) { return ::fnmatch(pattern.c_str(), name.c_str(), 0) == 0; });
  });
}

/// Walks `folder` for the files that match pattern components [at, end).
class Walk {
 public:
  Walk(fs::path root, const std::vector<std::string>& exclude) : root_(std::move(root)), exclude_(exclude) {}

  void run(const std::vector<std::string>& pattern) { visit(root_, pattern, 0); }

  std::vector<FoundFile> take() {
    std::sort(files_.begin(), files_.end(), [](const auto& a, const auto& b) { return a.relative < b.relative; });
    // Two ** can reach the same file in several ways.
    const auto same = [](const auto& a, const auto& b) { return a.relative == b.relative; };
    files_.erase(std::unique(files_.begin(), files_.end(), same), files_.end());
    return std::move(files_);
  }

 private:
  void visit(const fs::path& folder, const std::vector<std::string>& pattern, size_t at) {
    const bool any_depth = pattern[at] == "**";
    if (any_depth && at + 1 < pattern.size()) visit(folder, pattern, at + 1);
    const bool last = at + 1 == pattern.size();
    std::error_code reason;
    for (fs::directory_iterator entry(folder, reason), end; !reason && entry != end; entry.increment(reason)) {
      const std::string name = entry->path().filename().string();
      if (!matches(any_depth ? "*" : pattern[at], name) ||
          excluded(entry->path().lexically_relative(root_), exclude_)) {
        continue;
      }
      std::error_code gone;  // a dangling link is no file
      if (last && entry->is_regular_file(gone)) add(entry->path());
      if (!entry->is_directory(gone) || entry->is_symlink(gone)) continue;
      if (any_depth) visit(entry->path(), pattern, at);
      if (!any_depth && !last) visit(entry->path(), pattern, at + 1);
    }
    if (reason) throw DataError(str(folder.string(), ": the folder cannot be read: ", reason.message()));
  }

  void add(const fs::path& path) { files_.push_back({path, path.lexically_relative(root_).generic_string()}); }

  const fs::path root_;
  const std::vector<std::string>& exclude_;
  std::vector<FoundFile> files_;
};

/// Splits "a/b/*.txt" into the folder "a/b" and the pattern {"*.txt"}.
std::pair<fs::path, std::vector<std::string>> split_glob(const std::string& path) {
  fs::path root;
  std::vector<std::string> pattern;
  for (const auto& part : fs::path(path)) {
    if (pattern.empty() && !has_wildcard(part.string())) {
      root /= part;
    } else {
      pattern.push_back(part.string());
    }
  }
  return {root.empty() ? fs::path(".") : root, pattern};
}

}  // namespace

FoundFiles find_files(const std::string& path, const std::vector<std::string>& exclude) {
  std::error_code reason;
  const auto status = fs::status(path, reason);
  if (fs::is_regular_file(status)) return {{{path, fs::path(path).filename().string()}}, true};

  fs::path root = path;
  std::vector<std::string> pattern = {"**"};
  if (!fs::exists(status) && has_wildcard(path)) {
    std::tie(root, pattern) = split_glob(path);
  } else if (!fs::exists(status)) {
    throw DataError(trireme::str("data path `", path, "` does not exist; give a file, a folder or a glob such as \"",
                                 "corpus/**/*.txt\""));
  } else if (!fs::is_directory(status)) {
    throw DataError(trireme::str("data path `", path, "` is neither a regular file nor a folder; copy it to a file"));
  }
  if (!fs::is_directory(root, reason)) {
    throw DataError(trireme::str("data path `", path, "`: the folder `", root.string(), "` does not exist"));
  }
  Walk walk(root.lexically_normal(), exclude);
  walk.run(pattern);
  auto files = walk.take();
  if (files.empty()) {
    throw DataError(trireme::str("data path `", path, "`: no file there",
                                 exclude.empty() ? "" : " that is not excluded",
                                 " (hidden ones do not count); check the path"));
  }
  return {std::move(files), false};
}

}  // namespace trireme
