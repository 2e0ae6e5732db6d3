// SPDX-License-Identifier: BSD-3-Clause
// The part of the CUDA driver API that the packs use: tensor maps for TMA box copies.
#pragma once

#include <cstdint>

#include "cuda_runtime_api.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1, CUDA_ERROR_INVALID_CONTEXT = 201 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_128B = 3 };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_L2_256B = 3 };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

// Sizes, strides in bytes of all dimensions but the first, and the box, with the innermost dimension first.
struct alignas(64) CUtensorMap {
  const char *data;
  uint64_t sizes[4], strides[3];
  uint32_t box[4];
};

extern "C" CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *data,
                                           const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                           const cuuint32_t *steps, CUtensorMapInterleave interleave,
                                           CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                           CUtensorMapFloatOOBfill fill);
