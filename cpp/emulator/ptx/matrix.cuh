// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/matrix.cuh. Products are collectives of a warp, in which the last lane to arrive does the work of all.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>

#include "copy.cuh"

namespace fdm::cuda::ptx {

// Rounds two floats to Element and packs them, the first in the low half.
template <class Element> uint32_t pack(float low, float high) {
  using Format = typename Element::Format;
  return Format::store(low) | uint32_t(Format::store(high)) << 16;
}
// Unpacks a pair that pack() made.
template <class Element> void unpack(uint32_t pair, float &low, float &high) {
  using Format = typename Element::Format;
  low = Format::load(uint16_t(pair));
  high = Format::load(uint16_t(pair >> 16));
}

namespace emulated {

constexpr uint32_t kAllLanes = 0xffffffffu;

// Lane t passes the address of row t % 8 of matrix t / 8. It receives two neighbours of row t / 4 of each matrix, or
// of column t / 4 if the matrices are transposed.
template <bool kTransposed> void load_matrices(uint32_t (&m)[4], uint32_t address) {
  struct Own {
    uint32_t address, *words;
  } own{address, m};
  emulator::run_collective(kAllLanes, &own, [](void *const *lanes) {
    for (int lane = 0; lane < 32; ++lane)
      for (int matrix = 0; matrix < 4; ++matrix) {
        uint32_t word = 0;
        for (int i = 0; i < 2; ++i) {
          const int row = kTransposed ? 2 * (lane % 4) + i : lane / 4,
                    column = kTransposed ? lane / 4 : 2 * (lane % 4) + i;
          const uint32_t from = static_cast<Own *>(lanes[8 * matrix + row])->address;
          if (from % 16 != 0) emulator::fail("a row of ldmatrix is not aligned");
          word |= uint32_t(at<uint16_t>(from + 2 * column)) << 16 * i;
        }
        static_cast<Own *>(lanes[lane])->words[matrix] = word;
      }
  });
}

// sum = c + a b, with the register layout of mma.sync.m16n8k16.
template <class Element>
void multiply(float (&sum)[4], const float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  struct Own {
    float *sum;
    const float *c;
    const uint32_t *a;
    uint32_t b[2];
  } own{sum, c, a, {b0, b1}};
  emulator::run_collective(kAllLanes, &own, [](void *const *lanes) {
    float left[16][16], right[16][8], sums[16][8];
    const auto of = [&](int lane) -> const Own & { return *static_cast<Own *>(lanes[lane]); };
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, pair = 2 * (lane % 4);
      for (int i = 0; i < 4; ++i) {
        float *to = &left[row + i % 2 * 8][pair + i / 2 * 8];
        unpack<Element>(of(lane).a[i], to[0], to[1]);
        sums[row + i / 2 * 8][pair + i % 2] = of(lane).c[i];
      }
      for (int i = 0; i < 2; ++i)
        unpack<Element>(of(lane).b[i], right[pair + 8 * i][row], right[pair + 8 * i + 1][row]);
    }
    for (int m = 0; m < 16; ++m)
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 8; ++n) sums[m][n] += left[m][k] * right[k][n];
    for (int lane = 0; lane < 32; ++lane)
      for (int i = 0; i < 4; ++i) of(lane).sum[i] = sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
  });
}

} // namespace emulated

inline void ldmatrix(uint32_t (&m)[4], uint32_t address) { emulated::load_matrices<false>(m, address); }
inline void ldmatrix_trans(uint32_t (&m)[4], uint32_t address) { emulated::load_matrices<true>(m, address); }

template <class Element>
void mma_from(float (&sum)[4], const float4 &c, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const float begin[4] = {c.x, c.y, c.z, c.w};
  emulated::multiply<Element>(sum, begin, a, b0, b1);
}
template <class Element> void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  emulated::multiply<Element>(c, c, a, b0, b1);
}

// Lane t holds columns 2 (t % 4) and the next of row t / 4, before and after the transposition.
inline uint32_t transpose(uint32_t pair) {
  struct Own {
    uint32_t pair, transposed;
  } own{pair, 0};
  emulator::run_collective(emulated::kAllLanes, &own, [](void *const *lanes) {
    const auto element = [&](int row, int column) {
      return static_cast<Own *>(lanes[4 * row + column / 2])->pair >> column % 2 * 16 & 0xffff;
    };
    for (int lane = 0; lane < 32; ++lane) {
      const int row = lane / 4, column = 2 * (lane % 4);
      static_cast<Own *>(lanes[lane])->transposed = element(column, row) | element(column + 1, row) << 16;
    }
  });
  return own.transposed;
}

inline float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
inline float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

inline float max_or_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : fmaxf(x, y); }
inline float min_or_nan(float x, float y) { return std::isnan(x) || std::isnan(y) ? NAN : fminf(x, y); }

inline float exp2_approximate(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.0f : y;
}
inline float log2_approximate(float x) { return std::log2(x < 0x1p-126f && x > 0 ? 0.0f : x); }

} // namespace fdm::cuda::ptx
