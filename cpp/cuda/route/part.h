// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <cstdint>

namespace fdm::cuda {

// A part of the workspace.
struct Part {
  int64_t offset = -1; // below 0: not needed
  int64_t bytes = 0;

  bool exists() const { return offset >= 0; }
};
template <class T> T *at(void *workspace, const Part &part) {
  return part.exists() ? reinterpret_cast<T *>(static_cast<char *>(workspace) + part.offset) : nullptr;
}

} // namespace fdm::cuda
