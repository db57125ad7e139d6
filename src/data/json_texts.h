// Texts out of JSON: of a file with a record on each line, or of one that is an array of records or a single one.
#pragma once

#include <string>
#include <string_view>

namespace trireme {

/// Whether `file` is JSON throughout, or its first line is a record.
bool looks_like_json(std::string_view file);

/// The texts that the records of `file` have at `key`, in their order, with a NUL between two. Empty ones are left out.
///
/// Cost      parses the file once.
/// Throws    DataError opening with `path` and the line: a syntax error; a record without `key`, with the keys that it
///           has; a value that is no text, or a text with a NUL in it.
std::string json_texts(std::string_view file, const std::string& path, const std::string& key);

}  // namespace trireme
