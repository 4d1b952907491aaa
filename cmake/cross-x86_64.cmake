# x86-64 on another machine, tests under qemu (AVX2).
set(CMAKE_SYSTEM_PROCESSOR x86_64)
include(${CMAKE_CURRENT_LIST_DIR}/cross.cmake)
