# SPDX-License-Identifier: BSD-3-Clause
#
# The packs of NVIDIA GPUs: one library for each arch, so that each can be built, cached and loaded separately.
include_guard(GLOBAL)
include(CheckCompilerFlag)
include(CudaArchs)
include(Kernels)
include(Pack)

# fdm_choose_cuda_archs(<archs> <nvcc> SOURCES <file>...)
#   Sets <archs> to the archs to build and <nvcc> to the compiler, from the options, the environment and the machine.
#   Prints the decision and the reason.
function(fdm_choose_cuda_archs archs nvcc)
  cmake_parse_arguments(PARSE_ARGV 2 CHOOSE "" "" "SOURCES")
  fdm_find_nvcc(compiler version)
  fdm_visible_capabilities(capabilities)
  set(ambient ${CMAKE_CUDA_ARCHITECTURES})
  if(NOT ambient)
    set(ambient $ENV{CUDAARCHS})
  endif()
  if(CHOOSE_SOURCES)
    set(have_sources ON)
  else()
    set(have_sources OFF)
  endif()
  fdm_resolve_cuda_archs(chosen reason
    MODE ${FLASH_DMATTN_CUDA}
    ARCHS ${FLASH_DMATTN_ARCHS}
    AMBIENT ${ambient}
    CAPABILITIES ${capabilities}
    NVCC_VERSION "${version}"
    HAVE_SOURCES ${have_sources})
  if(chosen)
    message(STATUS "CUDA packs: ${chosen} with nvcc ${version} (${reason})")
  else()
    message(STATUS "CUDA packs: none, only the cpu pack is built (${reason})")
  endif()
  set(${archs} ${chosen} PARENT_SCOPE)
  set(${nvcc} "${compiler}" PARENT_SCOPE)
endfunction()

# fdm_find_nvcc(<path> <version>)
#   Sets both to "" if there is no nvcc. It searches the places that CMake searches. It reads the version before the
#   CUDA language is enabled, since enabling fails without a usable nvcc, and AUTO must not fail.
function(fdm_find_nvcc path version)
  set(${path} "" PARENT_SCOPE)
  set(${version} "" PARENT_SCOPE)
  find_program(FDM_NVCC_PROGRAM
    NAMES "${CMAKE_CUDA_COMPILER}" "$ENV{CUDACXX}" nvcc
    HINTS "$ENV{CUDA_HOME}/bin" "$ENV{CUDA_PATH}/bin"
    PATHS /usr/local/cuda/bin
    NO_CACHE)
  if(FDM_NVCC_PROGRAM)
    execute_process(COMMAND "${FDM_NVCC_PROGRAM}" --version OUTPUT_VARIABLE text ERROR_QUIET)
    if(text MATCHES "release ([0-9]+\\.[0-9]+)")
      set(${path} "${FDM_NVCC_PROGRAM}" PARENT_SCOPE)
      set(${version} "${CMAKE_MATCH_1}" PARENT_SCOPE)
    endif()
  endif()
endfunction()

# fdm_visible_capabilities(<capabilities>)
#   Sets <capabilities> to the compute capabilities of this machine's GPUs; empty without a GPU or without a driver.
function(fdm_visible_capabilities capabilities)
  set(found "")
  find_program(nvidia_smi nvidia-smi NO_CACHE)
  if(nvidia_smi)
    execute_process(
      COMMAND "${nvidia_smi}" --query-gpu=compute_cap --format=csv,noheader
      OUTPUT_VARIABLE text ERROR_QUIET)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" found "${text}")
    list(REMOVE_DUPLICATES found)
  endif()
  set(${capabilities} ${found} PARENT_SCOPE)
endfunction()

# fdm_add_kernel_pack(ARCH <arch> [TILES <arch>] SOURCES <file>... INCLUDE <folder of generated headers>)
#   Adds libflash_dmattn_cu<major>_<arch>.so, built from the sources for that arch of cmake/targets.json with
#     FDM_ARCH       the number of the arch, 90
#     FDM_TILE_ARCH  the number of the arch of the tiles and of the choice of kernels: that of TILES, else FDM_ARCH
#     FDM_PACK_NAME  the name of the pack, "cu13-sm90"; with TILES "cu13-sm90-tiles86"
#
#   It holds machine code only, no PTX: PTX of a toolkit newer than the driver fails to load. The machine code is
#   compressed. The stronger mode of CUDA 13 needs a newer driver, which CUDA 13 needs anyway.
function(fdm_add_kernel_pack)
  cmake_parse_arguments(PARSE_ARGV 0 KERNEL "" "ARCH;TILES;INCLUDE" "SOURCES")
  string(REGEX MATCH "^([0-9]+)\\.([0-9]+)" cuda "${CMAKE_CUDA_COMPILER_VERSION}")
  set(major ${CMAKE_MATCH_1})
  fdm_table_get(code archs ${KERNEL_ARCH} code)
  string(REGEX MATCH "[0-9]+" number "${KERNEL_ARCH}")
  set(name "cu${major}-${KERNEL_ARCH}")
  set(tile_number ${number})
  if(KERNEL_TILES)
    string(REGEX MATCH "[0-9]+" tile_number "${KERNEL_TILES}")
    string(APPEND name "-tiles${tile_number}")
  endif()
  set(target "flash_dmattn_cu${major}_${KERNEL_ARCH}")

  add_library(${target} MODULE ${KERNEL_SOURCES})
  fdm_name_cuda_modules(${KERNEL_SOURCES})
  fdm_describe_kernels(head_dims kernels INCLUDE "${KERNEL_INCLUDE}" SOURCES ${KERNEL_SOURCES})
  fdm_setup_pack(${target} FILE ${target} NAME ${name} DEVICE cuda CUDA ${cuda} ARCH ${KERNEL_ARCH}
    HEAD_DIMS ${head_dims} KERNELS ${kernels})
  target_compile_definitions(${target} PRIVATE
    FDM_ARCH=${number}
    FDM_TILE_ARCH=${tile_number}
    FDM_PACK_NAME="${name}"
    $<$<BOOL:${FLASH_DMATTN_DELAYS}>:FDM_DELAYS>)
  target_include_directories(${target} PRIVATE "${KERNEL_INCLUDE}" "${PROJECT_SOURCE_DIR}/cpp/cuda")
  if(major GREATER_EQUAL 13)
    set(compression --compress-mode=size)
  else()
    set(compression -Xfatbin=-compress-all)
  endif()
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--generate-code=arch=compute_${code},code=sm_${code}>
    $<$<COMPILE_LANGUAGE:CUDA>:${compression}>
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
  set(runtime_static Static)
  set(runtime_shared Shared)
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES OFF
    JOB_POOL_COMPILE ${FDM_CUDA_JOB_POOL}
    CUDA_RUNTIME_LIBRARY ${runtime_${FLASH_DMATTN_CUDART}})
endfunction()

# fdm_name_cuda_modules(<file>...)
#   Makes the binary independent of the folder of the build. By default, nvcc gives each symbol with internal linkage,
#   also kernels in unnamed namespaces, a name with a hash of the source's absolute path. Here the hash is of the path
#   within the source or build folder. cmake/cuda_module.h describes another part of the name. With CUDA 12.4 and 13.0,
#   builds in two folders give equal files. -frandom-seed keeps the path in the name, and CUDA 12 does not have it.
function(fdm_name_cuda_modules)
  check_compiler_flag(CUDA "-Xcudafe=--orig_src_path_name=module.cu" FDM_NVCC_NAMES_MODULES)
  if(NOT FDM_NVCC_NAMES_MODULES)
    message(STATUS "This nvcc cannot be told a module's name: binaries depend on the folder that they are built in")
    return()
  endif()
  foreach(source IN LISTS ARGN)
    if(NOT source MATCHES "\\.cu$") # not compiled by nvcc
      continue()
    endif()
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" OUTPUT_VARIABLE name)
    string(REPLACE "${PROJECT_BINARY_DIR}/" "" name "${name}")
    string(REPLACE "${PROJECT_SOURCE_DIR}/" "" name "${name}")
    string(MAKE_C_IDENTIFIER "${name}" identifier)
    set_source_files_properties("${source}" PROPERTIES
      COMPILE_DEFINITIONS "FDM_MODULE=${identifier}"
      COMPILE_OPTIONS "-Xcudafe=--orig_src_path_name=${name};-include=${PROJECT_SOURCE_DIR}/cmake/cuda_module.h"
      OBJECT_DEPENDS "${PROJECT_SOURCE_DIR}/cmake/cuda_module.h")
  endforeach()
endfunction()
