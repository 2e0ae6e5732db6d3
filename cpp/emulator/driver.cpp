// SPDX-License-Identifier: BSD-3-Clause
#include <cuda.h>

#include <cstring>

// The conditions of the function's description in the CUDA driver API.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *data,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!fdm::emulator::has_context) return CUDA_ERROR_INVALID_CONTEXT;
  constexpr cuuint32_t kRank = 4;
  bool fits = rank == kRank && reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * 2 <= 128;
  for (cuuint32_t d = 0; d < kRank; ++d)
    fits &= sizes[d] > 0 && sizes[d] <= uint64_t(1) << 32 && box[d] > 0 && box[d] <= 256 && steps[d] == 1;
  for (cuuint32_t d = 0; d + 1 < kRank; ++d) fits &= strides[d] % 16 == 0 && strides[d] < uint64_t(1) << 40;
  if (!fits) return CUDA_ERROR_INVALID_VALUE;
  map->data = static_cast<const char *>(data);
  std::memcpy(map->sizes, sizes, sizeof map->sizes);
  std::memcpy(map->strides, strides, sizeof map->strides);
  std::memcpy(map->box, box, sizeof map->box);
  return CUDA_SUCCESS;
}

void *fdm::emulator::driver_function(const char *name) {
  return std::strcmp(name, "cuTensorMapEncodeTiled") == 0 ? reinterpret_cast<void *>(&cuTensorMapEncodeTiled) : nullptr;
}
