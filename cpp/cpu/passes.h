// SPDX-License-Identifier: BSD-3-Clause
// The passes: the distribution of their tiles over threads.
#pragma once

#include <cstdint>

#include "../pack.h"

namespace fdm::cpu {

int64_t forward_workspace_bytes(const fdm_problem &p);
void forward_pass(const fdm_problem &p, const fdm_forward_args &args, const void *plan, void *workspace);

int64_t backward_workspace_bytes(const fdm_problem &p);
void backward_pass(const fdm_problem &p, const fdm_backward_args &args, const void *plan, void *workspace);

int64_t key_mass_workspace_bytes(const fdm_problem &p);
void key_mass_pass(const fdm_problem &p, const fdm_key_mass_args &args, const void *plan, void *workspace);

} // namespace fdm::cpu
