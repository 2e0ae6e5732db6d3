// SPDX-License-Identifier: BSD-3-Clause
// Tensor maps of row tensors for the TMA copies of ptx/tensor.cuh. The driver encodes them.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../../indexing.h"

namespace fdm::cuda {

using EncodeTensorMap = decltype(&cuTensorMapEncodeTiled);

// Packs are not linked with the driver. Null: the driver does not have the function.
inline EncodeTensorMap find_tensor_map_encoder() {
  void *function = nullptr;
  cudaDriverEntryPointQueryResult found;
  constexpr const char *kName = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(kName, &function, 12000, cudaEnableDefault, &found);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(kName, &function, cudaEnableDefault, &found);
#endif
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<EncodeTensorMap>(function)
                                                                      : nullptr;
}

// Encodes a (B, rows, heads, D) tensor of 16-bit elements: boxes of 64 columns and `rows` rows of a head, swizzled as
// in SmemTile. Returns false if the hardware does not support the strides, or if there are no rows, which it does not
// support either.
inline bool make_row_map(const fdm_tensor &t, int64_t head_dim, int rows, CUtensorMap *map) {
  if (t.shape[0] == 0 || t.shape[1] == 0 || t.shape[2] == 0) return false;
  static const EncodeTensorMap encode = find_tensor_map_encoder();
  if (!encode) return false;
  const cuuint64_t sizes[4] = {cuuint64_t(head_dim), cuuint64_t(t.shape[1]), cuuint64_t(t.shape[2]),
                               cuuint64_t(t.shape[0])};
  const auto stride = [&](int d) { return cuuint64_t(t.shape[d] > 1 ? 2 * t.stride[d] : 16); };
  const cuuint64_t strides[3] = {stride(1), stride(2), stride(0)};
  const cuuint32_t box[4] = {64, cuuint32_t(rows), 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto make = [&] {
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 4, t.data, sizes, strides, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  };
  if (make()) return true;
  // The driver also refuses a thread without a context. A thread has no context if it has not launched a kernel and
  // its memory came from a cache. cudaSetDevice creates one.
  int device;
  return cudaGetDevice(&device) == cudaSuccess && cudaSetDevice(device) == cudaSuccess && make();
}

} // namespace fdm::cuda
