// SPDX-License-Identifier: BSD-3-Clause
// Matrix fragments and the warp-wide multiply-add (PTX ISA: ldmatrix, mma.sync.m16n8k16; sm_80 and later).
//
// In a 16 x 8 accumulator, thread t holds columns 2 (t % 4) and 2 (t % 4) + 1 of rows t / 4 (c[0], c[1]) and t / 4 +
// 8 (c[2], c[3]).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fdm::cuda::ptx {

// Loads four 8 x 8 matrices of 16-bit elements; thread t gives the address of row t % 8 of matrix t / 8.
__device__ __forceinline__ void ldmatrix(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_trans(uint32_t (&m)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(address)
               : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements. Thread t holds columns 2 (t % 4) and 2 (t % 4) + 1 of row t / 4.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// sum = c + a b; a is 16 x 16, b 16 x 8, both of Element; c float32.
template <class Element>
__device__ __forceinline__ void mma_from(float (&sum)[4], const float4 &c, const uint32_t (&a)[4], uint32_t b0,
                                         uint32_t b1) {
  if constexpr (__is_same(Element, __half)) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %11, %12, %13};\n"
                 : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c.x), "f"(c.y), "f"(c.z),
                   "f"(c.w));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%10, %11, %12, %13};\n"
                 : "=f"(sum[0]), "=f"(sum[1]), "=f"(sum[2]), "=f"(sum[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c.x), "f"(c.y), "f"(c.z),
                   "f"(c.w));
  }
}

// c += a b; a is 16 x 16, b 16 x 8, both of Element; c float32.
template <class Element>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  mma_from<Element>(c, make_float4(c[0], c[1], c[2], c[3]), a, b0, b1);
}

// Rounds two floats to Element and packs them, the first in the low half.
template <class Element> __device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t bits;
  if constexpr (__is_same(Element, __half)) {
    const __half2 pair = __floats2half2_rn(low, high);
    bits = reinterpret_cast<const uint32_t &>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    bits = reinterpret_cast<const uint32_t &>(pair);
  }
  return bits;
}

// Splits a pair that pack() made.
template <class Element> __device__ __forceinline__ void unpack(uint32_t pair, float &low, float &high) {
  if constexpr (__is_same(Element, __half)) {
    const float2 both = __half22float2(reinterpret_cast<const __half2 &>(pair));
    low = both.x;
    high = both.y;
  } else {
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xffff0000u);
  }
}

// Reduce over the four threads that hold a row of an accumulator.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Return NaN if an operand is NaN (PTX ISA: max and min; sm_80 and later). fmaxf and fminf return the other operand.
__device__ __forceinline__ float max_or_nan(float x, float y) {
  float z;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}
__device__ __forceinline__ float min_or_nan(float x, float y) {
  float z;
  asm("min.NaN.f32 %0, %1, %2;\n" : "=f"(z) : "f"(x), "f"(y));
  return z;
}

__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

// log2 x. The absolute error is at most 2^-22 near 1; elsewhere, the error is one unit in the last place (PTX ISA,
// lg2.approx).
__device__ __forceinline__ float log2_approximate(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

} // namespace fdm::cuda::ptx
