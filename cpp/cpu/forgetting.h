// SPDX-License-Identifier: BSD-3-Clause
// Bias and intervals of forget gates: fdm_pack.forget and forget_backward of the cpu pack.
#pragma once

#include <cstdint>

#include "../pack.h"

namespace fdm::cpu {

int64_t forget_workspace_bytes(const fdm_forgetting &f);
void forget_pass(const fdm_forgetting &f, void *workspace);
void forget_backward_pass(const fdm_forgetting &f);

} // namespace fdm::cpu
