# SPDX-License-Identifier: BSD-3-Clause
#
# Every option of the build. Pass them to cmake as -DNAME=value, to pip in CMAKE_ARGS or as
# --config-settings=cmake.define.NAME=value.
include_guard(GLOBAL)

# fdm_declare_options()
#   FLASH_DMATTN_CUDA    AUTO: builds the requested archs, or those of the visible GPUs, and no CUDA pack if none can be
#                        built; ON: fails if none can be built; OFF: builds the cpu pack only.
#   FLASH_DMATTN_ARCHS   archs to build: names (sm90), numbers (90, 90a, 9.0), "native" (the visible GPUs), "required"
#                        or "all" (both defined in cmake/targets.json), separated by ";", "," or " ". Naming archs
#                        turns FLASH_DMATTN_CUDA=AUTO into ON. If empty, CMAKE_CUDA_ARCHITECTURES or else the
#                        environment's CUDAARCHS is used, without the archs that are not supported.
#   FLASH_DMATTN_HEAD_DIMS  head dimensions to instantiate CUDA kernels for, of those in cmake/targets.json; other
#                        dimensions use the next larger one. All by default; one or two make builds fast.
#   FLASH_DMATTN_TILES   for tests: the arch, such as 86, whose tiles and choice of kernels all CUDA packs use instead
#                        of their own. With FLASH_DMATTN_ARCHS=90, the suite then tests sm_86's tiles on an sm_90 GPU.
#   FLASH_DMATTN_DELAYS  for tests: kernels that may overlap the preceding kernel sleep at irregular times. The
#                        results of deterministic=True must not change by a bit, and others must be right;
#                        "scripts/test_delays" checks both.
#   FLASH_DMATTN_EMULATE  for tests: archs, such as sm80;sm90, whose CUDA kernels are compiled for the CPU by an emulator,
#                        below "emulated" in the build folder; needs GCC, and FLASH_DMATTN_CUDA=OFF. None by default.
#   FLASH_DMATTN_SANITIZE  for tests: the cpu pack ends the process at accesses outside of an allocation and at undefined
#                        behaviour (ASan and UBSan); "scripts/sanitize_cpu" runs calls with it.
#   FLASH_DMATTN_CUDART  static: packs contain the CUDA runtime; shared: for distributions in which libcudart is a
#                        separate package.
#   FLASH_DMATTN_CORE    OFF builds the packs only, without Python.
#   FLASH_DMATTN_NANOBIND  linked: `_core` needs no other distribution, and is for the Python that builds it; shared: as in
#                        the wheels of a release, it is for every Python from the oldest supported one on, needs the
#                        distribution nanobind-backend, and nanobind 3.1 to be built. pip takes the value from the
#                        environment's FDM_NANOBIND, which also sets the wheel's tag and its requirement.
#   FLASH_DMATTN_CPU     OFF builds no cpu pack.
#   FLASH_DMATTN_PREBUILT_PACKS  folders with packs that were built before and their manifest.json, separated by ";".
#                        Relative paths start at the source folder. The packs are installed unchanged.
#   FLASH_DMATTN_COMMIT  the commit of the sources, for the manifest; the build itself never calls git.
#   CMAKE_BUILD_TYPE     Release unless given.
macro(fdm_declare_options)
  set(FLASH_DMATTN_CUDA "AUTO" CACHE STRING "Build CUDA packs: AUTO, ON or OFF")
  set(FLASH_DMATTN_ARCHS "" CACHE STRING "GPU archs to build, such as 80;90")
  set(FLASH_DMATTN_HEAD_DIMS "" CACHE STRING "Head dimensions of the CUDA kernels, such as 64;128; all if empty")
  set(FLASH_DMATTN_TILES "" CACHE STRING "For tests: the arch whose tiles the CUDA packs use; their own if empty")
  option(FLASH_DMATTN_DELAYS "For tests: kernels of a chain sleep at odd times" OFF)
  set(FLASH_DMATTN_EMULATE "" CACHE STRING "For tests: archs whose kernels an emulator runs on the CPU")
  option(FLASH_DMATTN_SANITIZE "For tests: the cpu pack checks its own accesses and arithmetic" OFF)
  set(FLASH_DMATTN_CUDART "static" CACHE STRING "How CUDA packs link the CUDA runtime: static or shared")
  option(FLASH_DMATTN_CORE "Build the Python module" ON)
  set(FLASH_DMATTN_NANOBIND "linked" CACHE STRING "Where nanobind's half of the Python module is: linked or shared")
  option(FLASH_DMATTN_CPU "Build the cpu pack" ON)
  set(FLASH_DMATTN_PREBUILT_PACKS "" CACHE STRING "Folders of packs that were built before")
  set(FLASH_DMATTN_COMMIT "" CACHE STRING "Commit of the sources, 40 hexadecimal digits, then -dirty if changed")
  fdm_check_choice(FLASH_DMATTN_CUDA AUTO ON OFF)
  fdm_check_choice(FLASH_DMATTN_CUDART static shared)
  fdm_check_choice(FLASH_DMATTN_NANOBIND linked shared)
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
