#include "trireme/pager/storage/written_values.h"

#include <algorithm>

#include "trireme/base/error.h"
#include "trireme/comm/agreement.h"
#include "trireme/comm/call_scopes.h"

namespace trireme {

bool require_same(Group& group, const std::vector<int64_t>& digests,
                  const std::function<std::string(size_t)>& name_of) {
  const SubjectScope subject("values that were written in place");
  if (const auto difference = first_difference(group, digests))
    throw StateError(str(CallerScope::current("use of a parameter"), ": the program has written into parameter '",
                         name_of(difference->index),
                         "' in place, and another rank has other values there, of which each would keep its own part; "
                         "write the same on every rank: seed generators alike, or broadcast the values first"));
  return std::any_of(digests.begin(), digests.end(), [](int64_t digest) { return digest != 0; });
}

}  // namespace trireme
