// SPDX-License-Identifier: BSD-3-Clause
// The parameters of the Hopper forward kernels that copy Q, K and V as boxes (TMA).
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
