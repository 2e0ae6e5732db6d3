# SPDX-License-Identifier: BSD-3-Clause
#
# `cmake --install` runs this after it has installed the packs. It writes packs/manifest.json from the draft
# FDM_MANIFEST_DRAFT and the installed files.
set(packs_folder "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}/flash_dmattn/packs")
file(READ "${FDM_MANIFEST_DRAFT}" manifest)
string(JSON count LENGTH "${manifest}" packs)
set(index 0)
while(index LESS count)
  string(JSON file GET "${manifest}" packs ${index} file)
  set(path "${packs_folder}/${file}")
  file(SHA256 "${path}" sha256)
  file(SIZE "${path}" size)
  string(JSON declared ERROR_VARIABLE none GET "${manifest}" packs ${index} sha256)
  if(NOT none AND NOT declared STREQUAL sha256)
    message(FATAL_ERROR "${path} has the SHA-256 ${sha256}, but the manifest that it came with says ${declared}")
  endif()
  string(JSON manifest SET "${manifest}" packs ${index} sha256 "\"${sha256}\"")
  string(JSON manifest SET "${manifest}" packs ${index} size ${size})
  math(EXPR index "${index} + 1")
endwhile()
file(WRITE "${packs_folder}/manifest.json" "${manifest}\n")
message(STATUS "Installing: ${packs_folder}/manifest.json")
