// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/tensor.cuh. A box arrives at random, or when all threads wait.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "copy.cuh"

namespace fdm::cuda::ptx {

namespace emulated {

// The 128-byte swizzle: bits 4 to 6 of an address are XORed with bits 7 to 9.
inline uint32_t swizzle(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

} // namespace emulated

inline void expect_bytes(uint64_t &barrier, uint32_t bytes) { emulator::expect_bytes(barrier, bytes); }

inline void copy_box(uint32_t shared, const CUtensorMap &map, int32_t x, int32_t y, int32_t z, int32_t w,
                     uint64_t &barrier) {
  if (shared % 1024 != 0) emulator::fail("a box is not aligned to its swizzle");
  emulator::defer([=, &barrier] {
    const int64_t first[4] = {x, y, z, w};
    uint32_t row = 0;
    for (uint32_t l = 0; l < map.box[3]; ++l)
      for (uint32_t k = 0; k < map.box[2]; ++k)
        for (uint32_t j = 0; j < map.box[1]; ++j, ++row)
          for (uint32_t i = 0; i < map.box[0]; ++i) {
            const int64_t at[4] = {first[0] + i, first[1] + j, first[2] + k, first[3] + l};
            bool inside = true;
            for (int d = 0; d < 4; ++d) inside &= at[d] >= 0 && at[d] < int64_t(map.sizes[d]);
            uint16_t element = 0;
            if (inside) {
              const char *from = map.data + 2 * at[0];
              for (int d = 0; d < 3; ++d) from += int64_t(map.strides[d]) * at[d + 1];
              std::memcpy(&element, from, sizeof element);
            }
            emulated::at<uint16_t>(emulated::swizzle(shared + row * map.box[0] * 2 + 2 * i)) = element;
          }
    emulator::complete_bytes(barrier, row * map.box[0] * 2);
  });
}

} // namespace fdm::cuda::ptx
