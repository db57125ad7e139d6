// "Did you mean …?": the name that was probably meant.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace trireme {

/// The candidate that is nearest to `name` by edit distance (insert, delete, replace, swap of neighbours), ignoring
/// case; the first of several. Where none is near (more than a third of the longer name would have to change), one that
/// lacks the last words of `name`, or has more of them: `batch` for `batch-size`. Empty without that too.
std::string closest_name(std::string_view name, const std::vector<std::string>& candidates);

/// " Did you mean `candidate`?", or nothing when no candidate is near. To be put after a full stop.
std::string did_you_mean(std::string_view name, const std::vector<std::string>& candidates);

}  // namespace trireme
