# `cmake --install`: headers, libtrireme.so, the program, and a CMake package for find_package(Trireme).
include(CMakePackageConfigHelpers)

set(_package "${CMAKE_INSTALL_LIBDIR}/cmake/Trireme")
# From the folders of libraries and programs; a wheel's files lie in site-packages/trireme, beside those of torch.
set(_torch_lib "${TRIREME_TORCH_DIR}/lib")
set(TRIREME_INSTALLED_TORCH_DIR "${TRIREME_TORCH_DIR}")
if(TRIREME_WHEEL)
  set(_torch_lib "$ORIGIN/../../torch/lib")
  set(TRIREME_INSTALLED_TORCH_DIR "\${PACKAGE_PREFIX_DIR}/../torch")
endif()
set_target_properties(trireme PROPERTIES INSTALL_RPATH "$ORIGIN;${_torch_lib}")
install(TARGETS trireme EXPORT TriremeTargets LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
install(EXPORT TriremeTargets NAMESPACE Trireme:: DESTINATION "${_package}")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/trireme" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" FILES_MATCHING PATTERN "*.h")
if(TARGET trireme_program)
  set_target_properties(trireme_program PROPERTIES
    INSTALL_RPATH "$ORIGIN/../${CMAKE_INSTALL_LIBDIR};${_torch_lib}")
  install(TARGETS trireme_program RUNTIME DESTINATION "${CMAKE_INSTALL_BINDIR}")
endif()
# The manual, which errors name: `trireme docs` finds it from the program's folder, in the build tree by a link.
install(DIRECTORY "${PROJECT_SOURCE_DIR}/docs/" DESTINATION share/doc/trireme FILES_MATCHING PATTERN "*.md")
file(MAKE_DIRECTORY "${PROJECT_BINARY_DIR}/share/doc")
file(CREATE_LINK "${PROJECT_SOURCE_DIR}/docs" "${PROJECT_BINARY_DIR}/share/doc/trireme" SYMBOLIC)
string(REGEX MATCH "^[0-9]+" TRIREME_COMPILER_MAJOR "${CMAKE_CXX_COMPILER_VERSION}")
configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/TriremeConfig.cmake.in" "${PROJECT_BINARY_DIR}/TriremeConfig.cmake"
                              INSTALL_DESTINATION "${_package}" NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/TriremeConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/TriremeConfig.cmake" "${PROJECT_BINARY_DIR}/TriremeConfigVersion.cmake"
        "${PROJECT_SOURCE_DIR}/cmake/TriremeTorch.cmake" DESTINATION "${_package}")
