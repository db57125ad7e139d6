# libtorch from an installed `torch` wheel, as own imported targets.
#
# find_package(Torch) insists on a CUDA toolkit when the wheel is a CUDA build. Trireme needs only the headers and the CPU
# libraries to build, so the targets are made here from the files of the package itself.
#
# Input     TRIREME_PYTHON (a Python that has torch), or an earlier TRIREME_TORCH_DIR.
# Defines   target torch::core; TRIREME_TORCH_DIR, TRIREME_TORCH_VERSION.

if(NOT TRIREME_TORCH_DIR)
  if(NOT TRIREME_PYTHON)
    find_program(TRIREME_PYTHON NAMES python3 REQUIRED)
  endif()
  execute_process(
    COMMAND ${TRIREME_PYTHON} -c "import importlib.util as u, os; print(os.path.dirname(u.find_spec('torch').origin), end='')"
    OUTPUT_VARIABLE TRIREME_TORCH_DIR ERROR_VARIABLE _error RESULT_VARIABLE _failed)
  if(_failed)
    message(FATAL_ERROR "${TRIREME_PYTHON} has no torch. Install it (pip install torch==2.11.0), or point "
                        "-DTRIREME_PYTHON=/path/to/python at a Python that has it.\n${_error}")
  endif()
endif()
set(TRIREME_TORCH_DIR "${TRIREME_TORCH_DIR}" CACHE PATH "folder of the installed torch package")

file(READ "${TRIREME_TORCH_DIR}/version.py" _version)
string(REGEX MATCH "__version__ = '([0-9]+\\.[0-9]+\\.[0-9]+)" _ "${_version}")
set(TRIREME_TORCH_VERSION "${CMAKE_MATCH_1}")

if(NOT TARGET torch::core)
  add_library(torch::core INTERFACE IMPORTED GLOBAL)
  target_include_directories(torch::core SYSTEM INTERFACE
    "${TRIREME_TORCH_DIR}/include" "${TRIREME_TORCH_DIR}/include/torch/csrc/api/include")
  target_compile_definitions(torch::core INTERFACE FMT_HEADER_ONLY=1)
  # The CUDA wheel's libtorch.so names CUDA libraries that lie in sibling wheels and are found at run time through its own
  # RPATH; the linker need not see them.
  target_link_libraries(torch::core INTERFACE
    "${TRIREME_TORCH_DIR}/lib/libtorch.so" "${TRIREME_TORCH_DIR}/lib/libtorch_cpu.so" "${TRIREME_TORCH_DIR}/lib/libc10.so")
  target_link_options(torch::core INTERFACE
    "LINKER:-rpath,${TRIREME_TORCH_DIR}/lib" "LINKER:-rpath-link,${TRIREME_TORCH_DIR}/lib" "LINKER:--allow-shlib-undefined")
endif()
