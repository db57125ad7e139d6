// In place of CUDA's header of this name: nccl.h includes it and uses nothing of it.
#pragma once
