// SPDX-License-Identifier: BSD-3-Clause
// cuda/ptx/wgmma.cuh. Each warp multiplies its own 16 rows when it waits for the products. Until then the sums are
// unchanged, and the operands in shared memory must stay.
#pragma once

#include <array>
#include <cstdint>

#include "matrix.cuh"
#include "tensor.cuh"

namespace fdm::cuda::ptx {

inline uint64_t unswizzled_matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  return uint64_t(stride >> 4) << 32 | uint64_t(leading >> 4) << 16 | uint64_t((address & 0x3ffff) >> 4);
}
inline uint64_t matrix_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return kSwizzle128 | unswizzled_matrix_descriptor(address, leading, stride);
}

namespace emulated {

// An operand in shared memory (PTX ISA, "matrix descriptor"): k is the index of summation, n the other index.
struct Operand {
  uint32_t address, leading, stride;
  bool swizzled, transposed;

  Operand(uint64_t descriptor, bool other_way)
      : address(uint32_t(descriptor & 0x3fff) << 4), leading(uint32_t(descriptor >> 16 & 0x3fff) << 4),
        stride(uint32_t(descriptor >> 32 & 0x3fff) << 4), swizzled(descriptor >> 62 == 1), transposed(other_way) {}

  uint16_t element(uint32_t n, uint32_t k) const {
    if (!swizzled) return at<uint16_t>(address + n / 8 * stride + n % 8 * 16 + k / 8 * leading + k % 8 * 2);
    if (transposed)
      return at<uint16_t>(swizzle(address + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2));
    return at<uint16_t>(swizzle(address + n / 8 * stride + n % 8 * 128 + k * 2));
  }
};

// Multiplies the rows of a warp. left(row, k) is an element of A.
template <class Element, int kTiles, class Left>
void multiply_rows(float *const (&sums)[32], const Left &left, const Operand &right, bool accumulate) {
  using Format = typename Element::Format;
  float c[16][8 * kTiles];
  const auto for_sums = [&](const auto &visit) {
    for (int lane = 0; lane < 32; ++lane)
      for (int n = 0; n < kTiles; ++n)
        for (int i = 0; i < 4; ++i)
          visit(sums[lane][4 * n + i], c[lane / 4 + i / 2 * 8][8 * n + 2 * (lane % 4) + i % 2]);
  };
  for_sums([&](float &own, float &sum) { sum = accumulate ? own : 0.0f; });
  for (int k = 0; k < 16; ++k) {
    float b[8 * kTiles];
    for (int n = 0; n < 8 * kTiles; ++n) b[n] = Format::load(right.element(uint32_t(n), uint32_t(k)));
    for (int m = 0; m < 16; ++m) {
      const float a = Format::load(left(m, k));
      for (int n = 0; n < 8 * kTiles; ++n) c[m][n] += a * b[n];
    }
  }
  for_sums([&](float &own, float &sum) { own = sum; });
}

template <int kTiles> struct Product {
  float *sums;
  std::array<uint32_t, 4> a;
  uint64_t left, right;
  bool accumulate;
  uint32_t first_row = threadIdx.x / 32 % 4 * 16; // of the warp, within its warpgroup
};

// The lanes pass their sums and operands, and the product is deferred.
template <int kTiles, class Run> void start(Product<kTiles> own, Run) {
  emulator::run_collective(kAllLanes, &own, [](void *const *lanes) {
    std::array<Product<kTiles>, 32> all;
    for (int lane = 0; lane < 32; ++lane) all[lane] = *static_cast<Product<kTiles> *>(lanes[lane]);
    emulator::defer(emulator::Queue::products, [all] {
      float *sums[32];
      for (int lane = 0; lane < 32; ++lane) sums[lane] = all[lane].sums;
      Run{}(all, sums);
    });
  });
}

inline void commit_products() {
  emulator::run_collective(kAllLanes, nullptr, [](void *const *) { emulator::commit(emulator::Queue::products); });
}

} // namespace emulated

inline void warpgroup_arrive() { __syncwarp(); }
inline void warpgroup_commit_batch() { emulated::commit_products(); }
template <int kTiles> void warpgroup_fence_operand(float (&)[kTiles][4]) {}
template <int kTiles> void warpgroup_fence_operand(uint32_t (&)[kTiles][4]) {}

template <int kPending, int kMark = 0, class... Operands> void warpgroup_wait(Operands &...) {
  emulator::run_collective(emulated::kAllLanes, nullptr,
                           [](void *const *) { emulator::complete(emulator::Queue::products, kPending); });
}

enum class Major { k, mn };

template <class Element, Major kLeft, Major kRight, int kTiles>
void wgmma_ss(float (&c)[kTiles][4], uint64_t a, uint64_t b, bool accumulate) {
  const auto run = [](const auto &lanes, float *const(&sums)[32]) {
    const emulated::Operand left(lanes[0].left, kLeft == Major::mn), right(lanes[0].right, kRight == Major::mn);
    const auto element = [&](int row, int k) { return left.element(lanes[0].first_row + uint32_t(row), uint32_t(k)); };
    emulated::multiply_rows<Element, kTiles>(sums, element, right, lanes[0].accumulate);
  };
  emulated::start<kTiles>({c[0], {}, a, b, accumulate}, run);
}

template <class Element, Major kRight, int kTiles>
void wgmma_rs(float (&c)[kTiles][4], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  const auto run = [](const auto &lanes, float *const(&sums)[32]) {
    const emulated::Operand right(lanes[0].right, kRight == Major::mn);
    const auto element = [&](int row, int k) {
      const uint32_t pair = lanes[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2];
      return uint16_t(k % 2 ? pair >> 16 : pair);
    };
    emulated::multiply_rows<Element, kTiles>(sums, element, right, lanes[0].accumulate);
  };
  emulated::start<kTiles>({c[0], {a[0], a[1], a[2], a[3]}, 0, b, accumulate}, run);
}

} // namespace fdm::cuda::ptx
