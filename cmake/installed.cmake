# millrace_find_installed(WHY PACKAGE DEBIAN [PACKAGE DEBIAN ...]): libraries that a build does without where they are
# not installed for the machine that the program is built for. PACKAGE is what find_package takes, with a version if it
# needs one ("Boost 1.81"); DEBIAN is what to install. WHY is left empty when all were found, else it says what is not
# there. A macro: what find_package sets is for the caller.
macro(millrace_find_installed why)
  set(${why} "")
  set(_wanted ${ARGN})
  if(CMAKE_CROSSCOMPILING OR MILLRACE_DEPS_DIR)
    list(GET _wanted 1 _debian)
    set(${why} "${_debian} is there for the machine that builds only")
    set(_wanted "")
  endif()
  while(_wanted)
    list(POP_FRONT _wanted _package _debian)
    separate_arguments(_package)
    list(GET _package 0 _name)
    find_package(${_package} QUIET)
    if(NOT ${_name}_FOUND AND NOT ${why})
      set(${why} "${_debian} is not installed")
    endif()
  endwhile()
endmacro()
