// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/dependent.cuh. A kernel starts when the one ahead of it has ended.
#pragma once

namespace fdm::cuda::ptx {

inline void start_dependents() {}
inline void wait_for_kernel_ahead() {}

} // namespace fdm::cuda::ptx
