// The .npy file format, as far as token files need it: one-dimensional arrays of uint16 or uint32.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "trireme/data/dataset.h"

namespace trireme {

struct NpyArray {
  DataFormat format;  ///< kUint16 or kUint32
  size_t offset;      ///< of the first element, in bytes
  int64_t size;       ///< elements
};

/// Reads the header (format versions 1 to 3) of a whole file.
///
/// Throws    DataError opening with `path`: no .npy file, a dtype, order or number of dims that is no token array,
///           fewer bytes than the header promises.
NpyArray parse_npy(std::span<const std::byte> file, const std::string& path);

}  // namespace trireme
