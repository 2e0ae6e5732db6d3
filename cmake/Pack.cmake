# SPDX-License-Identifier: BSD-3-Clause
#
# What every kernel pack has in common, whatever it runs on.
include_guard(GLOBAL)
include(Manifest)

# fdm_setup_pack(<target> FILE <stem> <what fdm_describe_pack takes>)
#   Turns a library target into an installed kernel pack lib<stem>.so: hidden symbols, hardened linking, and an entry
#   in the manifest.
#
#   One exported symbol, by a version script made from cpp/pack.h: a process may hold packs of several CUDA majors and
#   torch's own libraries, and none may bind to another's symbols. libstdc++ and libgcc are linked statically, and
#   --exclude-libs hides them, so that the pack needs no newer ones than the machine has; behind a C interface that is
#   safe.
function(fdm_setup_pack target)
  cmake_parse_arguments(PARSE_ARGV 1 PACK "" "FILE" "")
  fdm_read_pack_interface(abi_version symbol)
  set(script "${PROJECT_BINARY_DIR}/pack.map")
  file(CONFIGURE OUTPUT "${script}" CONTENT "{ global: @symbol@; local: *; };\n" @ONLY)

  fdm_setup_pack_objects(${target})
  set_target_properties(${target} PROPERTIES
    PREFIX "lib"
    OUTPUT_NAME "${PACK_FILE}"
    LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/packs"
    LINK_DEPENDS "${script}"
    SKIP_BUILD_RPATH ON
    INSTALL_RPATH "")
  target_link_options(${target} PRIVATE
    -static-libstdc++
    -static-libgcc
    "LINKER:--version-script=${script}"
    LINKER:--exclude-libs,ALL
    LINKER:--no-undefined
    LINKER:--gc-sections
    LINKER:-z,relro,-z,now,-z,noexecstack)
  install(TARGETS ${target} LIBRARY DESTINATION flash_dmattn/packs)
  fdm_describe_pack(description FILE "lib${PACK_FILE}.so" ${PACK_UNPARSED_ARGUMENTS})
  fdm_list_pack("${description}")
endfunction()

# fdm_setup_pack_objects(<target>)
#   The compiler settings of everything that goes into a pack. The prefix maps keep the build's paths out of the
#   binary, so that equal sources give equal files; the later one wins where the build folder is in the source folder.
function(fdm_setup_pack_objects target)
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden
    CUDA_VISIBILITY_PRESET hidden
    VISIBILITY_INLINES_HIDDEN ON
    POSITION_INDEPENDENT_CODE ON
    CXX_STANDARD 17
    CXX_STANDARD_REQUIRED ON
    CXX_EXTENSIONS OFF
    CUDA_STANDARD 17
    CUDA_STANDARD_REQUIRED ON)
  target_include_directories(${target} PRIVATE "${PROJECT_SOURCE_DIR}/cpp")
  target_compile_definitions(${target} PRIVATE FDM_VERSION="${FDM_VERSION}")
  foreach(flag -Wall -Wextra -ffunction-sections -fdata-sections
          "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=" "-ffile-prefix-map=${PROJECT_BINARY_DIR}/=")
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:${flag}>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${flag}>)
  endforeach()
endfunction()
