# SPDX-License-Identifier: BSD-3-Clause
#
# Every option of the build. Pass them to cmake as -DNAME=value, to pip in CMAKE_ARGS or as
# --config-settings=cmake.define.NAME=value.
include_guard(GLOBAL)

# fdm_declare_options()
#   FLASH_DMATTN_CUDA    AUTO: the archs asked for, or the visible GPUs', and no CUDA pack where nothing can be built;
#                        ON: fail where nothing can be built; OFF: the cpu pack only.
#   FLASH_DMATTN_ARCHS   archs to build: names (sm90), numbers (90, 90a, 9.0), "native" (the visible GPUs'), "required"
#                        or "all" (those of cmake/targets.json). Separated by ";", "," or " ". Asking for archs
#                        means ON where FLASH_DMATTN_CUDA is AUTO. While it is empty, CMAKE_CUDA_ARCHITECTURES or
#                        else the environment's CUDAARCHS is used, cut down to what is supported.
#   FLASH_DMATTN_HEAD_DIMS  head dimensions to instantiate CUDA kernels for, of those in cmake/targets.json; others are
#                        served by the next larger one. All unless given; one or two make a fast loop.
#   FLASH_DMATTN_TILES   for tests: the one arch whose tiles and choice of kernels all CUDA packs use in place of their
#                        own, such as 86: with FLASH_DMATTN_ARCHS=90 the suite tests on an sm_90 GPU what sm_86 runs.
#   FLASH_DMATTN_DELAYS  for tests: kernels that may overlap the one ahead of them sleep at odd times. Equal inputs must give
#                        the bits that they give without; "scripts/test_delays" compares.
#   FLASH_DMATTN_CUDART  static: nothing of CUDA has to be installed at run time; shared: for distributions that
#                        ship libcudart as a package of its own.
#   FLASH_DMATTN_CORE    OFF builds the packs only, without Python.
#   FLASH_DMATTN_CPU     OFF builds no cpu pack.
#   FLASH_DMATTN_PREBUILT_PACKS  folders with packs that were built before and the manifest.json that describes them,
#                        separated by ";"; relative ones are in the source folder. Installed unchanged.
#   FLASH_DMATTN_COMMIT  the commit of the sources, for the manifest; the build itself never asks git.
#   CMAKE_BUILD_TYPE     Release unless given.
macro(fdm_declare_options)
  set(FLASH_DMATTN_CUDA "AUTO" CACHE STRING "Build CUDA packs: AUTO, ON or OFF")
  set(FLASH_DMATTN_ARCHS "" CACHE STRING "GPU archs to build, such as 80;90")
  set(FLASH_DMATTN_HEAD_DIMS "" CACHE STRING "Head dimensions of the CUDA kernels, such as 64;128; all if empty")
  set(FLASH_DMATTN_TILES "" CACHE STRING "For tests: the arch whose tiles the CUDA packs use; their own if empty")
  option(FLASH_DMATTN_DELAYS "For tests: kernels of a chain sleep at odd times" OFF)
  set(FLASH_DMATTN_CUDART "static" CACHE STRING "How CUDA packs link the CUDA runtime: static or shared")
  option(FLASH_DMATTN_CORE "Build the Python module" ON)
  option(FLASH_DMATTN_CPU "Build the cpu pack" ON)
  set(FLASH_DMATTN_PREBUILT_PACKS "" CACHE STRING "Folders of packs that were built before")
  set(FLASH_DMATTN_COMMIT "" CACHE STRING "Commit of the sources, 40 hexadecimal digits, then -dirty if changed")
  fdm_check_choice(FLASH_DMATTN_CUDA AUTO ON OFF)
  fdm_check_choice(FLASH_DMATTN_CUDART static shared)
  if(NOT FLASH_DMATTN_COMMIT MATCHES "^([0-9a-f]+(-dirty)?)?$")
    message(FATAL_ERROR "FLASH_DMATTN_COMMIT is \"${FLASH_DMATTN_COMMIT}\", which is no commit")
  endif()
  if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
    set(CMAKE_BUILD_TYPE Release CACHE STRING "Build type" FORCE)
  endif()
endmacro()

# fdm_check_choice(<option> <value>...)
#   Fails unless the option has one of the values, and shows them in cmake's interactive front ends.
function(fdm_check_choice option)
  set_property(CACHE ${option} PROPERTY STRINGS ${ARGN})
  if(NOT "${${option}}" IN_LIST ARGN)
    list(JOIN ARGN ", " allowed)
    message(FATAL_ERROR "${option} is \"${${option}}\"; allowed: ${allowed}")
  endif()
endfunction()

# fdm_require_supported_platform()
#   The packs rely on ELF version scripts and on a 64-bit little-endian machine.
function(fdm_require_supported_platform)
  if(NOT CMAKE_SYSTEM_NAME STREQUAL "Linux" OR NOT CMAKE_SIZEOF_VOID_P EQUAL 8)
    message(FATAL_ERROR "flash-dmattn builds on 64-bit Linux; this is ${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}")
  endif()
endfunction()
