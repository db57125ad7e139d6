// Bytes of a model's making, as a terminal can show them.
#pragma once

#include <string>

namespace trireme::cli {

/// `text` with every byte that is neither printable, a newline nor a tab, nor part of valid UTF-8, replaced by U+FFFD.
std::string printable(const std::string& text);

}  // namespace trireme::cli
