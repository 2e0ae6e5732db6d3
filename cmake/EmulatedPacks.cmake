# SPDX-License-Identifier: BSD-3-Clause
#
# For tests: the CUDA packs of some archs, compiled for the CPU by a C++ compiler. cpp/emulator replaces CUDA's headers
# and the inline assembly of cpp/cuda/ptx.
include_guard(GLOBAL)
include(Kernels)
include(Pack)

# fdm_add_emulated_packs(SOURCES <file>...)
#   Adds emulated/libflash_dmattn_<arch>.so to the build tree for each arch of FLASH_DMATTN_EMULATE. They are not
#   installed; FLASH_DMATTN_LIBRARY_PATH names one of them.
function(fdm_add_emulated_packs)
  cmake_parse_arguments(PARSE_ARGV 0 EMULATED "" "" "SOURCES")
  if(NOT FLASH_DMATTN_EMULATE)
    return()
  endif()
  if(FDM_CUDA_ARCHS)
    message(FATAL_ERROR "FLASH_DMATTN_EMULATE is \"${FLASH_DMATTN_EMULATE}\", which compiles the CUDA sources as C++; "
      "set FLASH_DMATTN_CUDA=OFF, or use another build folder")
  endif()
  find_package(Threads REQUIRED)
  fdm_generate_kernels(kernels include)
  set(folder "${PROJECT_SOURCE_DIR}/cpp/emulator")
  set(emulator "${folder}/driver.cpp" "${folder}/machine.cpp" "${folder}/pack.cpp")
  set_source_files_properties(${EMULATED_SOURCES} ${kernels} PROPERTIES LANGUAGE CXX)
  set_source_files_properties(${emulator} PROPERTIES SKIP_PRECOMPILE_HEADERS ON)
  fdm_read_pack_interface(abi_version symbol)
  foreach(arch IN LISTS FLASH_DMATTN_EMULATE)
    fdm_table_get(code archs ${arch} code)
    string(REGEX MATCH "[0-9]+" number "${arch}")
    set(target flash_dmattn_${arch}_emulated)
    add_library(${target} MODULE ${EMULATED_SOURCES} ${kernels} ${emulator})
    fdm_setup_pack_objects(${target})
    fdm_export_only(${target} ${symbol})
    set_target_properties(${target} PROPERTIES
      CXX_STANDARD 20
      PREFIX lib
      OUTPUT_NAME "flash_dmattn_${arch}"
      LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/emulated")
    # Precompiled, since headers are most of a small source. The emulator's own sources skip them: they define CUDA's
    # keywords.
    target_precompile_headers(${target} PRIVATE
      <cuda_runtime.h> <cuda_bf16.h> <cuda_fp16.h> "${PROJECT_SOURCE_DIR}/cpp/cuda/host/launch.cuh")
    # The folders of the emulator come first.
    target_include_directories(${target} BEFORE PRIVATE "${folder}" "${include}")
    target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/cpp/cuda")
    target_compile_definitions(${target} PRIVATE
      FDM_ARCH=${number}
      FDM_TILE_ARCH=${number}
      FDM_PACK_NAME="emulated-${arch}"
      __CUDA_ARCH__=${number}0
      __CUDACC_VER_MAJOR__=0 __CUDACC_VER_MINOR__=0 __CUDACC_VER_BUILD__=0
      flash_dmattn_pack=flash_dmattn_cuda_pack)
    # Shared memory has no constructors. Kernels read the bits of numbers through pointers, which nvcc permits; only
    # nvcc's warnings matter. Fibers jump between stacks, which _FORTIFY_SOURCE reports as an error. More optimization
    # makes compiling take 1.5 times as long. SHELL: keeps an option that CMake would remove as a repetition.
    target_compile_options(${target} PRIVATE -fno-extern-tls-init -fno-strict-aliasing "SHELL:-U_FORTIFY_SOURCE" -w -O1)
    target_link_libraries(${target} PRIVATE Threads::Threads)
  endforeach()
endfunction()
