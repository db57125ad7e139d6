// Kinds of files that are neither text nor tokens, by their first bytes.
#pragma once

#include <cstddef>
#include <optional>
#include <span>

namespace trireme {

struct FileKind {
  const char* name;        ///< "gzip", "Parquet"
  const char* what_to_do;  ///< to train on what is in it; FILE stands for its path
};

/// Contents that a file is expected to have: short magics are not looked for where they may be just that.
enum class Expected { kText, kTokens };

/// The kind that the bytes of a file open with; nothing for texts, tokens and formats that are not known.
std::optional<FileKind> file_kind(std::span<const std::byte> file, Expected expected);

}  // namespace trireme
