#include "comm/backends/nccl/nccl_api.h"

#include <dlfcn.h>

#include <string>

#include "trireme/base/error.h"
#include "trireme/device/nvidia_library.h"

namespace trireme::comm {
namespace {

constexpr const char* kLibrary = "libnccl.so.2";
// The first that takes a configuration and whose communicators are made without blocking, with all fixes to it.
constexpr int kOldest = nccl_version(2, 18, 3);

void* open_library() {
  std::string problem;
  if (void* library = open_nvidia_library(kLibrary, "nccl", problem)) return library;
  throw ConfigError(
      str("NCCL cannot be loaded (", problem,
          "). Install it (pip install nvidia-nccl-cu13, or the CUDA build of torch, which brings it), or add "
          "its folder to LD_LIBRARY_PATH"));
}

/// Stays null where the library is too old to have it.
template <class Function>
void fill_if_there(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
}

template <class Function>
void fill(void* library, const char* name, Function& function) {
  fill_if_there(library, name, function);
  if (function == nullptr)
    throw ConfigError(str(kLibrary, " has no ", name,
                          ": it is too old, or no NCCL; install nvidia-nccl-cu13 of a "
                          "version from 2.18.3 on"));
}

NcclApi load() {
  void* library = open_library();
  NcclApi api{};
  fill(library, "ncclGetVersion", api.get_version);
  int version = 0;
  if (api.get_version(&version) != ncclSuccess || version < kOldest)
    throw ConfigError(str(kLibrary, " is of version ", version, ", and ", kOldest,
                          " (2.18.3) is the oldest that serves; install a newer nvidia-nccl-cu13"));
  fill(library, "ncclGetUniqueId", api.get_unique_id);
  fill(library, "ncclGetErrorString", api.get_error_string);
  fill(library, "ncclGetLastError", api.get_last_error);
  fill(library, "ncclCommInitRankConfig", api.comm_init_rank_config);
  fill(library, "ncclCommGetAsyncError", api.comm_get_async_error);
  fill(library, "ncclCommFinalize", api.comm_finalize);
  fill(library, "ncclCommDestroy", api.comm_destroy);
  fill(library, "ncclCommAbort", api.comm_abort);
  fill(library, "ncclAllReduce", api.all_reduce);
  fill(library, "ncclReduceScatter", api.reduce_scatter);
  fill(library, "ncclAllGather", api.all_gather);
  fill(library, "ncclBroadcast", api.broadcast);
  fill(library, "ncclReduce", api.reduce);
  fill(library, "ncclSend", api.send);
  fill(library, "ncclRecv", api.recv);
  fill(library, "ncclGroupStart", api.group_start);
  fill(library, "ncclGroupEnd", api.group_end);
  fill_if_there(library, "ncclMemAlloc", api.mem_alloc);
  fill_if_there(library, "ncclMemFree", api.mem_free);
  fill_if_there(library, "ncclCommRegister", api.comm_register);
  return api;
}

}  // namespace

const NcclApi& load_nccl() {
  static const NcclApi api = load();
  return api;
}

}  // namespace trireme::comm
