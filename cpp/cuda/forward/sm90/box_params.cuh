// SPDX-License-Identifier: BSD-3-Clause
// What the forward kernels for Hopper are given that copy Q, K and V as boxes.
#pragma once

#include <cuda.h>

#include "../forward.h"

namespace fdm::cuda {

struct BoxMaps {
  CUtensorMap q, k, v;
};

struct BoxForwardParams : BoxMaps {
  ForwardParams forward;
};

} // namespace fdm::cuda
