// SPDX-License-Identifier: BSD-3-Clause
// Routes as text: JSON of all decisions, and a short name of the kernel choice of a call, without sizes.
#pragma once

#include <string>

#include "route.h"

namespace fdm::cuda {

std::string describe(const PlanRoute &route);
std::string describe(const ForwardRoute &route);
std::string describe(const BackwardRoute &route);
std::string describe(const SelectionRoute &route);

// Calls with the same number take the same kernels, with the same division of work except for sizes.
constexpr int kForwardRouteKinds = 1 << 10, kBackwardRouteKinds = 1 << 13;
int forward_route_kind(const ForwardRoute &route, const fdm_problem &p);
int backward_route_kind(const BackwardRoute &route);
std::string name_of_forward(int kind);
std::string name_of_backward(int kind);

} // namespace fdm::cuda
