// Holds Trireme's own declarations of NCCL and of the CUDA driver against the real headers, which torch's CUDA wheels
// bring along. The build looks for them only here (src/CMakeLists.txt).
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "comm/backends/cuda_ipc/cuda_api.h"
#include "comm/backends/nccl/nccl_api.h"

namespace trireme::comm {
namespace {

/// Whether a value of type A is passed to a function as one of type B is: the calling convention looks at no more.
template <class A, class B>
constexpr bool passes_as() {
  if constexpr (std::is_void_v<A> || std::is_void_v<B>) {
    return std::is_void_v<A> == std::is_void_v<B>;
  } else {
    return sizeof(A) == sizeof(B) && alignof(A) == alignof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
           std::is_class_v<A> == std::is_class_v<B> && std::is_floating_point_v<A> == std::is_floating_point_v<B> &&
           std::is_trivially_copyable_v<A> == std::is_trivially_copyable_v<B>;
  }
}

template <class R, class... As, class S, class... Bs>
constexpr bool is_called_as(R (*)(As...), S (*)(Bs...)) {
  if constexpr (sizeof...(As) != sizeof...(Bs)) {
    return false;
  } else {
    return passes_as<R, S>() && (passes_as<As, Bs>() && ...);
  }
}

static_assert(is_called_as(static_cast<int (*)(void*, unsigned)>(nullptr),
                           static_cast<unsigned (*)(char*, int)>(nullptr)));
static_assert(!is_called_as(static_cast<int (*)(int)>(nullptr), static_cast<int (*)(long)>(nullptr)));
static_assert(!is_called_as(static_cast<int (*)(int)>(nullptr), static_cast<int (*)(float)>(nullptr)));
static_assert(!is_called_as(static_cast<int (*)(int)>(nullptr), static_cast<int (*)(int, int)>(nullptr)));

}  // namespace
}  // namespace trireme::comm

#if __has_include(<nccl.h>)
#include <nccl.h>

namespace trireme::comm {
namespace {

#define IS_CALLED_AS(member, function) static_assert(is_called_as(decltype(NcclApi::member){}, &::function))
IS_CALLED_AS(get_version, ncclGetVersion);
IS_CALLED_AS(get_unique_id, ncclGetUniqueId);
IS_CALLED_AS(get_error_string, ncclGetErrorString);
IS_CALLED_AS(get_last_error, ncclGetLastError);
IS_CALLED_AS(comm_init_rank_config, ncclCommInitRankConfig);
IS_CALLED_AS(comm_get_async_error, ncclCommGetAsyncError);
IS_CALLED_AS(comm_finalize, ncclCommFinalize);
IS_CALLED_AS(comm_destroy, ncclCommDestroy);
IS_CALLED_AS(comm_abort, ncclCommAbort);
IS_CALLED_AS(all_reduce, ncclAllReduce);
IS_CALLED_AS(reduce_scatter, ncclReduceScatter);
IS_CALLED_AS(all_gather, ncclAllGather);
IS_CALLED_AS(broadcast, ncclBroadcast);
IS_CALLED_AS(reduce, ncclReduce);
IS_CALLED_AS(send, ncclSend);
IS_CALLED_AS(recv, ncclRecv);
IS_CALLED_AS(group_start, ncclGroupStart);
IS_CALLED_AS(group_end, ncclGroupEnd);
IS_CALLED_AS(mem_alloc, ncclMemAlloc);
IS_CALLED_AS(mem_free, ncclMemFree);
IS_CALLED_AS(comm_register, ncclCommRegister);
#undef IS_CALLED_AS

#define IS_SAME_VALUE(name) EXPECT_EQ(static_cast<int64_t>(comm::name), static_cast<int64_t>(::name))

TEST(NvidiaHeaders, NcclHasTheConstantsThatAreDeclaredHere) {
  IS_SAME_VALUE(ncclSuccess);
  IS_SAME_VALUE(ncclUnhandledCudaError);
  IS_SAME_VALUE(ncclInvalidUsage);
  IS_SAME_VALUE(ncclRemoteError);
  IS_SAME_VALUE(ncclInProgress);
  IS_SAME_VALUE(ncclSum);
  IS_SAME_VALUE(ncclMax);
  IS_SAME_VALUE(ncclMin);
  IS_SAME_VALUE(ncclAvg);
  IS_SAME_VALUE(ncclInt8);
  IS_SAME_VALUE(ncclUint8);
  IS_SAME_VALUE(ncclInt32);
  IS_SAME_VALUE(ncclInt64);
  IS_SAME_VALUE(ncclFloat16);
  IS_SAME_VALUE(ncclFloat32);
  IS_SAME_VALUE(ncclFloat64);
  IS_SAME_VALUE(ncclBfloat16);
  EXPECT_EQ(sizeof(comm::ncclUniqueId), sizeof(::ncclUniqueId));
  EXPECT_EQ(nccl_version(2, 18, 3), NCCL_VERSION(2, 18, 3));
}

TEST(NvidiaHeaders, NcclsConfigurationBeginsWithTheMembersThatAreDeclaredHere) {
  using Ours = comm::ncclConfig_t;
  using Theirs = ::ncclConfig_t;
  static_assert(std::is_standard_layout_v<Ours> && sizeof(Ours) <= sizeof(Theirs));
  EXPECT_EQ(offsetof(Ours, size), offsetof(Theirs, size));
  EXPECT_EQ(offsetof(Ours, magic), offsetof(Theirs, magic));
  EXPECT_EQ(offsetof(Ours, version), offsetof(Theirs, version));
  EXPECT_EQ(offsetof(Ours, blocking), offsetof(Theirs, blocking));
  EXPECT_EQ(offsetof(Ours, cga_cluster_size), offsetof(Theirs, cgaClusterSize));
  EXPECT_EQ(offsetof(Ours, min_ctas), offsetof(Theirs, minCTAs));
  EXPECT_EQ(offsetof(Ours, max_ctas), offsetof(Theirs, maxCTAs));
  EXPECT_EQ(offsetof(Ours, net_name), offsetof(Theirs, netName));
  EXPECT_EQ(offsetof(Ours, split_share), offsetof(Theirs, splitShare));

  const Theirs theirs = NCCL_CONFIG_INITIALIZER;
  const Ours ours;
  EXPECT_EQ(ours.size, sizeof(Ours));
  EXPECT_EQ(ours.magic, theirs.magic);
  EXPECT_EQ(ours.blocking, theirs.blocking);
  EXPECT_EQ(ours.net_name, theirs.netName);
  EXPECT_LE(ours.version, theirs.version);
}

#undef IS_SAME_VALUE

}  // namespace
}  // namespace trireme::comm
#else
TEST(NvidiaHeaders, NcclHasTheConstantsThatAreDeclaredHere) { GTEST_SKIP() << "nccl.h is not installed"; }
#endif

#if __has_include(<cuda.h>)
#include <cuda.h>

namespace trireme::comm {
namespace {

// The names with a version: cuda.h makes macros of those without one.
#define IS_CALLED_AS(member, function) static_assert(is_called_as(decltype(CudaApi::member){}, &::function))
IS_CALLED_AS(get_error_string, cuGetErrorString);
IS_CALLED_AS(device_get, cuDeviceGet);
IS_CALLED_AS(device_primary_ctx_retain, cuDevicePrimaryCtxRetain);
IS_CALLED_AS(ctx_set_current, cuCtxSetCurrent);
IS_CALLED_AS(mem_alloc, cuMemAlloc_v2);
IS_CALLED_AS(mem_free, cuMemFree_v2);
IS_CALLED_AS(ipc_get_mem_handle, cuIpcGetMemHandle);
IS_CALLED_AS(ipc_open_mem_handle, cuIpcOpenMemHandle_v2);
IS_CALLED_AS(ipc_close_mem_handle, cuIpcCloseMemHandle);
IS_CALLED_AS(mem_host_register, cuMemHostRegister_v2);
IS_CALLED_AS(mem_host_unregister, cuMemHostUnregister);
IS_CALLED_AS(mem_host_get_device_pointer, cuMemHostGetDevicePointer_v2);
IS_CALLED_AS(memcpy_dtod_async, cuMemcpyDtoDAsync_v2);
IS_CALLED_AS(stream_wait_value32, cuStreamWaitValue32_v2);
IS_CALLED_AS(stream_write_value32, cuStreamWriteValue32_v2);
#undef IS_CALLED_AS

#define IS_SAME_VALUE(ours, theirs) EXPECT_EQ(static_cast<int64_t>(comm::ours), static_cast<int64_t>(theirs))

TEST(NvidiaHeaders, TheCudaDriverHasTheConstantsThatAreDeclaredHere) {
  IS_SAME_VALUE(CUDA_SUCCESS, ::CUDA_SUCCESS);
  IS_SAME_VALUE(CUDA_ERROR_INVALID_VALUE, ::CUDA_ERROR_INVALID_VALUE);
  IS_SAME_VALUE(CUDA_ERROR_OUT_OF_MEMORY, ::CUDA_ERROR_OUT_OF_MEMORY);
  IS_SAME_VALUE(CUDA_ERROR_INVALID_CONTEXT, ::CUDA_ERROR_INVALID_CONTEXT);
  IS_SAME_VALUE(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, ::CUDA_ERROR_PEER_ACCESS_UNSUPPORTED);
  IS_SAME_VALUE(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, ::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  IS_SAME_VALUE(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, ::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  IS_SAME_VALUE(CUDA_ERROR_NOT_SUPPORTED, ::CUDA_ERROR_NOT_SUPPORTED);
  IS_SAME_VALUE(kIpcMemLazyEnablePeerAccess, ::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
  IS_SAME_VALUE(kMemHostRegisterPortable, CU_MEMHOSTREGISTER_PORTABLE);
  IS_SAME_VALUE(kMemHostRegisterDeviceMap, CU_MEMHOSTREGISTER_DEVICEMAP);
  IS_SAME_VALUE(kStreamWaitValueGeq, ::CU_STREAM_WAIT_VALUE_GEQ);
  IS_SAME_VALUE(kStreamWriteValueDefault, ::CU_STREAM_WRITE_VALUE_DEFAULT);
  EXPECT_EQ(sizeof(comm::CUipcMemHandle), sizeof(::CUipcMemHandle));
}

#undef IS_SAME_VALUE

}  // namespace
}  // namespace trireme::comm
#else
TEST(NvidiaHeaders, TheCudaDriverHasTheConstantsThatAreDeclaredHere) { GTEST_SKIP() << "cuda.h is not installed"; }
#endif
