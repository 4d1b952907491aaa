# What `cmake --install` puts into a prefix: the program, the engine and the kernel library (shared and static), headers,
# find_package(millrace), pkg-config, a man page, shell completions.
#
#   millrace::millrace         the engine's C++ API (include/millrace), everything inside one shared library
#   millrace::kernels          the kernel library's C API (include/millrace/kernels)
#   millrace::millrace_static, millrace::kernels_static   the same as archives; the engine's needs the kernels'
#
# The shared libraries export the API alone (cmake/*.map), so that what they are made of can change.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(kernel_parts base tensor kernels_quant kernels_cpu_quant kernels_cpu kernels_reference kernels_cuda kernels_api)
set(engine_parts dist quant io jinja tokenizer kv sched sample backend backend_cpu backend_cuda backend_mixed backend_reference image model engine)

# objects_of(VARIABLE PART...): the objects of those parts that are compiled.
function(objects_of variable)
  set(objects "")
  foreach(part ${ARGN})
    if(TARGET millrace_${part})
      get_target_property(type millrace_${part} TYPE)
      if(type STREQUAL "STATIC_LIBRARY")
        list(APPEND objects $<TARGET_OBJECTS:millrace_${part}>)
      endif()
    endif()
  endforeach()
  set(${variable} ${objects} PARENT_SCOPE)
endfunction()

# What the objects call: fmt, threads, zstd, libpng and libjpeg, the CUDA runtime. In the archives' consumers by name, in the shared ones inside.
set(system_libraries fmt::fmt Threads::Threads)
if(ZSTD_LIBRARY)
  list(APPEND system_libraries zstd)
endif()
if(MILLRACE_IMAGES)
  list(APPEND system_libraries png jpeg)
  set(pc_images " -lpng -ljpeg")
endif()
if(MILLRACE_CUDA)
  set(cuda_libraries CUDA::cudart_static)
endif()

# installed_library(TARGET KIND OUTPUT_NAME EXPORT_NAME OBJECTS...)
function(installed_library target kind output_name export_name)
  add_library(${target} ${kind} ${ARGN})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${output_name} EXPORT_NAME ${export_name} LINKER_LANGUAGE CXX)
  target_include_directories(${target} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
  if(kind STREQUAL "SHARED")
    # Before 1.0 a minor version may change the interface, so it is part of the name.
    set_target_properties(${target} PROPERTIES VERSION ${PROJECT_VERSION}
                          SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
    set(map ${CMAKE_SOURCE_DIR}/cmake/${output_name}.map)
    target_link_options(${target} PRIVATE LINKER:--version-script=${map} LINKER:--no-undefined)
    set_target_properties(${target} PROPERTIES LINK_DEPENDS ${map})
    target_link_libraries(${target} PRIVATE ${system_libraries} ${cuda_libraries})
  else()
    target_link_libraries(${target} INTERFACE ${system_libraries} ${cuda_libraries})
  endif()
  install(TARGETS ${target} EXPORT millrace LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
          ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

objects_of(kernel_objects ${kernel_parts})
objects_of(engine_objects ${engine_parts})
installed_library(millrace_kernels_shared SHARED millrace_kernels kernels ${kernel_objects})
installed_library(millrace_kernels_static STATIC millrace_kernels kernels_static ${kernel_objects})
installed_library(millrace_shared SHARED millrace millrace ${kernel_objects} ${engine_objects})
installed_library(millrace_static STATIC millrace millrace_static ${engine_objects})
target_link_libraries(millrace_static INTERFACE millrace_kernels_static)
target_compile_features(millrace_shared INTERFACE cxx_std_20)
target_compile_features(millrace_static INTERFACE cxx_std_20)

install(TARGETS millrace RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/include/millrace DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE ${CMAKE_SOURCE_DIR}/CHANGELOG.md DESTINATION ${CMAKE_INSTALL_DOCDIR})

# find_package(millrace)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/millrace)
install(EXPORT millrace NAMESPACE millrace:: FILE millraceTargets.cmake DESTINATION ${package_dir})
configure_package_config_file(${CMAKE_SOURCE_DIR}/cmake/millraceConfig.cmake.in ${CMAKE_BINARY_DIR}/millraceConfig.cmake
                              INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_BINARY_DIR}/millraceConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/millraceConfig.cmake ${CMAKE_BINARY_DIR}/millraceConfigVersion.cmake
        DESTINATION ${package_dir})

# pkg-config: the prefix is found from where the file lies, so that a tree may be moved.
if(ZSTD_LIBRARY)
  set(pc_libs_private "-lfmt -lzstd${pc_images} -lpthread -lstdc++ -lm")
else()
  set(pc_libs_private "-lfmt -lpthread -lstdc++ -lm")
endif()
file(RELATIVE_PATH pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
foreach(name millrace millrace_kernels)
  configure_file(${CMAKE_SOURCE_DIR}/cmake/${name}.pc.in ${CMAKE_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${CMAKE_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

# The man page and the completions are made from what the program itself says (--help).
find_package(Python3 COMPONENTS Interpreter)
if(Python3_FOUND)
  set(shell_files millrace.1 millrace.bash _millrace millrace.fish)
  list(TRANSFORM shell_files PREPEND ${CMAKE_BINARY_DIR}/shell/)
  add_custom_command(OUTPUT ${shell_files}
    COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/make_shell_files.py $<TARGET_FILE:millrace>
            ${CMAKE_BINARY_DIR}/shell
    DEPENDS millrace ${CMAKE_SOURCE_DIR}/tools/make_shell_files.py VERBATIM)
  add_custom_target(shell_files ALL DEPENDS ${shell_files})
  install(FILES ${CMAKE_BINARY_DIR}/shell/millrace.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES ${CMAKE_BINARY_DIR}/shell/millrace.bash RENAME millrace
          DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
  install(FILES ${CMAKE_BINARY_DIR}/shell/_millrace DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)
  install(FILES ${CMAKE_BINARY_DIR}/shell/millrace.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
endif()

# `make package`: one .deb, whose dependencies are read from the binaries.
set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME millrace)
set(CPACK_PACKAGE_CONTACT "The Millrace authors <millrace@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "LLM engine: one program, an OpenAI server, a C++ and a C library")
set(CPACK_PACKAGE_DIRECTORY ${CMAKE_SOURCE_DIR}/build/package)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS ca-certificates)  # for millrace pull
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "libfmt-dev, libzstd-dev, libpng-dev, libjpeg62-turbo-dev, pkg-config")
include(CPack)
