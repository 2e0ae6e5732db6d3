// SPDX-License-Identifier: BSD-3-Clause
// Selection of the keys with the largest bias: fdm_pack.select of the cpu pack.
#pragma once

#include <cstdint>

#include "../pack.h"

namespace fdm::cpu {

int64_t selection_workspace_bytes(const fdm_selection &s);
void select_keys(const fdm_selection &s, void *workspace);

} // namespace fdm::cpu
