// From a path as the user gives it to a list of files.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace trireme {

struct FoundFile {
  std::filesystem::path path;
  std::string
      relative;  ///< to the folder, or to the part of a glob before its first wildcard; of a single file, its name
};

struct FoundFiles {
  std::vector<FoundFile> files;  ///< in the order of `relative`, so that no folder's order of entries matters
  bool by_name = false;          ///< the user named this one file
};

/// The regular files behind `path` (a file, a folder or a glob) without those of which a name in `relative` matches an
/// `exclude` pattern. Hidden files and folders are left out unless the pattern spells their dot. Links to folders are
/// not followed.
///
/// Throws    DataError: nothing is there, nothing matches, a folder cannot be read.
FoundFiles find_files(const std::string& path, const std::vector<std::string>& exclude);

}  // namespace trireme
