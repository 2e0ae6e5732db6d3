# SPDX-License-Identifier: BSD-3-Clause
#
# Reads facts from the files that declare them. Usable in script mode.
include_guard(GLOBAL)

set(FDM_ROOT "${CMAKE_CURRENT_LIST_DIR}/..")
cmake_path(NORMAL_PATH FDM_ROOT)
if(NOT CMAKE_SCRIPT_MODE_FILE)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS
    "${FDM_ROOT}/pyproject.toml" "${FDM_ROOT}/cpp/pack.h")
endif()

# fdm_read_version(<full> <numbers>)
#   Sets <full> to the version in pyproject.toml, such as 2.0.0a1, and <numbers> to its leading numbers, 2.0.0, since
#   project(VERSION) accepts no more. It is not taken from scikit-build-core, so that a plain `cmake -S .` gives the
#   same binaries.
function(fdm_read_version full numbers)
  file(STRINGS "${FDM_ROOT}/pyproject.toml" line REGEX "^version = \"[^\"]+\"$")
  if(NOT line MATCHES "^version = \"(([0-9]+(\\.[0-9]+)*)[^\"]*)\"$")
    message(FATAL_ERROR "pyproject.toml must have exactly one line of the form: version = \"1.2.3\"")
  endif()
  set(${full} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  set(${numbers} "${CMAKE_MATCH_2}" PARENT_SCOPE)
endfunction()

# fdm_read_pack_interface(<abi_version> <symbol>)
#   Sets <abi_version> and <symbol> to the values of FDM_PACK_ABI_VERSION and FDM_PACK_SYMBOL in cpp/pack.h.
function(fdm_read_pack_interface abi_version symbol)
  file(READ "${FDM_ROOT}/cpp/pack.h" header)
  if(NOT header MATCHES "#define FDM_PACK_ABI_VERSION ([0-9]+)")
    message(FATAL_ERROR "cpp/pack.h does not define FDM_PACK_ABI_VERSION")
  endif()
  set(${abi_version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
  if(NOT header MATCHES "#define FDM_PACK_SYMBOL \"([a-z_]+)\"")
    message(FATAL_ERROR "cpp/pack.h does not define FDM_PACK_SYMBOL")
  endif()
  set(${symbol} "${CMAKE_MATCH_1}" PARENT_SCOPE)
endfunction()

# fdm_table_archs(<archs>)
#   Sets <archs> to the names of the supported archs (sm80 ...), in ascending order.
function(fdm_table_archs archs)
  file(READ "${FDM_ROOT}/cmake/targets.json" table)
  string(JSON count LENGTH "${table}" archs)
  math(EXPR last "${count} - 1")
  set(names "")
  foreach(index RANGE ${last})
    string(JSON name MEMBER "${table}" archs ${index})
    list(APPEND names ${name})
  endforeach()
  list(SORT names COMPARE NATURAL)
  set(${archs} ${names} PARENT_SCOPE)
endfunction()

# fdm_table_get(<value> <key>...)
#   Sets <value> to the string, number or truth value at that path of the table; "" if the path does not exist.
function(fdm_table_get value)
  file(READ "${FDM_ROOT}/cmake/targets.json" table)
  string(JSON found ERROR_VARIABLE missing GET "${table}" ${ARGN})
  if(missing)
    set(found "")
  endif()
  set(${value} "${found}" PARENT_SCOPE)
endfunction()

# fdm_preferred_arch(<arch> <capability>)
#   Sets <arch> to the best arch for a GPU of that compute capability ("9.0"); "" if no arch supports it.
function(fdm_preferred_arch arch capability)
  fdm_table_get(best preference ${capability} 0)
  set(${arch} "${best}" PARENT_SCOPE)
endfunction()
