# SPDX-License-Identifier: BSD-3-Clause
#
# Packs that were built before, by `python -m release packs` or by another build of this project: a folder holds the
# libraries and the manifest.json that describes them.
include_guard(GLOBAL)
include(Manifest)

# fdm_add_prebuilt_packs(<folder>...)
#   Installs the packs of the folders unchanged, and lists them in the manifest. Each must have this version, interface
#   and machine, and its file must match its manifest.
function(fdm_add_prebuilt_packs)
  fdm_read_pack_interface(abi_version symbol)
  foreach(folder IN LISTS ARGN)
    cmake_path(ABSOLUTE_PATH folder BASE_DIRECTORY "${PROJECT_SOURCE_DIR}" NORMALIZE)
    set(path "${folder}/manifest.json")
    if(NOT EXISTS "${path}")
      message(FATAL_ERROR "FLASH_DMATTN_PREBUILT_PACKS has ${folder}, which has no manifest.json")
    endif()
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${path}")
    file(READ "${path}" manifest)
    fdm_require_value("${path}" "${manifest}" schema "${FDM_MANIFEST_SCHEMA}")
    fdm_require_value("${path}" "${manifest}" version "${FDM_VERSION}")
    fdm_require_value("${path}" "${manifest}" abi_version "${abi_version}")
    string(JSON count LENGTH "${manifest}" packs)
    set(index 0)
    while(index LESS count)
      string(JSON pack GET "${manifest}" packs ${index})
      fdm_add_prebuilt_pack("${folder}" "${pack}")
      math(EXPR index "${index} + 1")
    endwhile()
  endforeach()
endfunction()

# fdm_add_prebuilt_pack(<folder> <description>)
#   Installs one pack with its description from the manifest.
function(fdm_add_prebuilt_pack folder description)
  string(JSON name GET "${description}" name)
  string(JSON file GET "${description}" file)
  if(NOT file MATCHES "^[^/\\:]+$" OR file STREQUAL "..")
    message(FATAL_ERROR "FLASH_DMATTN_PREBUILT_PACKS: ${folder}, pack ${name}: its manifest says file \"${file}\", "
      "which is no name of a file beside the manifest")
  endif()
  set(path "${folder}/${file}")
  fdm_machine(machine)
  fdm_require_value("${folder}, pack ${name}" "${description}" machine "${machine}")
  if(NOT EXISTS "${path}")
    message(FATAL_ERROR "FLASH_DMATTN_PREBUILT_PACKS: ${path} is absent")
  endif()
  file(SHA256 "${path}" sha256)
  fdm_require_value("${path}" "${description}" sha256 "${sha256}")
  fdm_list_pack("${description}")
  # Sets the permissions of a linked library, which downloaded archives often lose.
  install(PROGRAMS "${path}" DESTINATION flash_dmattn/packs)
  message(STATUS "Prebuilt pack: ${name} from ${folder}")
endfunction()

# fdm_require_value(<what> <json> <member> <value>)
#   Fails unless the member of the JSON object has the value; <what> names the object.
function(fdm_require_value what json member value)
  string(JSON found ERROR_VARIABLE missing GET "${json}" ${member})
  if(NOT found STREQUAL value)
    message(FATAL_ERROR "FLASH_DMATTN_PREBUILT_PACKS: ${what}: its manifest says ${member} \"${found}\", "
      "this build needs \"${value}\"")
  endif()
endfunction()
