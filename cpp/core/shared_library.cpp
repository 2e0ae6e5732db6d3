// SPDX-License-Identifier: BSD-3-Clause
#include "shared_library.h"

#if defined(_WIN32)
#define NOMINMAX
#define WIN32_LEAN_AND_MEAN
#include <windows.h>

#include <filesystem>
#else
#include <dlfcn.h>
#endif

namespace fdm {

#if defined(_WIN32)

namespace {

std::string system_message(DWORD error) {
  char text[512];
  const DWORD length = FormatMessageA(FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS, nullptr, error, 0,
                                      text, sizeof text, nullptr);
  std::string message = "error " + std::to_string(error);
  if (length > 0) message += ": " + std::string(text, length);
  while (message.back() == '\n' || message.back() == '\r' || message.back() == ' ') message.pop_back();
  return message;
}

} // namespace

void *open_library(const std::string &path, std::string &reason) {
  // With an absolute path Windows searches for dependencies next to the library and in the system folders, but not in
  // the current folder or along PATH.
  const std::filesystem::path file = std::filesystem::absolute(std::filesystem::u8path(path));
  HMODULE library =
      LoadLibraryExW(file.c_str(), nullptr, LOAD_LIBRARY_SEARCH_DLL_LOAD_DIR | LOAD_LIBRARY_SEARCH_DEFAULT_DIRS);
  if (library == nullptr) reason = "LoadLibrary failed: " + system_message(GetLastError());
  return library;
}

void *find_symbol(void *library, const char *name) {
  return reinterpret_cast<void *>(GetProcAddress(static_cast<HMODULE>(library), name));
}

#else

void *open_library(const std::string &path, std::string &reason) {
  // dlopen searches the system's directories for a name without a slash.
  const std::string file = path.find('/') == std::string::npos ? "./" + path : path;
  void *library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char *text = dlerror();
    reason = std::string("dlopen failed: ") + (text != nullptr ? text : "no reason given");
  }
  return library;
}

void *find_symbol(void *library, const char *name) { return dlsym(library, name); }

#endif

} // namespace fdm
