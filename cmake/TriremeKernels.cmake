# trireme_kernel_text(FILE NAME) makes a header beside FILE's place in the build folder, FILE's stem and _text.h, with NAME as
# FILE's text: kernels are compiled where they run (trireme/device/kernel.h), from headers that the host compiles too.
function(trireme_kernel_text file name)
  set(TRIREME_TEXT_FILE "${file}")
  set(TRIREME_TEXT_NAME "${name}")
  file(READ "${PROJECT_SOURCE_DIR}/src/${file}" TRIREME_TEXT)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${file}")
  string(REGEX REPLACE "\\.h$" "_text.h" header "${file}")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/kernel_text.h.in" "${PROJECT_BINARY_DIR}/generated/${header}" @ONLY)
endfunction()
