// The directory at the end of a zip archive, checked before a reader trusts the sizes that it declares.
#pragma once

#include <cstddef>
#include <string>

#include "trireme/base/file.h"

namespace trireme::pickle {

/// Refuses an archive, bytes [begin, begin + bytes) of `file`, whose records are compressed or declare more bytes than
/// there are: a reader would take memory for what they declare. An archive without a directory is left to the reader.
///
/// Throws    CheckpointError that opens with `origin` and names the record.
void check_zip_directory(ReadableFile& file, size_t begin, size_t bytes, const std::string& origin);

}  // namespace trireme::pickle
