# The Python package: trireme._core for the Python whose torch is built against, beside the package's sources.
#
# Build tree   build/*/python/trireme, so that PYTHONPATH=build/*/python runs it; its sources are links to python/trireme.
# Installed    by `pip install .` alone (pyproject.toml), into the package's folder.

# Type checkers do not ask the finder of trireme/deepspeed/aliases.py: they read a stub of each module that it finds in `trireme`.
function(trireme_python_stubs package)
  set(folder "${PROJECT_SOURCE_DIR}/python/trireme/deepspeed")
  file(STRINGS "${folder}/aliases.py" here REGEX "^_HERE = ")
  string(REGEX REPLACE ".*\"(.+)\".*" "\\1" here "${here}")
  string(REPLACE " " "|" here "${here}")
  file(GLOB_RECURSE modules CONFIGURE_DEPENDS RELATIVE "${folder}" "${folder}/*.py")
  foreach(module IN LISTS modules)
    if(module MATCHES "^(${here})[/.]")
      string(REGEX REPLACE "(/__init__)?[.]py$" "" name "${module}")
      string(REPLACE "/" "." name "${name}")
      file(CONFIGURE OUTPUT "${package}/${module}i" CONTENT "from trireme.deepspeed.${name} import *\n")
      if(TRIREME_WHEEL)
        get_filename_component(destination "${module}i" DIRECTORY)
        if(NOT destination)
          set(destination .)
        endif()
        install(FILES "${package}/${module}i" DESTINATION "${destination}")
      endif()
    endif()
  endforeach()
endfunction()

function(trireme_python_module)
  if(NOT TRIREME_PYTHON)
    message(STATUS "The Python package is left out: libtorch was not found through a Python")
    return()
  endif()
  execute_process(
    COMMAND "${TRIREME_PYTHON}" -c
            "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep=';', end='')"
    OUTPUT_VARIABLE paths RESULT_VARIABLE failed)
  list(GET paths 0 headers)
  list(GET paths 1 suffix)
  if(failed OR NOT EXISTS "${headers}/Python.h")
    if(TRIREME_WHEEL)
      message(FATAL_ERROR "${headers}/Python.h is missing; install the headers of this Python (apt-get install python3-dev)")
    endif()
    message(STATUS "The Python package is left out: ${headers}/Python.h is missing (apt-get install python3-dev)")
    return()
  endif()
  file(GLOB sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/python/*.cpp")
  add_library(trireme_python MODULE ${sources})
  target_link_libraries(trireme_python PRIVATE trireme trireme_options "${TRIREME_TORCH_DIR}/lib/libtorch_python.so")
  target_include_directories(trireme_python SYSTEM PRIVATE "${headers}")
  target_compile_definitions(trireme_python PRIVATE TORCH_EXTENSION_NAME=_core)
  target_compile_options(trireme_python PRIVATE $<$<CONFIG:Release>:-O2>)  # a third faster to compile than -O3
  set(package "${PROJECT_BINARY_DIR}/python/trireme")
  set_target_properties(trireme_python PROPERTIES
    PREFIX "" OUTPUT_NAME _core SUFFIX "${suffix}" CXX_VISIBILITY_PRESET hidden LIBRARY_OUTPUT_DIRECTORY "${package}"
    UNITY_BUILD ${TRIREME_UNITY} UNITY_BUILD_BATCH_SIZE 5 INSTALL_RPATH "$ORIGIN/lib;$ORIGIN/../torch/lib")

  file(GLOB parts CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/python/trireme/*")
  file(MAKE_DIRECTORY "${package}")
  file(GLOB links LIST_DIRECTORIES true "${package}/*")
  foreach(link IN LISTS links)
    if(IS_SYMLINK "${link}" AND NOT EXISTS "${link}")  # to a source that has moved
      file(REMOVE "${link}")
    endif()
  endforeach()
  foreach(part IN LISTS parts)
    get_filename_component(name "${part}" NAME)
    if(NOT name STREQUAL "__pycache__")
      file(CREATE_LINK "${part}" "${package}/${name}" SYMBOLIC)
    endif()
  endforeach()
  trireme_python_stubs("${package}")
  # What the extension was built for, which an import checks before it loads the extension.
  file(CONFIGURE OUTPUT "${package}/_build.py" CONTENT
       "\"\"\"What the extension was built against.\"\"\"\nVERSION = \"${PROJECT_VERSION}\"\nTORCH_VERSION = \"${TRIREME_TORCH_VERSION}\"\n")
  # `trireme launch` of the build tree runs scripts under it.
  file(CONFIGURE OUTPUT "${PROJECT_BINARY_DIR}/share/trireme/python" CONTENT "${TRIREME_PYTHON}\n")
  if(TRIREME_WHEEL)
    install(TARGETS trireme_python LIBRARY DESTINATION .)
    install(FILES "${package}/_build.py" DESTINATION .)
  endif()
endfunction()
