#include "trireme/base/parallel.h"

#include <ATen/Parallel.h>

namespace trireme {

void parallel_for(int64_t begin, int64_t end, int64_t grain, c10::function_ref<void(int64_t from, int64_t to)> body) {
  at::parallel_for(begin, end, grain, body);
}

}  // namespace trireme
