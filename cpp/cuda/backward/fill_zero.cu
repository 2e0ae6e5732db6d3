// SPDX-License-Identifier: BSD-3-Clause
// Fills a tensor of any strides with zeros: gradients of keys that nobody keeps, and of rows that belong to no
// sequence.
#include <cuda_runtime.h>

#include "../host/launch.cuh"
#include "../tile/copy_rows.cuh"
#include "backward.h"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;

// Each thread fills kWidth elements of the last dimension.
template <class Element, int kWidth>
__global__ void __launch_bounds__(kThreads) fill_zero(const __grid_constant__ fdm_tensor t, int64_t count) {
  int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (number >= count) return;
  const int64_t chunks = t.shape[3] / kWidth, d = number % chunks * kWidth;
  number /= chunks;
  const int64_t c = number % t.shape[2], b = number / t.shape[2] % t.shape[1], a = number / t.shape[2] / t.shape[1];
  auto *element =
      static_cast<Element *>(t.data) + a * t.stride[0] + b * t.stride[1] + c * t.stride[2] + d * t.stride[3];
  if constexpr (sizeof(Element) * kWidth == 16)
    *reinterpret_cast<uint4 *>(element) = uint4{};
  else
    *element = Element{};
}

template <class Element, int kWidth> cudaError_t fill(const fdm_tensor &t, cudaStream_t stream) {
  const int64_t count = t.shape[0] * t.shape[1] * t.shape[2] * (t.shape[3] / kWidth);
  return launch(fill_zero<Element, kWidth>, ceil_div(count, kThreads), kThreads, 0, stream, t, count);
}

} // namespace

cudaError_t launch_fill_zero(const fdm_tensor &t, cudaStream_t stream) {
  if (!present(t)) return cudaSuccess;
  if (t.dtype == FDM_FLOAT32) return fill<uint32_t, 1>(t, stream);
  return rows_are_aligned(t, t.shape[3]) ? fill<uint16_t, 8>(t, stream) : fill<uint16_t, 1>(t, stream);
}

} // namespace fdm::cuda
