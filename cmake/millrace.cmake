# Flags, dependencies and the one function every folder uses.
find_program(CCACHE ccache)
if(CCACHE)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CCACHE})
  set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()

find_package(Threads REQUIRED)
if(CMAKE_CROSSCOMPILING OR MILLRACE_DEPS_DIR)
  include(cross_dependencies)
else()
  find_package(fmt REQUIRED)
  find_package(nlohmann_json REQUIRED)
endif()

# Here and not in kernels/cuda/: every program that links the backend needs the language and the runtime.
if(MILLRACE_CUDA)
  # Ampere, Ada, Hopper, Blackwell; what comes between and after them translates the code for 8.0, 9.0 or 12.0.
  set(CMAKE_CUDA_ARCHITECTURES "80;89-real;90a-real;90-virtual;100a-real;120a-real;120-virtual" CACHE STRING
      "GPU architectures to compile for, e.g. 90a for an H200 alone")
  enable_language(CUDA)
  # CMake 3.25 does not know how to ask nvcc for C++20.
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit REQUIRED)
endif()

add_library(millrace_flags INTERFACE)
# -ffp-contract=off: a multiply and an add are fused only where the source says fma, so that every
# compiler and instruction set rounds alike (docs/architecture.md, "Same bits").
# nvcc has words of its own for all of these: kernels/cuda/CMakeLists.txt.
# A warning ends no release build: every compiler's optimizer warns of other things that are not there.
set(cxx_flags -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion $<$<NOT:$<CONFIG:Release>>:-Werror>
    -ffp-contract=off)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # Designated initializers leave defaults on purpose; the other cries wolf inside std::copy.
  list(APPEND cxx_flags -Wno-missing-field-initializers -Wno-error=array-bounds)
endif()
target_compile_options(millrace_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${cxx_flags}>")
# g++ 12 at -O3 calls assigning a literal to a std::string an overlapping copy (its bug 105651).
target_compile_options(millrace_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-restrict>)
target_include_directories(millrace_flags INTERFACE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/src
                           ${CMAKE_SOURCE_DIR}/include)
target_link_libraries(millrace_flags INTERFACE Threads::Threads fmt::fmt nlohmann_json::nlohmann_json)
if(MILLRACE_SANITIZE)
  set(sanitize_flags -fsanitize=${MILLRACE_SANITIZE} -fno-omit-frame-pointer -fno-sanitize-recover=all)
  if(MILLRACE_SANITIZE MATCHES address AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    list(APPEND sanitize_flags -fsanitize-ignorelist=${CMAKE_SOURCE_DIR}/cmake/system_headers.ignore)
  endif()
  target_compile_options(millrace_flags INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${sanitize_flags}>")
  target_link_options(millrace_flags INTERFACE -fsanitize=${MILLRACE_SANITIZE})
  if(MILLRACE_SANITIZE MATCHES thread)
    # Asio's fences, which the thread sanitizer does not follow; its locks order the same things.
    target_compile_definitions(millrace_flags INTERFACE BOOST_ASIO_DISABLE_FENCED_BLOCK)
    target_compile_options(millrace_flags INTERFACE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-tsan>)
  endif()
endif()
if(MILLRACE_FUZZ)
  target_compile_options(millrace_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()

if(MILLRACE_TESTS)
  enable_testing()
  if(NOT TARGET GTest::gtest)
    find_package(GTest REQUIRED)
  endif()
  include(GoogleTest)
  add_custom_target(all_tests)
endif()

# Under the address sanitizer clang compiles these in half the time without optimization (104 -> 56 s), and their tests
# run as long; those of the grammar and the tokenizer would lose more than that.
if(MILLRACE_SANITIZE MATCHES address AND NOT MILLRACE_FUZZ)
  set(compiled_longer_than_run io model engine chat)
endif()

# millrace_library(NAME DEPENDS... [FOLDERS FOLDER...]): every *.cpp of the current folder, and of the folders below it
# that are named, becomes the static library millrace_NAME; every *_test.cpp becomes one test program NAME_test.
function(millrace_library name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "" "" "FOLDERS")
  set(patterns *.cpp)
  foreach(folder IN LISTS arg_FOLDERS)
    list(APPEND patterns ${folder}/*.cpp)
  endforeach()
  file(GLOB sources CONFIGURE_DEPENDS ${patterns})
  set(tests ${sources})
  list(FILTER tests INCLUDE REGEX "_test\\.cpp$")
  list(FILTER sources EXCLUDE REGEX "_test\\.cpp$")
  set(deps ${arg_UNPARSED_ARGUMENTS})
  list(TRANSFORM deps PREPEND millrace_)
  if(sources)
    add_library(millrace_${name} STATIC ${sources})
    target_link_libraries(millrace_${name} PUBLIC millrace_flags ${deps})
    if(name IN_LIST compiled_longer_than_run)
      target_compile_options(millrace_${name} PRIVATE -O0)
    endif()
  else()
    add_library(millrace_${name} INTERFACE)
    target_link_libraries(millrace_${name} INTERFACE millrace_flags ${deps})
  endif()
  if(MILLRACE_TESTS AND tests)
    millrace_test(${name}_test ${tests})
    target_link_libraries(${name}_test PRIVATE millrace_${name})
  endif()
endfunction()

# millrace_test(NAME [IN_BULK] SOURCES...): a GoogleTest program known to ctest, run from the source root. IN_BULK: the
# whole program is for `make check`, which builds it too (BULK_TARGETS in tools/run_tests.py). Each test is a process of
# its own, except where starting or ending one is slow: under qemu, and under the address sanitizer, whose search for
# leaks takes seconds on ARM. There the program is one test; GTEST_FILTER chooses inside it. The longest program under
# qemu is two of them, each with half of its tests, for want of another program beside it.
set(tests_that_compute backend_test kernels_api_test kernels_quant_test kernels_cpu_quant_test)
# Whole vocabularies as JSON, by templates that are compiled with the test: four times as long at -O0. Sanitizers do
# without them (*Golden* in tools/run_tests.py).
if(NOT MILLRACE_SANITIZE)
  list(APPEND tests_that_compute tokenizer_test)
endif()
# What takes most of a minute to see again, at random or in bulk, what a quicker test sees too: `make check` runs these,
# `make test` does not.
set(tests_in_bulk
    Load.* Trace.* SameBits.RandomSchedules* Models/SameBitsOfHybrids.* SameBitsDecode.However*
    SameBitsDecode.Whatever* SameBitsDecode.AmongManyOthers
    SmolLm2.ReferenceGivesTheSame64GreedyTokens LatentAttention.ALongContextIsSplit
    Ranks.EveryModelOverAnyNumber Ranks.AThousandSchedulesOverThreeRanks)
list(JOIN tests_in_bulk ":" tests_in_bulk)
function(millrace_test name)
  cmake_parse_arguments(PARSE_ARGV 1 arg "IN_BULK" "" "")
  add_executable(${name} ${arg_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE millrace_flags GTest::gtest GTest::gtest_main)
  # -O0 takes half of the time to compile. What computes bounds in double, element by element, would pay for it when
  # it runs, twenty times over under qemu.
  if(NOT name IN_LIST tests_that_compute)
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-O0>)
  endif()
  if(MILLRACE_SANITIZE OR CMAKE_CROSSCOMPILING)
    set(shards 1)
    if(CMAKE_CROSSCOMPILING AND name STREQUAL backend_test)
      set(shards 2)
    endif()
    foreach(shard RANGE 1 ${shards})
      math(EXPR index "${shard} - 1")
      string(REPLACE _1 "" test ${name}_${shard})
      add_test(NAME ${test} COMMAND ${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
      set_tests_properties(${test} PROPERTIES TIMEOUT 1200
                           ENVIRONMENT "GTEST_TOTAL_SHARDS=${shards};GTEST_SHARD_INDEX=${index}")
    endforeach()
  elseif(arg_IN_BULK)
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
    add_test(NAME ${name} COMMAND ${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR})
    set_tests_properties(${name} PROPERTIES TIMEOUT 900 PROCESSORS 3 LABELS check)
  else()
    # Of 3 N + 2 places on N cores (tools/run_tests.py) a test takes three, and one that mostly waits takes one.
    gtest_discover_tests(${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} DISCOVERY_MODE PRE_TEST
                         DISCOVERY_TIMEOUT 60 TEST_FILTER "-${tests_in_bulk}" PROPERTIES TIMEOUT 600 PROCESSORS 3)
    gtest_discover_tests(${name} WORKING_DIRECTORY ${CMAKE_SOURCE_DIR} DISCOVERY_MODE PRE_TEST TEST_LIST ${name}_IN_BULK
                         DISCOVERY_TIMEOUT 60 TEST_FILTER "${tests_in_bulk}" PROPERTIES TIMEOUT 600 PROCESSORS 3
                         LABELS check)
  endif()
  add_dependencies(all_tests ${name})
endfunction()
