// Words in a row, as a text.
#pragma once

#include <string>
#include <string_view>

namespace trireme {

/// "a, b, c" of a range of strings, or with another text `between` them; "" of none.
template <class Words>
std::string joined(const Words& words, std::string_view between = ", ") {
  std::string text;
  bool is_first = true;
  for (const auto& word : words) {
    if (!is_first) text += between;
    text += word;
    is_first = false;
  }
  return text;
}

}  // namespace trireme
