# SPDX-License-Identifier: BSD-3-Clause
#
# The differences between operating systems: compilers, file names, and options that hide symbols.
include_guard(GLOBAL)

# fdm_require_supported_platform()
#   Fails if the packs or the module cannot be built, and names the requirements. They use vector extensions of GCC and
#   clang. The compiler maps these to the processor's registers, so any 64-bit little-endian machine is supported.
#   Without packs and module, only the Python package is installed, which computes in plain PyTorch on any platform.
function(fdm_require_supported_platform)
  if(NOT FLASH_DMATTN_CORE AND NOT FLASH_DMATTN_CPU AND FLASH_DMATTN_CUDA STREQUAL "OFF")
    return()
  endif()
  set(without "To install the package without binaries, which computes in plain PyTorch, turn FLASH_DMATTN_CORE, "
    "FLASH_DMATTN_CPU and FLASH_DMATTN_CUDA OFF (docs/install.md)")
  list(JOIN without "" without)
  if(NOT CMAKE_SYSTEM_NAME MATCHES "^(Linux|Darwin|Windows)$" OR NOT CMAKE_SIZEOF_VOID_P EQUAL 8
     OR NOT CMAKE_CXX_BYTE_ORDER STREQUAL "LITTLE_ENDIAN")
    message(FATAL_ERROR "flash-dmattn builds on 64-bit little-endian Linux, macOS and Windows; this is "
      "${CMAKE_SYSTEM_NAME} ${CMAKE_SYSTEM_PROCESSOR}. ${without}")
  endif()
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "^(GNU|Clang|AppleClang)$"
     OR CMAKE_CXX_COMPILER_FRONTEND_VARIANT STREQUAL "MSVC")
    message(FATAL_ERROR "flash-dmattn needs GCC or clang, whose vectors its kernels are written in; this is "
      "${CMAKE_CXX_COMPILER_ID} (${CMAKE_CXX_COMPILER}). On Windows install LLVM, and set CXX=clang++ and "
      "CMAKE_GENERATOR=Ninja. ${without}")
  endif()
  # On Windows, GCC aligns the stack to 16 bytes, but spills registers of 32 and 64 bytes (its bug 54412).
  if(CMAKE_SYSTEM_NAME STREQUAL "Windows" AND NOT CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    message(FATAL_ERROR "on Windows flash-dmattn needs clang, as GCC misaligns AVX registers that it spills; this is "
      "${CMAKE_CXX_COMPILER_ID} (${CMAKE_CXX_COMPILER}). Set CXX=clang++")
  endif()
  list(LENGTH CMAKE_OSX_ARCHITECTURES count)
  if(count GREATER 1)
    message(FATAL_ERROR "CMAKE_OSX_ARCHITECTURES is \"${CMAKE_OSX_ARCHITECTURES}\"; build for one machine at a time")
  endif()
endfunction()

# fdm_machine(<machine>)
#   Sets <machine> to the target's processor architecture as manifests name it: x86_64, aarch64, or the system's name
#   for others.
function(fdm_machine machine)
  set(name "${CMAKE_SYSTEM_PROCESSOR}")
  if(CMAKE_SYSTEM_NAME STREQUAL "Darwin" AND CMAKE_OSX_ARCHITECTURES)
    set(name "${CMAKE_OSX_ARCHITECTURES}")
  endif()
  string(TOLOWER "${name}" name)
  string(REGEX REPLACE "^amd64$" "x86_64" name "${name}")
  string(REGEX REPLACE "^arm64$" "aarch64" name "${name}")
  set(${machine} "${name}" PARENT_SCOPE)
endfunction()

# fdm_library_name(<prefix> <suffix>)
#   Sets the prefix and the suffix of a pack's file name.
function(fdm_library_name prefix suffix)
  set(begin "lib")
  set(end ".so")
  if(CMAKE_SYSTEM_NAME STREQUAL "Darwin")
    set(end ".dylib")
  elseif(CMAKE_SYSTEM_NAME STREQUAL "Windows")
    set(begin "")
    set(end ".dll")
  endif()
  set(${prefix} "${begin}" PARENT_SCOPE)
  set(${suffix} "${end}" PARENT_SCOPE)
endfunction()

# fdm_export_only(<target> <symbol>)
#   Links a library so that it exports only this symbol, with the hardening of the system's linker. On Windows, only
#   symbols declared with dllexport are exported.
function(fdm_export_only target symbol)
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    set(script "${PROJECT_BINARY_DIR}/${symbol}.map")
    file(CONFIGURE OUTPUT "${script}" CONTENT "{ global: @symbol@; local: *; };\n" @ONLY)
    set_target_properties(${target} PROPERTIES LINK_DEPENDS "${script}")
    target_link_options(${target} PRIVATE "LINKER:--version-script=${script}" LINKER:-z,relro,-z,now,-z,noexecstack)
  elseif(CMAKE_SYSTEM_NAME STREQUAL "Darwin")
    target_link_options(${target} PRIVATE LINKER:-exported_symbol,_${symbol})
  elseif(CMAKE_CXX_SIMULATE_ID STREQUAL "MSVC") # Microsoft's linker, or LLVM's in its place
    target_link_options(${target} PRIVATE LINKER:/Brepro)
  endif()
endfunction()

# fdm_harden_objects(<target>)
#   Compiles host code with a stack protector and with the C library's checked functions. Their cost in calls of the cpu
#   pack is too small to measure. clang for Windows has neither. A level of _FORTIFY_SOURCE in the user's flags stays.
#   Without optimization the C library has no checked functions.
function(fdm_harden_objects target)
  if(CMAKE_SYSTEM_NAME STREQUAL "Windows")
    return()
  endif()
  set(flags -fstack-protector-strong)
  if(NOT "${CMAKE_CXX_FLAGS} ${CMAKE_CUDA_FLAGS}" MATCHES "_FORTIFY_SOURCE")
    list(APPEND flags $<$<NOT:$<CONFIG:Debug>>:-U_FORTIFY_SOURCE> $<$<NOT:$<CONFIG:Debug>>:-D_FORTIFY_SOURCE=2>)
  endif()
  fdm_compile_host_code(${target} ${flags})
endfunction()

# fdm_compile_host_code(<target> <flag>...)
#   Compiles C++ and the host code of CUDA sources with the flags.
function(fdm_compile_host_code target)
  foreach(flag IN LISTS ARGN)
    target_compile_options(${target} PRIVATE
      $<$<COMPILE_LANGUAGE:CXX>:${flag}>
      $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=${flag}>)
  endforeach()
endfunction()

# fdm_link_self_contained(<target>)
#   Links the C++ library statically into a library with a C interface, which then runs where the C++ library is older.
#   macOS has its own C++ library, which is never linked statically.
function(fdm_link_self_contained target)
  set_target_properties(${target} PROPERTIES MSVC_RUNTIME_LIBRARY "MultiThreaded$<$<CONFIG:Debug>:Debug>")
  if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    target_link_options(${target} PRIVATE
      -static-libstdc++ -static-libgcc LINKER:--exclude-libs,ALL LINKER:--no-undefined LINKER:--gc-sections)
  elseif(CMAKE_SYSTEM_NAME STREQUAL "Darwin")
    target_link_options(${target} PRIVATE LINKER:-dead_strip)
  endif()
endfunction()
