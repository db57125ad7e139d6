// In place of CUDA's header of this name, which needs a CUDA toolkit: all that nccl.h wants of it.
#pragma once

typedef struct CUstream_st* cudaStream_t;
