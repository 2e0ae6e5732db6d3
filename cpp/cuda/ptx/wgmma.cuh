// SPDX-License-Identifier: BSD-3-Clause
// The warpgroup-wide multiply-add (PTX ISA: wgmma; sm_90a). It is asynchronous, and its right operand is in shared
// memory.
//
// An accumulator has 64 rows and kN columns. Each of the four warps holds 16 rows in the layout of mma.sync
// (ptx/matrix.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fdm::cuda::ptx {

// The descriptor of an operand in shared memory: swizzled tiles of eight rows of 128 bytes, `stride` bytes apart (PTX
// ISA, "matrix descriptor"). If the product sums over its columns, a row has 64 elements. If it sums over its rows
// (transposed), a 128-byte row holds 64 columns, and the next 64 columns are `leading` bytes further.
__device__ __forceinline__ uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return kSwizzle128 | uint64_t(stride >> 4) << 32 | uint64_t(leading >> 4) << 16 | uint64_t((address & 0x3ffff) >> 4);
}

// The same without a swizzle, for a product that sums over columns: eight 16-byte rows are contiguous, the next eight
// rows are `stride` bytes further, and the next eight columns `leading` bytes.
__device__ __forceinline__ uint64_t unswizzled_matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t(stride >> 4) << 32 | uint64_t(leading >> 4) << 16 | uint64_t((address & 0x3ffff) >> 4);
}

// Required before the first product, and after registers that products read have been written.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Keeps the compiler from moving uses of registers that wgmma writes or reads across this point.
template <int kTiles> __device__ __forceinline__ void warpgroup_fence_operand(float (&registers)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(registers[n][i])::"memory");
}
template <int kTiles> __device__ __forceinline__ void warpgroup_fence_operand(uint32_t (&registers)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(registers[n][i])::"memory");
}

// Waits until at most kPending of the newest groups are incomplete. `operands` are of the other groups; see
// warpgroup_fence_operand(). The compiler does not merge waits with different marks.
template <int kPending, int kMark = 0, class... Operands>
__device__ __forceinline__ void warpgroup_wait(Operands &...operands) {
  asm volatile("wgmma.wait_group.sync.aligned %0; // %1\n" ::"n"(kPending), "n"(kMark) : "memory");
  (warpgroup_fence_operand(operands), ...);
}

// The instruction text varies with the number of accumulators, the type, and the place of the left operand.
#define FDM_ACCUMULATORS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define FDM_ACCUMULATORS_32                                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "               \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define FDM_ACCUMULATORS_64                                                                                            \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, "               \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, "               \
  "%42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "               \
  "%62, %63"

#define FDM_TILE(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define FDM_TILES_16 FDM_TILE(0), FDM_TILE(1), FDM_TILE(2), FDM_TILE(3)
#define FDM_TILES_32 FDM_TILES_16, FDM_TILE(4), FDM_TILE(5), FDM_TILE(6), FDM_TILE(7)
#define FDM_TILES_64                                                                                                   \
  FDM_TILES_32, FDM_TILE(8), FDM_TILE(9), FDM_TILE(10), FDM_TILE(11), FDM_TILE(12), FDM_TILE(13), FDM_TILE(14),        \
      FDM_TILE(15)

#define FDM_WGMMA_SS(N, COUNT, A, B, ACCUMULATE, LEFT, RIGHT, TYPE)                                                    \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #ACCUMULATE ", 0;\n"                             \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FDM_ACCUMULATORS_##COUNT           \
               "}, "                                                                                                   \
               "%" #A ", %" #B ", accumulate, 1, 1, %" #LEFT ", %" #RIGHT ";\n}\n"                                     \
               : FDM_TILES_##COUNT                                                                                     \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(kLeft)), "n"(int(kRight)))

#define FDM_WGMMA_RS(N, COUNT, A0, A1, A2, A3, B, ACCUMULATE, TRANSPOSED, TYPE)                                        \
  asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, %" #ACCUMULATE ", 0;\n"                             \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" FDM_ACCUMULATORS_##COUNT           \
               "}, "                                                                                                   \
               "{%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #B ", accumulate, 1, 1, %" #TRANSPOSED ";\n}\n"           \
               : FDM_TILES_##COUNT                                                                                     \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(kRight)))

// The majorness of an operand in shared memory: contiguous along k, or along its other dimension (PTX ISA,
// asynchronous warpgroup level majorness).
enum class Major { k, mn };

// c = A B', or with `accumulate` c += A B'. A is 64 x 16 and B kN x 16, both given by descriptors.
template <class Element, Major kLeft, Major kRight, int kTiles>
__device__ __forceinline__ void wgmma_ss(float (&c)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
  constexpr bool kHalf = __is_same(Element, __half);
  static_assert(kTiles == 4 || kTiles == 8 || kTiles == 16, "no such instruction here");
  if constexpr (kTiles == 4 && kHalf) FDM_WGMMA_SS(32, 16, 16, 17, 18, 19, 20, "f16");
  if constexpr (kTiles == 4 && !kHalf) FDM_WGMMA_SS(32, 16, 16, 17, 18, 19, 20, "bf16");
  if constexpr (kTiles == 8 && kHalf) FDM_WGMMA_SS(64, 32, 32, 33, 34, 35, 36, "f16");
  if constexpr (kTiles == 8 && !kHalf) FDM_WGMMA_SS(64, 32, 32, 33, 34, 35, 36, "bf16");
  if constexpr (kTiles == 16 && kHalf) FDM_WGMMA_SS(128, 64, 64, 65, 66, 67, 68, "f16");
  if constexpr (kTiles == 16 && !kHalf) FDM_WGMMA_SS(128, 64, 64, 65, 66, 67, 68, "bf16");
}

// The same with A in registers, in the layout of mma.sync.
template <class Element, Major kRight, int kTiles>
__device__ __forceinline__ void wgmma_rs(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  constexpr bool kHalf = __is_same(Element, __half);
  static_assert(kTiles == 4 || kTiles == 8 || kTiles == 16, "no such instruction here");
  if constexpr (kTiles == 4 && kHalf) FDM_WGMMA_RS(32, 16, 16, 17, 18, 19, 20, 21, 22, "f16");
  if constexpr (kTiles == 4 && !kHalf) FDM_WGMMA_RS(32, 16, 16, 17, 18, 19, 20, 21, 22, "bf16");
  if constexpr (kTiles == 8 && kHalf) FDM_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37, 38, "f16");
  if constexpr (kTiles == 8 && !kHalf) FDM_WGMMA_RS(64, 32, 32, 33, 34, 35, 36, 37, 38, "bf16");
  if constexpr (kTiles == 16 && kHalf) FDM_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69, 70, "f16");
  if constexpr (kTiles == 16 && !kHalf) FDM_WGMMA_RS(128, 64, 64, 65, 66, 67, 68, 69, 70, "bf16");
}

#undef FDM_WGMMA_RS
#undef FDM_WGMMA_SS
#undef FDM_TILES_64
#undef FDM_TILES_32
#undef FDM_TILES_16
#undef FDM_TILE
#undef FDM_ACCUMULATORS_64
#undef FDM_ACCUMULATORS_32
#undef FDM_ACCUMULATORS_16

} // namespace fdm::cuda::ptx
