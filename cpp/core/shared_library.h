// SPDX-License-Identifier: BSD-3-Clause
//
// The system's loader of shared libraries.
#pragma once

#include <string>

namespace fdm {

// Opens a file with its symbols hidden from other libraries. Null on failure, with the reason that the system gives.
void *open_library(const std::string &path, std::string &reason);

// Null if the library has no such symbol.
void *find_symbol(void *library, const char *name);

} // namespace fdm
