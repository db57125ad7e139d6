// Python's pickle format, read and written as data. https://github.com/python/cpython/blob/3.11/Lib/pickletools.py
// describes the operations; those that torch.save() and its users write are here.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "trireme/formats/pickle/value.h"

namespace trireme::pickle {

/// Reads protocols 2 to 5. Nothing is imported or called: of the classes that a pickle may name (the table in
/// classes.cpp) containers and tensors become values; all others become objects with their state.
///
/// Cost      memory in proportion to `bytes`: at most one value for two bytes, and 40 times as many bytes if each place
///           where a value is named had its own.
/// Throws    CheckpointError that opens with `origin` and the byte: a class that is not in the table (by its name),
///           truncated, an unknown operation, a stack or memo misused, a tensor outside of its storage, text that is
///           not UTF-8.
Document parse(std::string_view bytes, const std::string& origin);

/// The bytes of protocol 2 that Python's pickle, with torch's persistent storages, reads as `document.root()`.
/// Throws    CheckpointError: values nested beyond kMaxDepth, or bytes, sets and storages.
std::string dump(const Document& document);

/// The limit of a pickle without its tensors: values take up to a hundred times as much memory.
inline constexpr size_t kMostBytes = size_t{64} << 20;

/// The deepest nesting of values that functions over them accept.
inline constexpr int kMaxDepth = 200;

}  // namespace trireme::pickle
