// From files to runs of tokens, with everything that can be wrong with them.
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "data/token_stream.h"
#include "trireme/data/dataset.h"

namespace trireme {

struct OpenedFiles {
  std::vector<TokenPiece> pieces;            ///< one per file, none empty
  DataFormat format;                         ///< kBytes, or the first file's
  int64_t skipped_files = 0;                 ///< empty, binary, or (for a token format) neither .bin nor .npy
  std::set<std::string> skipped_kinds = {};  ///< of those whose first bytes say it
  int64_t json_files = 0;                    ///< whose pieces are the texts of a key
  int64_t parquet_files = 0;                 ///< whose pieces are the texts of a column
};

/// Finds, maps and checks the files of `options`. Throws DataError as open_data().
OpenedFiles open_files(const DataOptions& options);

}  // namespace trireme
