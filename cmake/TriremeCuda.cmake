# CUDA's and NCCL's headers, from the wheels that PyPI's torch brings along: no CUDA toolkit is needed, and nothing is linked.
# The libraries themselves are loaded at run time, by src/comm/backends.
#
# Input     TRIREME_TORCH_DIR
# Defines   target cuda::headers: their folders; without any where torch is a CPU build, and the backends of comm that need
#           them are left out.
if(NOT TARGET cuda::headers)
  add_library(cuda::headers INTERFACE IMPORTED GLOBAL)
  get_filename_component(_packages "${TRIREME_TORCH_DIR}/.." ABSOLUTE)
  set(_nccl "${_packages}/nvidia/nccl/include")
  set(_cuda "")
  foreach(_folder IN ITEMS cu13 cuda_runtime)  # CUDA 13, CUDA 12
    if(NOT _cuda AND EXISTS "${_packages}/nvidia/${_folder}/include/cuda.h")
      set(_cuda "${_packages}/nvidia/${_folder}/include")
    endif()
  endforeach()
  if(_cuda)
    target_include_directories(cuda::headers SYSTEM INTERFACE "${_cuda}")
  else()
    message(STATUS "The comm backends cuda_ipc and nccl are left out: no CUDA headers beside ${TRIREME_TORCH_DIR} "
                   "(they come with the CUDA build of torch)")
  endif()
  if(_cuda AND EXISTS "${_nccl}/nccl.h")
    target_include_directories(cuda::headers SYSTEM INTERFACE "${_nccl}")
  elseif(_cuda)
    message(STATUS "The comm backend nccl is left out: ${_nccl} holds no nccl.h (pip install nvidia-nccl-cu13)")
  endif()
endif()
