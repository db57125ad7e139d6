#include "trireme/base/suggest.h"

#include <algorithm>
#include <cctype>

namespace trireme {
namespace {

std::string lower(std::string_view text) {
  std::string result(text);
  for (char& c : result) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return result;
}

// Damerau-Levenshtein distance in its restricted form: no substring is edited twice.
size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> before_last(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) last[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replace = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replace});
      const bool swapped = i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1];
      if (swapped) row[j] = std::min(row[j], before_last[j - 2] + 1);
    }
    std::swap(before_last, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

/// Whether `longer` is `shorter` and then other words.
bool continues(std::string_view longer, std::string_view shorter) {
  return longer.size() > shorter.size() && longer.starts_with(shorter) &&
         (longer[shorter.size()] == '-' || longer[shorter.size()] == '_');
}

}  // namespace

std::string closest_name(std::string_view name, const std::vector<std::string>& candidates) {
  const std::string wanted = lower(name);
  std::string best;
  size_t best_distance = 0;
  for (const std::string& candidate : candidates) {
    const size_t longer = std::max(wanted.size(), candidate.size());
    if ((longer - std::min(wanted.size(), candidate.size())) * 3 > longer) continue;  // as many edits at least
    const size_t distance = edit_distance(wanted, lower(candidate));
    const bool near = distance * 3 <= std::max(wanted.size(), candidate.size());
    if (!near || (!best.empty() && distance >= best_distance)) continue;
    best = candidate;
    best_distance = distance;
  }
  if (!best.empty()) return best;
  const auto related = std::find_if(candidates.begin(), candidates.end(), [&](const std::string& candidate) {
    return continues(wanted, lower(candidate)) || continues(lower(candidate), wanted);
  });
  return related == candidates.end() ? "" : *related;
}

std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates) {
  const std::string candidate = closest_name(name, candidates);
  return candidate.empty() ? "" : " Did you mean `" + candidate + "`?";
}

}  // namespace trireme
