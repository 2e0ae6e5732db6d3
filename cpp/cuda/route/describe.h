// SPDX-License-Identifier: BSD-3-Clause
// Routes as text: JSON of what was decided, and a short name of the way that a call takes, without its sizes.
#pragma once

#include <string>

#include "route.h"

namespace fdm::cuda {

std::string describe(const PlanRoute &route);
std::string describe(const ForwardRoute &route);
std::string describe(const BackwardRoute &route);
std::string describe(const SelectionRoute &route);

// Calls with the same number take the same way: the same kernel, and the same division of its work but for sizes.
constexpr int kForwardWays = 1 << 10, kBackwardWays = 1 << 13;
int forward_way(const ForwardRoute &route, const fdm_problem &p);
int backward_way(const BackwardRoute &route);
std::string name_of_forward(int way);
std::string name_of_backward(int way);

} // namespace fdm::cuda
