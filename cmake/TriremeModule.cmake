# One noun, four places: include/trireme/NOUN.h (and NOUN/), src/NOUN/, tests/NOUN/, docs/NOUN.md.
#
# trireme_module(NOUN [DEPENDS module ...] [LIBRARIES target ...] [HEAVY])
#   makes the static library trireme_NOUN from src/NOUN/*.cpp (and subfolders), linked to just the modules of lower levels
#   that it names, and one test executable NOUN_test from tests/NOUN/*_test.cpp.
#   HEAVY: includes torch/nn or torch/optim, so it gets the larger precompiled header.

include(GoogleTest)

function(_trireme_precompile target heavy)
  if(NOT TRIREME_PCH)
    return()
  endif()
  if(heavy)
    target_precompile_headers(${target} REUSE_FROM trireme_pch_nn)
  else()
    target_precompile_headers(${target} REUSE_FROM trireme_pch_core)
  endif()
endfunction()

function(trireme_module noun)
  cmake_parse_arguments(ARG "HEAVY" "" "DEPENDS;LIBRARIES;TEST_LIBRARIES" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${noun}/*.cpp")
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
  _trireme_precompile(trireme_${noun} "${ARG_HEAVY}")
  set_property(GLOBAL APPEND PROPERTY TRIREME_MODULES trireme_${noun})
  if(TRIREME_TESTS)
    trireme_test(${noun} LIBRARIES trireme_${noun} ${ARG_TEST_LIBRARIES})
  endif()
endfunction()

# trireme_test(NOUN LIBRARIES ...): tests/NOUN/*_test.cpp -> NOUN_test, registered test by test.
# A file named *_slow_test.cpp goes into NOUN_slow_test, with the label `slow`.
function(trireme_test noun)
  cmake_parse_arguments(ARG "" "" "LIBRARIES" ${ARGN})
  file(GLOB_RECURSE files CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/tests/${noun}/*_test.cpp")
  set(slow ${files})
  list(FILTER slow INCLUDE REGEX "_slow_test\\.cpp$")
  list(FILTER files EXCLUDE REGEX "_slow_test\\.cpp$")
  _trireme_test_target(${noun}_test fast "${files}" "${ARG_LIBRARIES}")
  _trireme_test_target(${noun}_slow_test slow "${slow}" "${ARG_LIBRARIES}")
endfunction()

function(_trireme_test_target target label files libraries)
  if(NOT files)
    return()
  endif()
  add_executable(${target} ${files})
  target_link_libraries(${target} PRIVATE ${libraries} trireme_test_support GTest::gtest)
  _trireme_precompile(${target} TRUE)
  gtest_discover_tests(${target} DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS ${label} TIMEOUT 300)
endfunction()
