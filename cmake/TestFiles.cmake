# Read by ctest, not by CMake: registers each file of a GoogleTest program as one test, named FOLDER.FILE. A process per suite
# would spend a minute of a processor in loading libtorch. Suites of a FILE_test.cpp whose names begin with `Slow` are a test of their
# own, FOLDER.FILE_slow_test, with the label `slow`.
#
# The file that includes this sets: program, name (the folder), label, timeout_s, environment, includer (itself).
cmake_policy(VERSION 3.25)
string(REGEX REPLACE "\\.cmake$" "_registered.cmake" registered "${includer}")
if(NOT EXISTS "${program}")
  get_filename_component(target "${program}" NAME)
  add_test("${target}_NOT_BUILT" "${target}_NOT_BUILT")
  return()
endif()

if("${program}" IS_NEWER_THAN "${registered}" OR "${includer}" IS_NEWER_THAN "${registered}"
   OR "${CMAKE_CURRENT_LIST_FILE}" IS_NEWER_THAN "${registered}")
  set(listing "${registered}.json")
  execute_process(COMMAND "${program}" --gtest_list_tests "--gtest_output=json:${listing}" OUTPUT_VARIABLE said RESULT_VARIABLE status
                  TIMEOUT 60)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${program} --gtest_list_tests: ${status}\n${said}")
  endif()
  # The name of a suite stands before the number of its tests, the file of a test after its name.
  file(STRINGS "${listing}" lines REGEX "^ *\"(name|tests|file)\": ")
  set(files "")
  set(suites "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^ *\"([a-z]+)\": \"?([^\"]*)\"?,?$" "\\1;\\2" pair "${line}")
    list(GET pair 0 key)
    list(GET pair 1 value)
    string(REPLACE "\\/" "/" value "${value}")
    if(key STREQUAL "name")
      set(last "${value}")
    elseif(key STREQUAL "tests")
      set(suite "${last}")
    elseif(NOT suite MATCHES "(^|/)DISABLED_" AND NOT suite IN_LIST suites)
      list(APPEND suites "${suite}")  # whole, with the file of its first test
      get_filename_component(file "${value}" NAME_WE)
      if(suite MATCHES "^Slow")
        string(REGEX REPLACE "_test$" "_slow_test" file "${file}")
      endif()
      list(APPEND files "${file}")
      list(APPEND suites_of_${file} "${suite}.*")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES files)
  set(entries "")
  foreach(file IN LISTS files)
    list(JOIN suites_of_${file} ":" filter)
    set(entry_label ${label})
    set(entry_timeout_s ${timeout_s})
    if(label STREQUAL "fast" AND file MATCHES "_slow_test$")
      set(entry_label slow)
      set(entry_timeout_s 1800)
    endif()
    string(APPEND entries "add_test([[${name}.${file}]] [[${program}]] [[--gtest_filter=${filter}]])\n"
                          "set_tests_properties([[${name}.${file}]] PROPERTIES LABELS ${entry_label} TIMEOUT ${entry_timeout_s} "
                          "ENVIRONMENT [[${environment}]] FAIL_REGULAR_EXPRESSION [[from 0 test suites ran]])\n")
  endforeach()
  file(WRITE "${registered}" "${entries}")
endif()
include("${registered}")
