# libtorch from an installed `torch` wheel, as own imported targets.
#
# find_package(Torch) insists on a CUDA toolkit when the wheel is a CUDA build. Trireme needs only the headers and the CPU
# libraries to build, so the targets are made here from the files of the package itself.
#
# Input     TRIREME_TORCH_DIR (the package's folder), or TRIREME_PYTHON (a Python that has torch), or Torch_DIR.
# Defines   target torch::core; TRIREME_TORCH_DIR, TRIREME_TORCH_VERSION.

# Ends with a message; where torch is optional (TRIREME_TORCH_IS_OPTIONAL), the message becomes TRIREME_TORCH_MISSING.
unset(TRIREME_TORCH_MISSING)
macro(_trireme_no_torch text)
  if(NOT TRIREME_TORCH_IS_OPTIONAL)
    message(FATAL_ERROR "${text}")
  endif()
  set(TRIREME_TORCH_MISSING "${text}")
  unset(TRIREME_TORCH_DIR CACHE)
  return()
endmacro()

# What was found through a Python holds only as long as that Python is the one that is asked for, and while it is there: pip
# builds beside a torch in a temporary folder.
if(DEFINED TRIREME_TORCH_FOUND_BY AND TRIREME_PYTHON AND (NOT TRIREME_TORCH_FOUND_BY STREQUAL TRIREME_PYTHON
                                                          OR NOT EXISTS "${TRIREME_TORCH_DIR}"))
  unset(TRIREME_TORCH_DIR CACHE)
endif()
if(NOT TRIREME_TORCH_DIR AND NOT TRIREME_PYTHON AND Torch_DIR)
  get_filename_component(TRIREME_TORCH_DIR "${Torch_DIR}/../../.." ABSOLUTE)  # from torch/share/cmake/Torch
endif()
if(NOT TRIREME_TORCH_DIR)
  if(NOT TRIREME_PYTHON)
    find_program(TRIREME_PYTHON NAMES python3)
    if(NOT TRIREME_PYTHON)
      _trireme_no_torch("there is no python3 whose torch could be taken. Point TRIREME_PYTHON at a Python that has torch.")
    endif()
  endif()
  execute_process(
    COMMAND "${TRIREME_PYTHON}" -c "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin), end='')"
    OUTPUT_VARIABLE TRIREME_TORCH_DIR ERROR_VARIABLE _error RESULT_VARIABLE _failed)
  if(_failed)
    _trireme_no_torch("${TRIREME_PYTHON} has no torch. Install it (pip install torch), or point \
-DTRIREME_PYTHON=/path/to/python at a Python that has it.\n${_error}")
  endif()
  set(TRIREME_TORCH_FOUND_BY "${TRIREME_PYTHON}" CACHE INTERNAL "the Python whose torch TRIREME_TORCH_DIR is")
endif()
set(TRIREME_TORCH_DIR "${TRIREME_TORCH_DIR}" CACHE PATH "folder of the installed torch package")

if(EXISTS "${TRIREME_TORCH_DIR}/version.py")
  file(READ "${TRIREME_TORCH_DIR}/version.py" _version)
elseif(EXISTS "${TRIREME_TORCH_DIR}/build-version")  # the zip archive of libtorch
  file(READ "${TRIREME_TORCH_DIR}/build-version" _version)
else()
  _trireme_no_torch("TRIREME_TORCH_DIR=${TRIREME_TORCH_DIR} holds no torch package: neither version.py nor build-version \
is there. Point it at the folder `torch` in site-packages.")
endif()
string(REGEX MATCH "([0-9]+\\.[0-9]+\\.[0-9]+)" _ "${_version}")
set(TRIREME_TORCH_VERSION "${CMAKE_MATCH_1}")

if(NOT TARGET torch::core)
  add_library(torch::core INTERFACE IMPORTED GLOBAL)
  target_include_directories(torch::core SYSTEM INTERFACE
    "${TRIREME_TORCH_DIR}/include" "${TRIREME_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(torch::core INTERFACE FMT_HEADER_ONLY=1)
  # Not libtorch.so: all that it adds is libtorch_cuda.so, a third of the start-up time of a program without a GPU.
  # The CUDA wheel's libraries lie in sibling wheels and are found at run time through its own RPATH; the linker need not
  # see them.
  target_link_libraries(torch::core INTERFACE "${TRIREME_TORCH_DIR}/lib/libtorch_cpu.so" "${TRIREME_TORCH_DIR}/lib/libc10.so")
  target_link_options(torch::core INTERFACE "LINKER:-rpath-link,${TRIREME_TORCH_DIR}/lib" "LINKER:--allow-shlib-undefined")
  if(NOT TRIREME_WHEEL)  # whose files find the torch that is installed beside them
    target_link_options(torch::core INTERFACE "LINKER:-rpath,${TRIREME_TORCH_DIR}/lib")
  endif()
endif()
