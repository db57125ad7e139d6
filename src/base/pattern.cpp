#include "trireme/base/pattern.h"

namespace trireme {

namespace {
constexpr std::string_view kPlace = "{}";
}

std::string filled(std::string_view pattern, std::initializer_list<std::string_view> values) {
  std::string text;
  for (const std::string_view value : values) {
    const size_t place = pattern.find(kPlace);
    if (place == std::string_view::npos) break;
    text.append(pattern.substr(0, place)).append(value);
    pattern.remove_prefix(place + kPlace.size());
  }
  return text.append(pattern);
}

bool has_filled(std::string_view text, std::string_view pattern) {
  // The leftmost place of each piece leaves the most text for those behind it.
  for (;;) {
    const size_t place = pattern.find(kPlace);
    const std::string_view piece = pattern.substr(0, place);
    const size_t found = text.find(piece);
    if (found == std::string_view::npos) return false;
    if (place == std::string_view::npos) return true;
    text.remove_prefix(found + piece.size());
    pattern.remove_prefix(place + kPlace.size());
  }
}

}  // namespace trireme
