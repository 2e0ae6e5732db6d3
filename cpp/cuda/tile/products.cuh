// SPDX-License-Identifier: BSD-3-Clause
// Products of tiles by mma.sync, and stores of rows of accumulators.
#pragma once

#include "ptx/matrix.cuh"
#include "smem_tile.cuh"

namespace fdm::cuda {

// The accumulators of a 16-row tile give each thread two rows, and two columns of each 8-column tile. Calls
// function(tile, which) for those of kTiles tiles; `which` is 0 or 1.
template <int kTiles, class Function> __device__ __forceinline__ void for_pairs(const Function &function) {
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile)
#pragma unroll
    for (int which = 0; which < 2; ++which) function(tile, which);
}

// Calls function with the indices of each of these accumulators.
template <int kTiles, class Function>
__device__ __forceinline__ void for_accumulators(const float (&)[kTiles][4], const Function &function) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) function(n, i);
}
template <int kLeftTiles, int kRightTiles, class Function>
__device__ __forceinline__ void for_accumulators(const float (&sums)[kLeftTiles][kRightTiles][4],
                                                 const Function &function) {
#pragma unroll
  for (int m = 0; m < kLeftTiles; ++m) for_accumulators(sums[m], [&](int n, int i) { function(m, n, i); });
}

// Calls multiply(d, n, a, b) for each step d of 16 columns of A and B and each pair n of 8-row tiles of B. `a` has
// the fragments of all tiles of A, `b` those of the pair.
template <int kHeadDim, int kLeftTiles, int kRightTiles, class Multiply>
__device__ __forceinline__ void for_fragments(uint32_t left, uint32_t right, const Multiply &multiply) {
  using Tile = SmemTile<kHeadDim>;
#pragma unroll
  for (int d = 0; d < kHeadDim; d += 16) {
    uint32_t a[kLeftTiles][4];
#pragma unroll
    for (int m = 0; m < kLeftTiles; ++m) ptx::ldmatrix(a[m], Tile::fragment_address(left, 16 * m, d));
#pragma unroll
    for (int n = 0; n < kRightTiles; n += 2) {
      uint32_t b[4];
      ptx::ldmatrix(b, Tile::fragment_address(right, 8 * n, d));
      multiply(d, n, a, b);
    }
  }
}

// sums += A B', both in shared memory, summed over kHeadDim columns. `left` is SmemTile::left of the first row of A,
// `right` SmemTile::right_rows of B.
template <class Element, int kHeadDim, int kLeftTiles, int kRightTiles>
__device__ __forceinline__ void gemm_ss(float (&sums)[kLeftTiles][kRightTiles][4], uint32_t left, uint32_t right) {
  const auto multiply = [&](int, int n, const uint32_t (&a)[kLeftTiles][4], const uint32_t (&b)[4]) {
#pragma unroll
    for (int m = 0; m < kLeftTiles; ++m) {
      ptx::mma<Element>(sums[m][n], a[m], b[0], b[1]);
      ptx::mma<Element>(sums[m][n + 1], a[m], b[2], b[3]);
    }
  };
  for_fragments<kHeadDim, kLeftTiles, kRightTiles>(left, right, multiply);
}

// A left operand in shared memory. With kInRegisters, registers hold its fragments, loaded once.
template <class Element, int kHeadDim, int kLeftTiles, bool kInRegisters> struct LeftOperand {
  using Tile = SmemTile<kHeadDim>;
  uint32_t left; // SmemTile::left of its first row
  uint32_t fragments[kInRegisters ? kLeftTiles : 1][kInRegisters ? kHeadDim / 16 : 1][4];

  __device__ __forceinline__ void load() {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int m = 0; m < kLeftTiles; ++m)
#pragma unroll
        for (int d = 0; d < kHeadDim / 16; ++d)
          ptx::ldmatrix(fragments[m][d], Tile::fragment_address(left, 16 * m, 16 * d));
    }
  }
  // sums += this times the transposed right operand; `right` is SmemTile::right_rows.
  template <int kRightTiles>
  __device__ __forceinline__ void multiply(float (&sums)[kLeftTiles][kRightTiles][4], uint32_t right) const {
    if constexpr (kInRegisters) {
#pragma unroll
      for (int d = 0; d < kHeadDim / 16; ++d)
#pragma unroll
        for (int n = 0; n < kRightTiles; n += 2) {
          uint32_t b[4];
          ptx::ldmatrix(b, Tile::fragment_address(right, 8 * n, 16 * d));
#pragma unroll
          for (int m = 0; m < kLeftTiles; ++m) {
            ptx::mma<Element>(sums[m][n], fragments[m][d], b[0], b[1]);
            ptx::mma<Element>(sums[m][n + 1], fragments[m][d], b[2], b[3]);
          }
        }
    } else {
      gemm_ss<Element, kHeadDim>(sums, left, right);
    }
  }
};

// sums = A B' + initial values of the columns. first(n) has those of this thread's two columns of tile n, twice.
template <class Element, int kHeadDim, int kLeftTiles, int kRightTiles, class First>
__device__ __forceinline__ void gemm_ss_from(float (&sums)[kLeftTiles][kRightTiles][4], uint32_t left, uint32_t right,
                                             const First &first) {
  const auto multiply = [&](int d, int n, const uint32_t (&a)[kLeftTiles][4], const uint32_t (&b)[4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float4 begin = d == 0 ? first(n + i) : float4{};
#pragma unroll
      for (int m = 0; m < kLeftTiles; ++m) {
        if (d == 0)
          ptx::mma_from<Element>(sums[m][n + i], begin, a[m], b[2 * i], b[2 * i + 1]);
        else
          ptx::mma<Element>(sums[m][n + i], a[m], b[2 * i], b[2 * i + 1]);
      }
    }
  };
  for_fragments<kHeadDim, kLeftTiles, kRightTiles>(left, right, multiply);
}

// sums += A B, summed over kDepth rows of B in shared memory. load_left(a, k) loads the fragments of 16 columns of A
// from k on. right(k, d) is this thread's ldmatrix address of B from row k on, for the tiles d and d + 1 of sums.
template <class Element, int kDepth, int kLeftTiles, int kRightTiles, class Left, class Right>
__device__ __forceinline__ void gemm_columns_at(float (&sums)[kLeftTiles][kRightTiles][4], const Right &right,
                                                const Left &load_left) {
#pragma unroll
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t a[kLeftTiles][4];
    load_left(a, k);
#pragma unroll
    for (int d = 0; d < kRightTiles; d += 2) {
      uint32_t b[4];
      ptx::ldmatrix_trans(b, right(k, d));
#pragma unroll
      for (int m = 0; m < kLeftTiles; ++m) {
        ptx::mma<Element>(sums[m][d], a[m], b[0], b[1]);
        ptx::mma<Element>(sums[m][d + 1], a[m], b[2], b[3]);
      }
    }
  }
}

// The same, with pairs of tiles of sums kColumnStep columns apart. `right` is SmemTile::right_columns of B.
template <class Element, class RightTile, int kDepth, int kColumnStep = 16, int kLeftTiles, int kRightTiles, class Left>
__device__ __forceinline__ void gemm_columns(float (&sums)[kLeftTiles][kRightTiles][4], uint32_t right,
                                             const Left &load_left) {
  gemm_columns_at<Element, kDepth>(
      sums, [&](int k, int d) { return RightTile::fragment_address(right, k, d / 2 * kColumnStep); }, load_left);
}

// The same, with the accumulators of an earlier product as A, rounded to Element. B has kHeadDim columns.
template <class Element, int kHeadDim, int kLeftTiles, int kDepthTiles>
__device__ __forceinline__ void gemm_rs(float (&sums)[kLeftTiles][kHeadDim / 8][4],
                                        const float (&left)[kLeftTiles][kDepthTiles][4], uint32_t right) {
  gemm_columns<Element, SmemTile<kHeadDim>, 8 * kDepthTiles>(sums, right, [&](uint32_t (&a)[kLeftTiles][4], int k) {
#pragma unroll
    for (int m = 0; m < kLeftTiles; ++m) {
      const float (&low)[4] = left[m][k / 8], (&high)[4] = left[m][k / 8 + 1];
      a[m][0] = ptx::pack<Element>(low[0], low[1]);
      a[m][1] = ptx::pack<Element>(low[2], low[3]);
      a[m][2] = ptx::pack<Element>(high[0], high[1]);
      a[m][3] = ptx::pack<Element>(high[2], high[3]);
    }
  });
}

template <int kLeftTiles, int kRightTiles>
__device__ __forceinline__ void clear(float (&sums)[kLeftTiles][kRightTiles][4]) {
#pragma unroll
  for (int m = 0; m < kLeftTiles; ++m)
#pragma unroll
    for (int n = 0; n < kRightTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
}

// The row, 0 to 15, of this thread's accumulators in a 16-row tile; `half` is 0 or 1.
__device__ __forceinline__ int accumulator_row(int half) { return threadIdx.x % 32 / 4 + 8 * half; }
// The first of this thread's two columns in an 8-column tile.
__device__ __forceinline__ int accumulator_column() { return 2 * (threadIdx.x % 4); }

// The rest of a float32 that is rounded to 16 bits: the difference of their float32 bits. Its unit is 2^-8 of a unit
// in the last place of a normal rounded number. For subnormal numbers it saturates at the range of a byte. Adding it
// makes no finite number infinite, and NaN stays NaN.
template <class Element> constexpr int kRestShift = std::is_same_v<Element, __half> ? 5 : 8;
template <class Element> __device__ __forceinline__ int32_t rest_of(float x, float rounded) {
  constexpr int kShift = kRestShift<Element>;
  const auto difference = static_cast<int32_t>(__float_as_uint(x) - __float_as_uint(rounded));
  return min(max((difference + (1 << (kShift - 1))) >> kShift, -128), 127);
}
template <class Element> __device__ __forceinline__ float with_rest(float rounded, int8_t rest) {
  return __int_as_float(__float_as_int(rounded) + rest * (1 << kRestShift<Element>));
}

// The rests of a pair, one in the low byte of each half of the word. join_rests() makes one word of two pairs.
template <class Element> __device__ __forceinline__ uint32_t pack_rests(float low, float high) {
  float packed_low, packed_high;
  ptx::unpack<Element>(ptx::pack<Element>(low, high), packed_low, packed_high);
  return (rest_of<Element>(low, packed_low) & 0xffff) | rest_of<Element>(high, packed_high) << 16;
}
__device__ __forceinline__ uint32_t join_rests(uint32_t first, uint32_t second) {
  return __byte_perm(first, second, 0x6420);
}

// Packs pairs of accumulators to 32 bits and stores them in a tile of 16-bit elements, from a row and a column on.
template <class Tile, int kLeftTiles, int kRightTiles, class Pack>
__device__ __forceinline__ void store_packed(const float (&sums)[kLeftTiles][kRightTiles][4], uint32_t base, int row,
                                             int column, const Pack &pack) {
#pragma unroll
  for (int m = 0; m < kLeftTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kRightTiles; ++n)
        ptx::store_shared(Tile::chunk_address(base, row + 16 * m + accumulator_row(half), column / 8 + n) +
                              2 * accumulator_column(),
                          pack(sums[m][n][2 * half], sums[m][n][2 * half + 1]));
}

// Rounds accumulators to Element and stores them in a tile, from a row and a column on.
template <class Element, class Tile, int kLeftTiles, int kRightTiles>
__device__ __forceinline__ void store_accumulators(const float (&sums)[kLeftTiles][kRightTiles][4], uint32_t base,
                                                   int row, int column) {
  store_packed<Tile>(sums, base, row, column, [](float low, float high) { return ptx::pack<Element>(low, high); });
}

// The four lanes of a row each hold one word of four tiles. The transpose gives each lane the four words of one tile.
// All lanes of the warp call this: with a mask that is not constant, each quad executes its shuffles separately.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      uint32_t &low = words[i], &high = words[i + distance];
      const uint32_t received = __shfl_xor_sync(0xffffffffu, upper ? low : high, distance);
      (upper ? low : high) = received;
    }
  }
}

// ptx::pack for an Element, or for a dtype known at run time.
template <class Element> struct Packing {
  __device__ __forceinline__ uint32_t operator()(float low, float high) const { return ptx::pack<Element>(low, high); }
};
struct AnyPacking {
  bool is_half;

  __device__ __forceinline__ uint32_t operator()(float low, float high) const {
    return is_half ? ptx::pack<__half>(low, high) : ptx::pack<__nv_bfloat16>(low, high);
  }
  __device__ __forceinline__ void unpack(uint32_t pair, float &low, float &high) const {
    is_half ? ptx::unpack<__half>(pair, low, high) : ptx::unpack<__nv_bfloat16>(pair, low, high);
  }
};

// Writes this thread's part of a row of accumulators, times a factor, if the row exists; zeros if `blank`. All lanes
// of the warp call this together. `row` may point anywhere if the row does not exist.
template <class Element, int kDimTiles, class Pack = Packing<Element>>
__device__ __forceinline__ void write_row(Element *row, int64_t stride, int head_dim, const float (&sums)[kDimTiles][4],
                                          int half, float factor, bool exists, bool blank = false,
                                          const Pack &pack = {}) {
  static_assert(kDimTiles % 4 == 0);
  const auto pair = [&](int d) {
    const uint32_t both = pack(sums[d][2 * half] * factor, sums[d][2 * half + 1] * factor);
    return blank ? 0u : both;
  };
  const bool pairs = stride == 1 && reinterpret_cast<uintptr_t>(row) % 4 == 0;
  const bool vectors = stride == 1 && reinterpret_cast<uintptr_t>(row) % 16 == 0 && head_dim % 8 == 0;
  if (__all_sync(0xffffffffu, vectors || !exists)) {
#pragma unroll
    for (int d = 0; d < kDimTiles; d += 4) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pair(d + i);
      transpose_quad(words);
      const int column = 8 * (d + int(threadIdx.x) % 4);
      if (exists && column < head_dim)
        *reinterpret_cast<uint4 *>(row + column) = {words[0], words[1], words[2], words[3]};
    }
    return;
  }
  if (!exists) return;
  auto *halves = reinterpret_cast<uint16_t *>(row);
#pragma unroll
  for (int d = 0; d < kDimTiles; ++d) {
    const int column = 8 * d + accumulator_column();
    const uint32_t both = pair(d);
    if (pairs && column + 1 < head_dim) {
      *reinterpret_cast<uint32_t *>(row + column) = both;
    } else {
      if (column < head_dim) halves[column * stride] = uint16_t(both);
      if (column + 1 < head_dim) halves[(column + 1) * stride] = uint16_t(both >> 16);
    }
  }
}

// Loads an element of a tensor of any float dtype.
__device__ __forceinline__ float load_element(const fdm_tensor &t, int64_t offset) {
  if (t.dtype == FDM_FLOAT32) return static_cast<const float *>(t.data)[offset];
  if (t.dtype == FDM_FLOAT16) return __half2float(static_cast<const __half *>(t.data)[offset]);
  return __bfloat162float(static_cast<const __nv_bfloat16 *>(t.data)[offset]);
}

// Stores an element of a tensor of any float dtype.
__device__ __forceinline__ void store_element(const fdm_tensor &t, int64_t offset, float value) {
  if (t.dtype == FDM_FLOAT32)
    static_cast<float *>(t.data)[offset] = value;
  else if (t.dtype == FDM_FLOAT16)
    static_cast<__half *>(t.data)[offset] = __float2half_rn(value);
  else
    static_cast<__nv_bfloat16 *>(t.data)[offset] = __float2bfloat16_rn(value);
}

// Stores an element of out, and its rest if requested.
__device__ __forceinline__ void store_out(const fdm_forward_args &a, int64_t offset, float value) {
  store_element(a.out, offset, value);
  if (!present(a.out_rest)) return;
  const float rounded = load_element(a.out, offset);
  static_cast<uint8_t *>(a.out_rest.data)[offset] =
      a.out.dtype == FDM_FLOAT16 ? rest_of<__half>(value, rounded) : rest_of<__nv_bfloat16>(value, rounded);
}

} // namespace fdm::cuda
