# Flags, dependencies and the one function every folder uses.
find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
endif()

find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)

add_library(millrace_flags INTERFACE)
# -ffp-contract=off: a multiply and an add are fused only where the source says fma, so that every
# compiler and instruction set rounds alike (docs/architecture.md, "Same bits").
target_compile_options(millrace_flags INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
                       -Wno-sign-conversion -Werror -ffp-contract=off)
target_include_directories(millrace_flags INTERFACE ${CMAKE_SOURCE_DIR}/src ${CMAKE_SOURCE_DIR}/include)
target_link_libraries(millrace_flags INTERFACE Threads::Threads fmt::fmt nlohmann_json::nlohmann_json)
if(MILLRACE_SANITIZE)
  target_compile_options(millrace_flags INTERFACE -fsanitize=${MILLRACE_SANITIZE} -fno-omit-frame-pointer
                         -fno-sanitize-recover=all)
  target_link_options(millrace_flags INTERFACE -fsanitize=${MILLRACE_SANITIZE})
endif()
if(MILLRACE_FUZZ)
  target_compile_options(millrace_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

if(MILLRACE_TESTS)
  enable_testing()
  find_package(GTest REQUIRED)
  include(GoogleTest)
  add_custom_target(all_tests)
endif()

# millrace_library(NAME DEPENDS...): every *.cpp of the current folder becomes the static library
# millrace_NAME; every *_test.cpp becomes one test program NAME_test.
function(millrace_library name)
  file(GLOB sources CONFIGURE_DEPENDS *.cpp)
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  set(deps ${ARGN})
  list(TRANSFORM deps PREPEND millrace_)
  if(sources)
    add_library(millrace_${name} STATIC ${sources})
    target_link_libraries(millrace_${name} PUBLIC millrace_flags ${deps})
  else()
    add_library(millrace_${name} INTERFACE)
    target_link_libraries(millrace_${name} INTERFACE millrace_flags ${deps})
  endif()
  if(MILLRACE_TESTS AND tests)
    millrace_test(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE millrace_${name})
  endif()
endfunction()

# millrace_test(NAME SOURCES...): a GoogleTest program known to ctest, run from the source root.
function(millrace_test name)
  add_executable(${name} ${ARGN})
  target_link_libraries(${name} PRIVATE millrace_flags GTest::gtest GTest::gtest_main)
  gtest_discover_tests(${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} DISCOVERY_MODE PRE_TEST
                       PROPERTIES TIMEOUT 600)
  add_dependencies(all_tests ${name})
endfunction()
