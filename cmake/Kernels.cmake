# SPDX-License-Identifier: BSD-3-Clause
#
# The generated sources of the CUDA packs.
include_guard(GLOBAL)

# fdm_generate_kernels(<sources> <include folder>)
#   Writes the files that instantiate the kernels into the build tree, for the head dimensions of FLASH_DMATTN_HEAD_DIMS
#   or else of cmake/targets.json. Sets <sources> to the files to compile and <include folder> to the folder of the
#   generated header. Each kernel has its own small file: files compile in parallel, and a change affects few.
function(fdm_generate_kernels sources include)
  find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)
  set(folder "${PROJECT_BINARY_DIR}/kernels")
  set(generator "${PROJECT_SOURCE_DIR}/cmake/generate_kernels.py")
  set(table "${PROJECT_SOURCE_DIR}/cmake/targets.json")
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${generator}" "${table}")
  execute_process(
    COMMAND "${Python_EXECUTABLE}" "${generator}" --output "${folder}" "--head-dims=${FLASH_DMATTN_HEAD_DIMS}"
    OUTPUT_VARIABLE files OUTPUT_STRIP_TRAILING_WHITESPACE
    ERROR_VARIABLE error RESULT_VARIABLE status)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "cmake/generate_kernels.py failed: ${error}")
  endif()
  set(${sources} ${files} PARENT_SCOPE)
  set(${include} "${folder}" PARENT_SCOPE)
endfunction()

# fdm_describe_kernels(<head dims> <hash> INCLUDE <folder of generated headers> SOURCES <file>...)
#   Sets <head dims> to the instantiated head dimensions, and <hash> to the SHA-256 of the names and contents of the
#   generated files. The hash does not include other sources.
function(fdm_describe_kernels head_dims hash)
  cmake_parse_arguments(PARSE_ARGV 2 KERNEL "" "INCLUDE" "SOURCES")
  set(header "${KERNEL_INCLUDE}/head_dims.h")
  file(STRINGS "${header}" line REGEX "InstantiatedHeadDims")
  string(REGEX MATCHALL "[0-9]+" dims "${line}")
  set(digests "")
  foreach(source IN LISTS header KERNEL_SOURCES)
    cmake_path(IS_PREFIX KERNEL_INCLUDE "${source}" NORMALIZE generated)
    if(generated)
      cmake_path(GET source FILENAME name)
      file(SHA256 "${source}" digest)
      list(APPEND digests "${name} ${digest}")
    endif()
  endforeach()
  list(SORT digests)
  string(SHA256 digest "${digests}")
  set(${head_dims} ${dims} PARENT_SCOPE)
  set(${hash} ${digest} PARENT_SCOPE)
endfunction()
