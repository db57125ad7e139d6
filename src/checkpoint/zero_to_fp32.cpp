#include "checkpoint/zero_to_fp32.h"

#include <string_view>

#include "checkpoint/zero_to_fp32_text.h"
#include "trireme/base/file.h"

namespace trireme {

void write_zero_to_fp32(FileSystem& files, const std::filesystem::path& directory) {
  constexpr std::string_view script = kZeroToFp32Text;
  const auto path = directory / kZeroToFp32Name;
  if (files.exists(path) && files.size(path) == script.size() && files.read(path) == script) return;
  write_file_atomically(files, path, script);
  std::error_code ignored;  // `python zero_to_fp32.py` works all the same
  std::filesystem::permissions(
      path,
      std::filesystem::perms::owner_exec | std::filesystem::perms::group_exec | std::filesystem::perms::others_exec,
      std::filesystem::perm_options::add, ignored);
}

}  // namespace trireme
