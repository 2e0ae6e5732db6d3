// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/zero_row.cuh. Inline functions of all translation units are linked to one here, and so is what they compare
// with: there must be one row for all.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

inline __align__(16) const uint16_t kZeroRow[256] = {};

} // namespace fdm::cuda::ptx
