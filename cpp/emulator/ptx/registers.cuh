// SPDX-License-Identifier: BSD-3-Clause
// The functions of cuda/ptx/registers.cuh that have an effect without a GPU.
#pragma once

#include <cstdint>

namespace fdm::cuda::ptx {

inline uint32_t thread_index() { return threadIdx.x; }
template <class T> T *opaque(T *pointer) { return pointer; }
inline uint32_t opaque_here(uint32_t value) { return value; }
inline uint64_t multiply_add_wide(int32_t a, int32_t b, uint64_t c) { return uint64_t(int64_t(a) * b) + c; }
inline void compiler_fence() {}

} // namespace fdm::cuda::ptx
