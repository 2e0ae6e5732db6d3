# SPDX-License-Identifier: BSD-3-Clause
#
# The common parts of all kernel packs, for CPUs and GPUs.
include_guard(GLOBAL)
include(Manifest)
include(Platform)

# fdm_setup_pack(<target> FILE <stem> <arguments of fdm_describe_pack>)
#   Turns a library target into an installed kernel pack, lib<stem>.so on Linux: hidden symbols, hardened linking, and an
#   entry in the manifest.
#
#   The only exported symbol is that of cpp/pack.h: a process may load packs of several CUDA majors and torch's
#   libraries, and none may bind to another's symbols.
function(fdm_setup_pack target)
  cmake_parse_arguments(PARSE_ARGV 1 PACK "" "FILE" "")
  fdm_read_pack_interface(abi_version symbol)
  fdm_library_name(prefix suffix)
  fdm_setup_pack_objects(${target})
  set_target_properties(${target} PROPERTIES
    PREFIX "${prefix}"
    SUFFIX "${suffix}"
    OUTPUT_NAME "${PACK_FILE}"
    LIBRARY_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}/packs"
    SKIP_BUILD_RPATH ON
    INSTALL_RPATH "")
  fdm_export_only(${target} ${symbol})
  fdm_link_self_contained(${target})
  install(TARGETS ${target} LIBRARY DESTINATION flash_dmattn/packs)
  fdm_describe_pack(description FILE "${prefix}${PACK_FILE}${suffix}" ${PACK_UNPARSED_ARGUMENTS})
  fdm_list_pack("${description}")
endfunction()

# fdm_setup_pack_objects(<target>)
#   Sets the compiler options of all objects of a pack. The prefix maps keep the build's paths out of the binary, so
#   that equal sources give equal files. The later map has precedence if the build folder is in the source folder.
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
  fdm_harden_objects(${target})
  fdm_compile_host_code(${target} -Wall -Wextra -ffunction-sections -fdata-sections
    "-ffile-prefix-map=${PROJECT_SOURCE_DIR}/=" "-ffile-prefix-map=${PROJECT_BINARY_DIR}/=")
endfunction()
