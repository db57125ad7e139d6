# One noun, four places: include/trireme/NOUN.h (and NOUN/), src/NOUN/, tests/NOUN/, docs/NOUN.md.
#
# trireme_module(NOUN [DEPENDS module ...] [LIBRARIES target ...] [TEST_LIBRARIES target ...])
#   makes the static library trireme_NOUN from src/NOUN/*.cpp (and subfolders, but not a main.cpp), linked to just the
#   modules of lower levels that it names, and one test executable NOUN_test from tests/NOUN/*_test.cpp.
# trireme_test(NOUN LIBRARIES ...)     the test executables of a folder that is not a module.
# trireme_benchmark(FILE)              one executable from benchmarks/FILE.cpp.
# trireme_shared_library()             libtrireme.so of all modules above.

include(GoogleTest)

# What a file reaches through its #include lines and those of this project's headers: 2 for torch::nn or torch::optim, 1 for
# the dispatcher, autograd or all operators, 0 for less.
function(_trireme_reach file result)
  get_property(reach GLOBAL PROPERTY "TRIREME_REACH_${file}")
  if("${reach}" STREQUAL "")
    set(reach 0)
    set_property(GLOBAL PROPERTY "TRIREME_REACH_${file}" 0)
    file(STRINGS "${file}" includes REGEX "^ *# *include")
    get_filename_component(folder "${file}" DIRECTORY)
    foreach(include IN LISTS includes)
      set(inner 0)
      if(include MATCHES "<torch/(nn|optim|torch\\.h|all\\.h|serialize)")
        set(inner 2)
      elseif(include MATCHES "<(torch/|ATen/ATen\\.h|ATen/Functions\\.h|ATen/core/(dispatch|boxing|stack))")
        set(inner 1)
      elseif(include MATCHES "[<\"]([a-z_0-9/.]+)[>\"]")
        foreach(root IN ITEMS "${PROJECT_SOURCE_DIR}/include" "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}" "${folder}")
          if(inner EQUAL 0 AND EXISTS "${root}/${CMAKE_MATCH_1}")
            _trireme_reach("${root}/${CMAKE_MATCH_1}" inner)
          endif()
        endforeach()
      endif()
      if(inner GREATER reach)
        set(reach ${inner})
      endif()
    endforeach()
    set_property(GLOBAL PROPERTY "TRIREME_REACH_${file}" ${reach})
  endif()
  set(${result} ${reach} PARENT_SCOPE)
endfunction()

# Compiles the files of `target` eight at a time, with a precompiled header where one of them gains by it: most of their time
# goes into the templates of headers that they share. See docs/decisions/003-precompiled-headers.md and
# 005-files-compiled-together.md.
function(_trireme_share_headers target)
  get_target_property(files ${target} SOURCES)
  set(furthest 0)
  foreach(file IN LISTS files)
    get_filename_component(path "${file}" ABSOLUTE)
    _trireme_reach("${path}" reach)
    if(reach GREATER furthest)
      set(furthest ${reach})
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ${TRIREME_UNITY} UNITY_BUILD_BATCH_SIZE 8)
  if(TRIREME_PCH AND furthest EQUAL 2)
    target_precompile_headers(${target} REUSE_FROM trireme_pch_nn)
  elseif(TRIREME_PCH AND furthest EQUAL 1)
    target_precompile_headers(${target} REUSE_FROM trireme_pch_core)
  endif()
endfunction()

function(trireme_module noun)
  cmake_parse_arguments(ARG "" "" "DEPENDS;LIBRARIES;TEST_LIBRARIES" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${noun}/*.cpp")
  list(FILTER sources EXCLUDE REGEX "/main\\.cpp$")
  if(NOT sources)
    return()
  endif()
  add_library(trireme_${noun} STATIC ${sources})
  add_library(Trireme::${noun} ALIAS trireme_${noun})
  target_link_libraries(trireme_${noun} PUBLIC trireme_options torch::core ${ARG_LIBRARIES})
  foreach(dependency IN LISTS ARG_DEPENDS)
    if(TARGET trireme_${dependency})
      target_link_libraries(trireme_${noun} PUBLIC trireme_${dependency})
    endif()
  endforeach()
  _trireme_share_headers(trireme_${noun})
  set_property(GLOBAL APPEND PROPERTY TRIREME_MODULES trireme_${noun})
  set_property(GLOBAL APPEND PROPERTY TRIREME_LIBRARIES ${ARG_LIBRARIES})
  if(TRIREME_TESTS)
    trireme_test(${noun} LIBRARIES trireme_${noun} ${ARG_TEST_LIBRARIES})
  endif()
endfunction()

# tests/NOUN/*_test.cpp -> NOUN_test, registered test by test. A file named *_slow_test.cpp goes into NOUN_slow_test, with
# the label `slow`.
function(trireme_test noun)
  cmake_parse_arguments(ARG "" "" "LIBRARIES" ${ARGN})
  file(GLOB_RECURSE files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/${noun}/*_test.cpp")
  set(slow ${files})
  list(FILTER slow INCLUDE REGEX "_slow_test\\.cpp$")
  list(FILTER files EXCLUDE REGEX "_slow_test\\.cpp$")
  _trireme_test_target(${noun}_test fast 300 "${files}" "${ARG_LIBRARIES}")
  _trireme_test_target(${noun}_slow_test slow 1200 "${slow}" "${ARG_LIBRARIES}")
endfunction()

function(_trireme_test_target target label timeout_s files libraries)
  if(NOT files)
    return()
  endif()
  add_executable(${target} ${files})
  target_link_libraries(${target} PRIVATE ${libraries} trireme_test_support GTest::gtest)
  # A test spends its time in the libraries; compiling it without the costly optimisations is a fifth faster.
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  _trireme_share_headers(${target})
  # One thread per process: ranks are threads or processes, and tests run side by side.
  gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS ${label} TIMEOUT ${timeout_s}
    ENVIRONMENT "OMP_NUM_THREADS=1;TRIREME_PROGRAM=${PROJECT_BINARY_DIR}/bin/trireme")
endfunction()

# Links all modules; Google Benchmark only for a file that includes it.
function(trireme_benchmark name)
  set(source "${PROJECT_SOURCE_DIR}/benchmarks/${name}.cpp")
  get_property(modules GLOBAL PROPERTY TRIREME_MODULES)
  file(STRINGS "${source}" google REGEX "#include <benchmark/benchmark.h>")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${source}")
  if(google AND NOT benchmark_FOUND)
    message(STATUS "${name} is left out: Google Benchmark is missing (apt-get install libbenchmark-dev)")
    return()
  endif()
  add_executable(${name} "${source}")
  target_link_libraries(${name} PRIVATE ${modules} $<$<BOOL:${google}>:benchmark::benchmark>)
  if(TARGET trireme_test_support)
    target_link_libraries(${name} PRIVATE trireme_test_support)
  endif()
  target_include_directories(${name} PRIVATE "${PROJECT_SOURCE_DIR}")
  _trireme_share_headers(${name})
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/benchmarks")
endfunction()

# Made of the modules' object files, not of their archives: a linker drops an archive's member that nobody refers to, and
# with it the operators that the member registers.
function(trireme_shared_library)
  get_property(modules GLOBAL PROPERTY TRIREME_MODULES)
  get_property(libraries GLOBAL PROPERTY TRIREME_LIBRARIES)
  list(REMOVE_DUPLICATES libraries)
  list(TRANSFORM modules REPLACE ".+" "$<TARGET_OBJECTS:\\0>" OUTPUT_VARIABLE objects)
  add_library(trireme SHARED ${objects})
  add_library(Trireme::trireme ALIAS trireme)
  target_compile_features(trireme INTERFACE cxx_std_20)
  target_include_directories(trireme INTERFACE "$<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include>"
                             "$<INSTALL_INTERFACE:include>")
  target_link_libraries(trireme PUBLIC torch::core nlohmann_json::nlohmann_json Threads::Threads
                        PRIVATE $<BUILD_INTERFACE:trireme_options> ${libraries})
  set_target_properties(trireme PROPERTIES LINKER_LANGUAGE CXX LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/lib")
  if(NOT TRIREME_WHEEL)  # which cannot hold links: three names would be three copies
    set_target_properties(trireme PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR})
  endif()
endfunction()
