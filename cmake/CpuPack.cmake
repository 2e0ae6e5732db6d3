# SPDX-License-Identifier: BSD-3-Clause
#
# The pack of the CPU: one library with its inner kernels compiled once for each SIMD level. It chooses a level at run
# time.
include_guard(GLOBAL)
include(Pack)

set(FDM_SANITIZERS -fsanitize=address,undefined,float-cast-overflow)

# fdm_add_cpu_pack(SOURCES <file>... SIMD_SOURCES <file>...)
#   Does nothing if FLASH_DMATTN_CPU is OFF. SOURCES are compiled once, for the oldest supported machine. SIMD_SOURCES
#   are compiled for each level with
#     FDM_SIMD_NAMESPACE  baseline, avx2 or avx512: the namespace for everything they define
#     FDM_SIMD_BYTES      16, 32 or 64: the width of a register
#
#   The order of the objects matters. If several objects hold an inline function of the standard library, the linker
#   takes it from the first. Objects for every machine come first, so that code for every machine does not call a copy
#   compiled for AVX. CMake links a target's own objects after those of other targets, so the pack has none of its own.
function(fdm_add_cpu_pack)
  if(NOT FLASH_DMATTN_CPU)
    return()
  endif()
  cmake_parse_arguments(PARSE_ARGV 0 CPU "" "" "SOURCES;SIMD_SOURCES")
  find_package(Threads REQUIRED)
  add_library(flash_dmattn_cpu MODULE)
  fdm_setup_pack(flash_dmattn_cpu FILE flash_dmattn_cpu NAME cpu DEVICE cpu)
  set_target_properties(flash_dmattn_cpu PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(flash_dmattn_cpu PRIVATE Threads::Threads)
  if(FLASH_DMATTN_SANITIZE)
    target_link_options(flash_dmattn_cpu PRIVATE ${FDM_SANITIZERS})
  endif()

  fdm_add_cpu_objects(flash_dmattn_cpu_common SOURCES ${CPU_SOURCES})
  fdm_add_simd_level(baseline BYTES 16 SOURCES ${CPU_SIMD_SOURCES})
  fdm_machine(machine)
  if(machine STREQUAL "x86_64")
    set(fma -mfma -mbmi2)
    fdm_add_simd_level(avx2 BYTES 32 OPTIONS -mavx2 ${fma} SOURCES ${CPU_SIMD_SOURCES})
    # GCC and clang prefer 256-bit registers by default, since some processors lower their clock for 512-bit ones.
    fdm_add_simd_level(avx512 BYTES 64
      OPTIONS -mavx512f -mavx512bw -mavx512vl -mavx512dq -mprefer-vector-width=512 ${fma}
      SOURCES ${CPU_SIMD_SOURCES})
  endif()
endfunction()

# fdm_add_simd_level(<level> BYTES <register width> [OPTIONS <flag>...] SOURCES <file>...)
#   Compiles the sources for one SIMD level and adds the objects to the cpu pack.
function(fdm_add_simd_level level)
  cmake_parse_arguments(PARSE_ARGV 1 SIMD "" "BYTES" "OPTIONS;SOURCES")
  set(target flash_dmattn_cpu_${level})
  fdm_add_cpu_objects(${target} SOURCES ${SIMD_SOURCES})
  target_compile_definitions(${target} PRIVATE FDM_SIMD_NAMESPACE=${level} FDM_SIMD_BYTES=${SIMD_BYTES})
  target_compile_options(${target} PRIVATE ${SIMD_OPTIONS})
endfunction()

# fdm_add_cpu_objects(<target> SOURCES <file>...)
#   Compiles the sources to objects, and adds these to the cpu pack after its present ones. The compiler may vectorise
#   and fuse, but may not assume finite numbers as with -ffast-math: -inf is an ordinary value (an empty row's lse, a
#   dropped key's bias).
function(fdm_add_cpu_objects target)
  cmake_parse_arguments(PARSE_ARGV 1 OBJECTS "" "" "SOURCES")
  add_library(${target} OBJECT ${OBJECTS_SOURCES})
  fdm_setup_pack_objects(${target})
  target_compile_options(${target} PRIVATE -fno-math-errno -fno-trapping-math -ffp-contract=fast)
  if(FLASH_DMATTN_SANITIZE) # the sanitizers have their own checks of the C library's functions
    target_compile_options(${target} PRIVATE ${FDM_SANITIZERS} -fno-sanitize-recover=all -fno-omit-frame-pointer
      -U_FORTIFY_SOURCE)
  endif()
  target_sources(flash_dmattn_cpu PRIVATE $<TARGET_OBJECTS:${target}>)
endfunction()
