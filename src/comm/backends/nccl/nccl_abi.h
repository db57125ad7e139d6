// The types and constants of NCCL that Trireme passes to it, declared here: nccl.h includes headers of a CUDA toolkit
// that torch's wheels do not bring, and Trireme builds without one.
//
// NCCL keeps its binary interface within a major version. tests/comm/nvidia_headers_test.cpp compares every declaration
// with the real nccl.h where one is installed. Source    NCCL 2.18 to 2.28, nccl.h.
#pragma once

#include <climits>
#include <cstddef>

struct CUstream_st;

namespace trireme::comm {

using cudaStream_t = ::CUstream_st*;
struct ncclComm;  // of NCCL alone
using ncclComm_t = ncclComm*;

struct ncclUniqueId {
  char internal[128];
};

enum ncclResult_t : unsigned {
  ncclSuccess = 0,
  ncclUnhandledCudaError = 1,
  ncclInvalidUsage = 5,
  ncclRemoteError = 6,
  ncclInProgress = 7,
};

enum ncclRedOp_t : unsigned { ncclSum = 0, ncclMax = 2, ncclMin = 3, ncclAvg = 4 };

enum ncclDataType_t : unsigned {
  ncclInt8 = 0,
  ncclUint8 = 1,
  ncclInt32 = 2,
  ncclInt64 = 4,
  ncclFloat16 = 6,
  ncclFloat32 = 7,
  ncclFloat64 = 8,
  ncclBfloat16 = 9,
};

/// As NCCL writes versions from 2.9 on: 2.18.3 is 21803.
constexpr int nccl_version(int major, int minor, int patch) { return major * 10000 + minor * 100 + patch; }

/// The configuration of a communicator as NCCL 2.18 has it. Later versions have further members behind these: NCCL
/// reads `size` bytes and takes its defaults for the rest.
struct ncclConfig_t {
  size_t size = sizeof(ncclConfig_t);
  unsigned magic = 0xcafebeef;
  unsigned version = nccl_version(2, 18, 3);
  // INT_MIN and null: NCCL's default.
  int blocking = INT_MIN;
  int cga_cluster_size = INT_MIN;
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

}  // namespace trireme::comm
