// Texts with places to fill in: a refusal is written once, and known again by its text.
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
