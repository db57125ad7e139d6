// Texts of errors with "{}" for values: filled in where an error is thrown, and recognised in a thrown text by tests.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace trireme {

/// `pattern` with each "{}" replaced by the next one of `values`, and left as it is where these are used up.
std::string filled(std::string_view pattern, std::initializer_list<std::string_view> values);

/// Whether some part of `text` is `pattern`, whatever stands in place of each "{}".
bool has_filled(std::string_view text, std::string_view pattern);

}  // namespace trireme
