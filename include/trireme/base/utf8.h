// Texts as UTF-8.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace trireme {

/// Whether every byte belongs to a code point in its shortest form, surrogates left out.
bool is_utf8(std::string_view text);

/// At most `most_bytes` of `text` for a message, "…" where something is left out; bytes that are no UTF-8, and control
/// characters, become "?".
std::string excerpt(std::string_view text, size_t most_bytes = 200);

}  // namespace trireme
