#include "trireme/base/new_file.h"

#include <unistd.h>

#include <utility>

#include "trireme/base/error.h"
#include "trireme/base/log.h"

namespace trireme {

NewFile::NewFile(FileSystem& files, std::filesystem::path path)
    : files_(files),
      path_(std::move(path)),
      // The process's id keeps two writers of one path from mixing their bytes; the last rename wins.
      temporary_(path_.string() + ".tmp" + std::to_string(::getpid())),
      file_(files.create(temporary_)) {}

NewFile::~NewFile() {
  if (committed_) return;
  file_.reset();
  try {
    files_.remove_all(temporary_);
  } catch (const IoError&) {  // the error that brought us here says what is wrong
  }
}

void NewFile::finish() {
  if (!file_) return;
  file_->sync();
  file_->close();
  file_.reset();
}

void NewFile::commit() {
  finish();
  files_.rename(temporary_, path_);
  committed_ = true;
  files_.sync_directory(path_.has_parent_path() ? path_.parent_path() : std::filesystem::path("."));
}

void NewFiles::add(const std::filesystem::path& path, std::string_view text) {
  NewFile& file = add(path);
  file.write(text);
  file.finish();
}

void NewFiles::commit() {
  for (NewFile& file : new_files_) file.finish();
  try {
    for (NewFile& file : new_files_) file.commit();
  } catch (...) {
    for (auto file = new_files_.rbegin(); file != new_files_.rend(); ++file) {
      try {
        if (file->committed_) files_.remove_all(file->path_);
      } catch (const IoError& error) {
        log(LogLevel::kWarning, str("removing an incomplete output: ", error.what()));
      }
    }
    throw;
  }
}

std::vector<std::filesystem::path> NewFiles::paths() const {
  std::vector<std::filesystem::path> paths;
  for (const NewFile& file : new_files_) paths.push_back(file.path_);
  return paths;
}

}  // namespace trireme
