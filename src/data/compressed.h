// Texts out of files that gzip or zstd has written.
#pragma once

#include <cstddef>
#include <span>
#include <string>

namespace trireme {

/// Whether `file` begins as gzip's or zstd's files do.
bool is_compressed(std::span<const std::byte> file);

/// The bytes that `file` holds, of all its members or frames, one after another. Zeros behind the last member of gzip
/// are padding.
///
/// Requires  is_compressed(file).
/// Throws    DataError opening with `path`, and the offset in the file: it is damaged, cut short, or followed by
///           something else.
std::string decompressed(std::span<const std::byte> file, const std::string& path);

}  // namespace trireme
