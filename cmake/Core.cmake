# SPDX-License-Identifier: BSD-3-Clause
include_guard(GLOBAL)
include(Platform)

# fdm_add_core(SOURCES <file>...)
#   Builds the Python module `_core`. With FLASH_DMATTN_NANOBIND=shared the module holds only this project's code and
#   uses Python's stable ABI, so one file serves every Python from the minimum version in pyproject.toml on. The
#   distribution nanobind-backend has nanobind's own half. Both halves share objects of libstdc++; unlike in the packs,
#   libstdc++ is therefore linked dynamically. With "linked" the module holds both halves, links libstdc++ statically,
#   and is for the Python that builds it. The module exports only its initialisation. nanobind gives its exceptions
#   default visibility, but Python loads modules with local symbols, and the C++ libraries compare types by name.
function(fdm_add_core)
  cmake_parse_arguments(PARSE_ARGV 0 CORE "" "" "SOURCES")
  set(components Interpreter Development.Module ${SKBUILD_SABI_COMPONENT})
  if(WIN32) # modules are linked with python3.dll there
    list(APPEND components Development.SABIModule)
  endif()
  find_package(Python 3.10 REQUIRED COMPONENTS ${components})
  if(FLASH_DMATTN_NANOBIND STREQUAL "shared")
    set(oldest_nanobind 3.1)
    set(backend NB_DOMAIN fdm BACKEND_MODULE nanobind_backend)
  else()
    set(oldest_nanobind 2.13)
    # Modules of one domain share their types. A copy for another package needs its own domain: `release hub` replaces
    # these digits.
    set(backend NB_DOMAIN fdm_000000000000)
  endif()
  fdm_find_nanobind(${oldest_nanobind})
  # NOMINSIZE: every call of the library passes through this module, which is small anyway.
  nanobind_add_module(_core
    FREE_THREADED
    ${backend}
    NOMINSIZE
    PROTECT_STACK
    NB_SUPPRESS_WARNINGS
    ${CORE_SOURCES})
  target_compile_features(_core PRIVATE cxx_std_17)
  target_include_directories(_core PRIVATE "${PROJECT_SOURCE_DIR}/cpp")
  target_compile_definitions(_core PRIVATE FDM_VERSION="${FDM_VERSION}")
  target_compile_options(_core PRIVATE -Wall -Wextra "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=")
  fdm_harden_objects(_core)
  target_link_libraries(_core PRIVATE ${CMAKE_DL_LIBS})
  fdm_export_only(_core PyInit__core)
  if(FLASH_DMATTN_NANOBIND STREQUAL "linked" AND NOT APPLE AND NOT MSVC)
    # Both halves are in this file. As in the packs, no library has to be found at load time.
    target_link_options(_core PRIVATE -static-libstdc++ -static-libgcc)
  endif()
  install(TARGETS _core LIBRARY DESTINATION flash_dmattn)
endfunction()

# fdm_find_nanobind(<oldest version>)
#   Finds the nanobind of the Python that was found. scikit-build-core adds its folder to the search path; a plain
#   `cmake -S .` asks the Python module.
macro(fdm_find_nanobind oldest)
  if(NOT SKBUILD AND NOT nanobind_DIR AND NOT nanobind_ROOT)
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -m nanobind --cmake_dir
      OUTPUT_VARIABLE nanobind_ROOT OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  endif()
  # Without a version: nanobind's own check rejects every other major, even a newer one.
  find_package(nanobind CONFIG REQUIRED)
  if(nanobind_VERSION VERSION_LESS "${oldest}")
    message(FATAL_ERROR "FLASH_DMATTN_NANOBIND=${FLASH_DMATTN_NANOBIND} needs nanobind ${oldest} or newer; "
      "${nanobind_DIR} has ${nanobind_VERSION}")
  endif()
endmacro()
