# Read by ctest, not by CMake: registers each suite of a GoogleTest program as one test, named PROGRAM.SUITE. A process per
# test would spend more than a quarter of all the time in loading libtorch.
#
# The file that includes this sets: program, name, label, timeout_s, environment, includer (itself).
string(REGEX REPLACE "\\.cmake$" "_registered.cmake" registered "${includer}")
if(NOT EXISTS "${program}")
  add_test("${name}_NOT_BUILT" "${name}_NOT_BUILT")
  return()
endif()

if("${program}" IS_NEWER_THAN "${registered}" OR "${includer}" IS_NEWER_THAN "${registered}"
   OR "${CMAKE_CURRENT_LIST_FILE}" IS_NEWER_THAN "${registered}")
  execute_process(COMMAND "${program}" --gtest_list_tests OUTPUT_VARIABLE listing RESULT_VARIABLE status TIMEOUT 60)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${program} --gtest_list_tests: ${status}\n${listing}")
  endif()
  # A suite stands at the beginning of a line and ends with a dot; tests are indented. Its type stands behind '#'.
  string(REGEX MATCHALL "(^|\n)[A-Za-z][^ \n]*\\." suites "${listing}")
  set(lines "")
  foreach(suite IN LISTS suites)
    string(STRIP "${suite}" suite)
    if(NOT suite MATCHES "(^|/)DISABLED_")
      string(REGEX REPLACE "\\.$" "" suite "${suite}")
      string(APPEND lines "add_test([[${name}.${suite}]] [[${program}]] [[--gtest_filter=${suite}.*]])\n"
                          "set_tests_properties([[${name}.${suite}]] PROPERTIES LABELS ${label} TIMEOUT ${timeout_s} "
                          "ENVIRONMENT [[${environment}]] FAIL_REGULAR_EXPRESSION [[from 0 test suites ran]])\n")
    endif()
  endforeach()
  file(WRITE "${registered}" "${lines}")
endif()
include("${registered}")
