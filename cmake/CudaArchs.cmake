# SPDX-License-Identifier: BSD-3-Clause
#
# Decides which CUDA packs to build, from plain values. It uses no compiler and no GPU, so that tests can run every case
# in script mode (cmake/print_cuda_archs.cmake).
include_guard(GLOBAL)
include(ProjectFacts)

# fdm_resolve_cuda_archs(<archs> <reason>
#     MODE <AUTO|ON|OFF> [ARCHS <entry>...] [AMBIENT <entry>...] [CAPABILITIES <capability>...]
#     [NVCC_VERSION <version>] [HAVE_SOURCES <truth value>])
#   Sets <archs> to the names of the archs to build, possibly none, and <reason> to one sentence that says why.
#     ARCHS         the entries of the user. Every entry must be known and buildable, unless the only one is "all".
#     AMBIENT       CMAKE_CUDA_ARCHITECTURES or CUDAARCHS, which often list the general targets of an environment:
#                   entries that are not in the table are left out, but at least one must remain.
#     CAPABILITIES  compute capabilities of the visible GPUs
#     NVCC_VERSION  empty if there is no nvcc
#   Fails if requested packs cannot be built. Mode ON and ARCHS are requests; mode AUTO alone is not.
function(fdm_resolve_cuda_archs archs reason)
  cmake_parse_arguments(PARSE_ARGV 2 CUDA "" "MODE;NVCC_VERSION;HAVE_SOURCES" "ARCHS;AMBIENT;CAPABILITIES")
  set(${archs} "" PARENT_SCOPE)
  if(CUDA_MODE STREQUAL "OFF")
    if(CUDA_ARCHS)
      message(FATAL_ERROR "FLASH_DMATTN_ARCHS is \"${CUDA_ARCHS}\" but FLASH_DMATTN_CUDA is OFF; drop one of them")
    endif()
    set(${reason} "FLASH_DMATTN_CUDA is OFF" PARENT_SCOPE)
    return()
  endif()

  set(obstacle "")
  if(NOT CUDA_HAVE_SOURCES)
    set(obstacle "this source tree has no CUDA kernels (cpp/cuda)")
  elseif(NOT CUDA_NVCC_VERSION)
    set(obstacle "no nvcc was found (looked at CMAKE_CUDA_COMPILER, CUDACXX, CUDA_HOME, CUDA_PATH, PATH)")
  elseif(CUDA_MODE STREQUAL "AUTO" AND NOT CUDA_ARCHS AND NOT CUDA_AMBIENT AND NOT CUDA_CAPABILITIES)
    set(obstacle "no GPU is visible and no arch was asked for (FLASH_DMATTN_ARCHS)")
  endif()
  if(obstacle)
    if(CUDA_MODE STREQUAL "ON" OR CUDA_ARCHS)
      message(FATAL_ERROR "CUDA packs were asked for (FLASH_DMATTN_CUDA=${CUDA_MODE}, "
        "FLASH_DMATTN_ARCHS=\"${CUDA_ARCHS}\") but ${obstacle}. Use FLASH_DMATTN_CUDA=OFF for the cpu pack only.")
    endif()
    set(${reason} "${obstacle}" PARENT_SCOPE)
    return()
  endif()

  if(CUDA_ARCHS)
    set(source "FLASH_DMATTN_ARCHS")
    set(entries ${CUDA_ARCHS})
    set(strictness STRICT)
    if(CUDA_ARCHS STREQUAL "all") # all archs that this nvcc can build
      set(strictness "")
    endif()
  elseif(CUDA_AMBIENT)
    set(source "CMAKE_CUDA_ARCHITECTURES or CUDAARCHS")
    set(entries ${CUDA_AMBIENT})
    set(strictness "")
  elseif(CUDA_CAPABILITIES)
    set(source "the visible GPUs")
    set(entries native)
    set(strictness "")
  else()
    set(source "the required archs")
    set(entries required)
    set(strictness STRICT)
  endif()
  fdm_expand_archs(chosen ${strictness} SOURCE "${source}" ENTRIES ${entries} CAPABILITIES ${CUDA_CAPABILITIES})
  fdm_keep_buildable_archs(chosen ${strictness} SOURCE "${source}" ARCHS ${chosen} NVCC_VERSION "${CUDA_NVCC_VERSION}")
  if(NOT chosen)
    if(source STREQUAL "the visible GPUs" AND CUDA_MODE STREQUAL "AUTO")
      set(${reason} "no visible GPU (${CUDA_CAPABILITIES}) is one that nvcc ${CUDA_NVCC_VERSION} and this version serve"
          PARENT_SCOPE)
      return()
    endif()
    fdm_table_archs(supported)
    message(FATAL_ERROR "${source} (\"${entries}\") leaves no arch to build with nvcc ${CUDA_NVCC_VERSION}; "
      "supported: ${supported}")
  endif()
  set(${archs} ${chosen} PARENT_SCOPE)
  set(${reason} "from ${source}" PARENT_SCOPE)
endfunction()

# fdm_expand_archs(<archs> [STRICT] SOURCE <text> ENTRIES <entry>... [CAPABILITIES <capability>...])
#   Sets <archs> to the arch names of the entries, in ascending order and without repetition. An entry is a name (sm90,
#   sm_90), a number with the suffixes of nvcc and CMake (90, 90a, 90-real), a compute capability (9.0), "native",
#   "required", "all" or "all-major". Packs hold no PTX, so "90-virtual" names no arch. With STRICT an entry that names
#   no arch is an error.
function(fdm_expand_archs archs)
  cmake_parse_arguments(PARSE_ARGV 1 EXPAND "STRICT" "SOURCE" "ENTRIES;CAPABILITIES")
  fdm_table_archs(supported)
  set(chosen "")
  string(REGEX REPLACE "[, ]+" ";" entries "${EXPAND_ENTRIES}")
  foreach(entry IN LISTS entries)
    set(found "")
    if(entry STREQUAL "")
      continue()
    elseif(entry STREQUAL "native")
      foreach(capability IN LISTS EXPAND_CAPABILITIES)
        fdm_preferred_arch(arch ${capability})
        list(APPEND found ${arch})
      endforeach()
    elseif(entry MATCHES "^(all|all-major)$")
      set(found ${supported})
    elseif(entry STREQUAL "required")
      foreach(arch IN LISTS supported)
        fdm_table_get(required archs ${arch} required)
        if(required)
          list(APPEND found ${arch})
        endif()
      endforeach()
    elseif(entry MATCHES "^([0-9]+)\\.([0-9])$")
      fdm_preferred_arch(found "${entry}")
    elseif(entry MATCHES "^(sm_?)?([0-9]+)([0-9])[af]?(-real)?$")
      set(found "sm${CMAKE_MATCH_2}${CMAKE_MATCH_3}")
      if(NOT found IN_LIST supported) # a GPU that runs the code of another arch, such as 103
        fdm_preferred_arch(found "${CMAKE_MATCH_2}.${CMAKE_MATCH_3}")
      endif()
    endif()
    if(EXPAND_STRICT AND NOT found)
      list(JOIN supported ", " allowed)
      if(entry STREQUAL "native")
        message(FATAL_ERROR "${EXPAND_SOURCE} has \"native\", but no supported GPU is visible")
      endif()
      message(FATAL_ERROR "${EXPAND_SOURCE} has the unknown arch \"${entry}\"; "
        "allowed: ${allowed}, native, required, all")
    endif()
    list(APPEND chosen ${found})
  endforeach()
  list(REMOVE_DUPLICATES chosen)
  list(SORT chosen COMPARE NATURAL)
  set(${archs} ${chosen} PARENT_SCOPE)
endfunction()

# fdm_keep_buildable_archs(<archs> [STRICT] SOURCE <text> ARCHS <arch>... NVCC_VERSION <version>)
#   Sets <archs> to those of ARCHS that this nvcc can compile. With STRICT, an arch that it cannot compile is an error.
function(fdm_keep_buildable_archs archs)
  cmake_parse_arguments(PARSE_ARGV 1 KEEP "STRICT" "SOURCE;NVCC_VERSION" "ARCHS")
  set(kept "")
  foreach(arch IN LISTS KEEP_ARCHS)
    fdm_table_get(min_cuda archs ${arch} min_cuda)
    if(KEEP_NVCC_VERSION VERSION_GREATER_EQUAL min_cuda)
      list(APPEND kept ${arch})
    elseif(KEEP_STRICT)
      message(FATAL_ERROR "${KEEP_SOURCE} asks for ${arch}, which needs CUDA ${min_cuda} or newer; "
        "nvcc is ${KEEP_NVCC_VERSION}")
    endif()
  endforeach()
  set(${archs} ${kept} PARENT_SCOPE)
endfunction()

# fdm_resolve_tiles(<tiles> [TILES <arch>] [ARCHS <arch>...])
#   Sets <tiles> to the name of the arch whose tiles and choice of kernels all packs use; "" if each pack uses its own.
#   This tests the kernels of other GPUs on the present GPU. TILES is the user's value, ARCHS are the packs to build.
#   Fails if one of these cannot run such a pack. An arch can run the tiles of another if its thread blocks have enough
#   shared memory and it has the instructions of the other's kernels; "stands_in_for" of targets.json declares this.
function(fdm_resolve_tiles tiles)
  cmake_parse_arguments(PARSE_ARGV 1 RESOLVE "" "TILES" "ARCHS")
  set(${tiles} "" PARENT_SCOPE)
  if("${RESOLVE_TILES}" STREQUAL "")
    return()
  endif()
  if(NOT RESOLVE_ARCHS)
    message(FATAL_ERROR "FLASH_DMATTN_TILES is \"${RESOLVE_TILES}\" but no CUDA pack is built; drop it, or ask for "
      "archs with FLASH_DMATTN_ARCHS")
  endif()
  string(REGEX REPLACE "^(sm_?)?([0-9]+)a?$" "sm\\2" name "${RESOLVE_TILES}")
  foreach(arch IN LISTS RESOLVE_ARCHS)
    fdm_table_get(others stands_in_for ${arch})
    string(REGEX MATCHALL "sm[0-9]+" others "${others}")
    if(NOT name IN_LIST others)
      list(JOIN others ", " allowed)
      message(FATAL_ERROR "FLASH_DMATTN_TILES is \"${RESOLVE_TILES}\"; a pack of ${arch} can use the tiles of: "
        "${allowed}")
    endif()
  endforeach()
  set(${tiles} ${name} PARENT_SCOPE)
endfunction()
