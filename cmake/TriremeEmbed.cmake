# trireme_embed(FILE NAME) makes a header beside FILE's place in the build folder, FILE's stem and _text.h, with NAME as FILE's
# text. Kernels are compiled where they run (trireme/device/kernel.h), from headers that the host compiles too; scripts and
# tables are files of their own in the tree, and a part of the library where that is installed.
function(trireme_embed file name)
  set(TRIREME_TEXT_FILE "${file}")
  set(TRIREME_TEXT_NAME "${name}")
  file(READ "${PROJECT_SOURCE_DIR}/src/${file}" TRIREME_TEXT)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${PROJECT_SOURCE_DIR}/src/${file}")
  string(REGEX REPLACE "\\.[a-z]+$" "_text.h" header "${file}")
  configure_file("${PROJECT_SOURCE_DIR}/cmake/embedded_text.h.in" "${PROJECT_BINARY_DIR}/generated/${header}" @ONLY)
endfunction()
