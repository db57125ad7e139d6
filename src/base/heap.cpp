#include "trireme/base/heap.h"

#include <cstdlib>  // says whether the C library is glibc

#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace trireme {

void give_back_freed_memory() noexcept {
#ifdef __GLIBC__
  (void)malloc_trim(0);
#endif
}

}  // namespace trireme
