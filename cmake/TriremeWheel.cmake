# What a build of a Python wheel by scikit-build-core needs that others do not. See docs/decisions/008-wheel.md.

# The same folders everywhere: a wheel's files find each other by them.
set(CMAKE_INSTALL_BINDIR bin)
set(CMAKE_INSTALL_INCLUDEDIR include)
set(CMAKE_INSTALL_LIBDIR lib)

if(NOT TRIREME_PYTHON)
  set(TRIREME_PYTHON "${Python_EXECUTABLE}")  # of scikit-build-core
endif()

# Nobody passes -j here, and Ninja's own choice would take 2 GB for each of more compilers than there are cores.
cmake_host_system_information(RESULT _jobs QUERY NUMBER_OF_LOGICAL_CORES)
cmake_host_system_information(RESULT _available_mib QUERY AVAILABLE_PHYSICAL_MEMORY)
math(EXPR _jobs_in_memory "${_available_mib} / 2048")
if(_jobs_in_memory LESS _jobs)
  set(_jobs ${_jobs_in_memory})
endif()
if(_jobs LESS 1)
  set(_jobs 1)
endif()
set_property(GLOBAL PROPERTY JOB_POOLS trireme=${_jobs})
set(CMAKE_JOB_POOL_COMPILE trireme)
set(CMAKE_JOB_POOL_LINK trireme)
set(CMAKE_JOB_POOL_PRECOMPILE_HEADER trireme)
