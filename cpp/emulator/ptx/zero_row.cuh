// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/zero_row.cuh. The linker merges inline functions of all translation units into one, and so the row to
// which they compare pointers: it must be one row for all.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

inline __align__(16) const uint16_t kZeroRow[256] = {};

} // namespace fdm::cuda::ptx
