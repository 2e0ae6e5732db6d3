# SPDX-License-Identifier: BSD-3-Clause
include_guard(GLOBAL)

# fdm_limit_jobs()
#   Limits how many compilers Ninja runs at once; call it before targets are added. The environment variable MAX_JOBS
#   limits all jobs together. Without it, only the CUDA compilers are limited, by memory: each nvcc job gets
#   FDM_NVCC_JOB_MIB, and machines with many cores often have less than that per core. Measured, the largest kernels
#   (head dimension 256, CUDA 13.0) take a fifth of it.
#   Other generators take their limit from `cmake --build --parallel` or CMAKE_BUILD_PARALLEL_LEVEL.
macro(fdm_limit_jobs)
  if(DEFINED ENV{MAX_JOBS} AND NOT "$ENV{MAX_JOBS}" STREQUAL "")
    if(NOT "$ENV{MAX_JOBS}" MATCHES "^[1-9][0-9]*$")
      message(FATAL_ERROR "the environment variable MAX_JOBS is \"$ENV{MAX_JOBS}\"; it must be a positive number")
    endif()
    set_property(GLOBAL APPEND PROPERTY JOB_POOLS fdm_jobs=$ENV{MAX_JOBS})
    set(CMAKE_JOB_POOL_COMPILE fdm_jobs)
    set(CMAKE_JOB_POOL_LINK fdm_jobs)
    set(FDM_CUDA_JOB_POOL fdm_jobs)
    message(STATUS "At most $ENV{MAX_JOBS} jobs (MAX_JOBS)")
  else()
    fdm_usable_memory(FDM_MEMORY_MIB)
    math(EXPR FDM_CUDA_JOBS "${FDM_MEMORY_MIB} / ${FDM_NVCC_JOB_MIB}")
    if(FDM_CUDA_JOBS LESS 1)
      set(FDM_CUDA_JOBS 1)
    endif()
    set_property(GLOBAL APPEND PROPERTY JOB_POOLS fdm_cuda_jobs=${FDM_CUDA_JOBS})
    set(FDM_CUDA_JOB_POOL fdm_cuda_jobs)
  endif()
endmacro()

set(FDM_NVCC_JOB_MIB 1024)

# fdm_usable_memory(<mib>)
#   Sets <mib> to the machine's memory, or to the container's limit if that is less.
function(fdm_usable_memory mib)
  cmake_host_system_information(RESULT total QUERY TOTAL_PHYSICAL_MEMORY)
  foreach(path /sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes)
    if(EXISTS ${path})
      file(STRINGS ${path} limit LIMIT_COUNT 1)
      if(limit MATCHES "^[0-9]+$")
        math(EXPR limit "${limit} / 1048576")
        if(limit LESS total)
          set(total ${limit})
        endif()
      endif()
    endif()
  endforeach()
  set(${mib} ${total} PARENT_SCOPE)
endfunction()
