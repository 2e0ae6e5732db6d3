// SPDX-License-Identifier: BSD-3-Clause
// A row of zeros in global memory.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

// The source of copies of absent rows, so copies need no test for them. Device code is not linked across translation
// units, so each unit has its own.
static __device__ __align__(16) const uint16_t kZeroRow[256] = {};

} // namespace fdm::cuda::ptx
