// A loop over several threads of the host.
#pragma once

#include <c10/util/FunctionRef.h>

#include <cstdint>

namespace trireme {

/// Calls `body(from, to)` for ranges that make up [begin, end), each of them `grain` elements or more (the last one may
/// be shorter), at once on at::get_num_threads() threads: those of libtorch's own operators. Returns when all are
/// through.
/// Throws what a `body` has thrown.
///
/// at::parallel_for() is a template, and runs one range after the other wherever it is compiled without OpenMP. Here it
/// is compiled with it.
void parallel_for(int64_t begin, int64_t end, int64_t grain, c10::function_ref<void(int64_t from, int64_t to)> body);

}  // namespace trireme
