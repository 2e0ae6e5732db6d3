# SPDX-License-Identifier: BSD-3-Clause
#
# Prints the CUDA packs that a build with these values makes, without a build:
#   cmake -DMODE=ON "-DARCHS=80;90" -DNVCC_VERSION=13.0 -P cmake/print_cuda_archs.cmake
# Variables: MODE (AUTO), ARCHS, AMBIENT, CAPABILITIES, NVCC_VERSION, HAVE_SOURCES (ON), TILES; CudaArchs.cmake explains
# them.
cmake_minimum_required(VERSION 3.19...4.4)
list(APPEND CMAKE_MODULE_PATH "${CMAKE_CURRENT_LIST_DIR}")
include(CudaArchs)
if(NOT DEFINED MODE)
  set(MODE AUTO)
endif()
if(NOT DEFINED HAVE_SOURCES)
  set(HAVE_SOURCES ON)
endif()
fdm_resolve_cuda_archs(archs reason
  MODE ${MODE} ARCHS ${ARCHS} AMBIENT ${AMBIENT} CAPABILITIES ${CAPABILITIES}
  NVCC_VERSION "${NVCC_VERSION}" HAVE_SOURCES ${HAVE_SOURCES})
fdm_resolve_tiles(tiles TILES "${TILES}" ARCHS ${archs})
list(JOIN archs " " archs)
message(NOTICE "archs: ${archs}")
message(NOTICE "reason: ${reason}")
message(NOTICE "tiles: ${tiles}")
