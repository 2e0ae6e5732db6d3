// SPDX-License-Identifier: BSD-3-Clause
// The CUDA C++ keywords and functions that the kernels use, for a C++ compiler (CUDA C++ programming guide).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "machine.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// A thread block runs on one OS thread.
#define __shared__ thread_local

namespace fdm::emulator {

// A CUDA built-in variable whose name is also a member name elsewhere.
template <const Index3 &(*kGet)(), uint32_t Index3::*kMember> struct Coordinate {
  operator uint32_t() const { return kGet().*kMember; }
};
template <const Index3 &(*kGet)()> struct Coordinates {
  Coordinate<kGet, &Index3::x> x;
  Coordinate<kGet, &Index3::y> y;
  Coordinate<kGet, &Index3::z> z;
};

} // namespace fdm::emulator

// Their coordinates have CUDA's unsigned type, which makes `condition ? -1 : blockIdx.x` a large number.
#define threadIdx (fdm::emulator::thread_index())
#define blockIdx (fdm::emulator::block_index())
inline constexpr fdm::emulator::Coordinates<fdm::emulator::block_size> blockDim;
inline constexpr fdm::emulator::Coordinates<fdm::emulator::grid_size> gridDim;

using std::isnan;

struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

template <class T> T max(T x, T y) { return x > y ? x : y; }
template <class T> T min(T x, T y) { return x < y ? x : y; }

inline uint32_t __float_as_uint(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int_as_float(int bits) { return __uint_as_float(uint32_t(bits)); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __log2f(float x) { return std::log2(x); }

inline int __popc(uint32_t x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline uint32_t __byte_perm(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t bytes = uint64_t(y) << 32 | x;
  uint32_t result = 0;
  for (int n = 0; n < 4; ++n) {
    const uint32_t choice = selector >> 4 * n & 0xf;
    uint32_t byte = uint32_t(bytes >> 8 * (choice & 7)) & 0xff;
    if (choice & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << 8 * n;
  }
  return result;
}
template <class T> T __ldg(const T *p) { return *p; }
template <class T> T __ldcs(const T *p) { return *p; }
inline void __nanosleep(unsigned) { fdm::emulator::yield(); }

inline void __syncthreads(const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
  fdm::emulator::sync_block(0, {file, line});
}
inline int __syncthreads_or(int value, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
  return fdm::emulator::sync_block(value, {file, line}) & 1;
}
inline int __syncthreads_and(int value, const char *file = __builtin_FILE(), int line = __builtin_LINE()) {
  return fdm::emulator::sync_block(value, {file, line}) >> 1;
}

namespace fdm::emulator {

// A collective of the lanes of a mask. Each lane passes a value and an argument, and receives
//   Combine{}(mask, lane, argument, value_of)
// for its own lane. value_of(n) is the value of lane n of the mask, or the lane's own value for other n.
template <class T, class Combine> auto combine(uint32_t mask, T value, int argument, Combine) {
  struct Own;
  using Result = decltype(Combine{}(0u, 0, 0, [](int) { return T{}; }));
  struct Own {
    T value;
    int argument;
    uint32_t mask;
    Result result;
  } own{value, argument, mask, {}};
  run_collective(mask, &own, [](void *const *lanes) {
    for (int lane = 0; lane < 32; ++lane) {
      auto *to = static_cast<Own *>(lanes[lane]);
      if (!to) continue;
      const auto value_of = [&](int from) {
        return from >= 0 && from < 32 && lanes[from] ? static_cast<Own *>(lanes[from])->value : to->value;
      };
      to->result = Combine{}(to->mask, lane, to->argument, value_of);
    }
  });
  return own.result;
}

// Folds the values of all lanes of the mask.
template <class T, class Fold> T reduce(uint32_t mask, T value, Fold) {
  return combine(mask, value, 0, [](uint32_t all, int own, int, const auto &value_of) {
    T folded = value_of(own);
    for (int lane = 0; lane < 32; ++lane)
      if (lane != own && all >> lane & 1) folded = Fold{}(folded, value_of(lane));
    return folded;
  });
}

} // namespace fdm::emulator

template <class T> T __shfl_sync(uint32_t mask, T value, int lane) {
  return fdm::emulator::combine(mask, value, lane,
                                [](uint32_t, int, int from, const auto &value_of) { return value_of(from & 31); });
}
template <class T> T __shfl_xor_sync(uint32_t mask, T value, int bits) {
  return fdm::emulator::combine(mask, value, bits,
                                [](uint32_t, int lane, int own, const auto &value_of) { return value_of(lane ^ own); });
}
template <class T> T __shfl_up_sync(uint32_t mask, T value, unsigned distance) {
  return fdm::emulator::combine(mask, value, int(distance), [](uint32_t, int lane, int down, const auto &value_of) {
    return value_of(lane - down);
  });
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  return fdm::emulator::combine(mask, predicate != 0, 0, [](uint32_t all, int, int, const auto &value_of) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane)
      if (all >> lane & 1) bits |= uint32_t(value_of(lane)) << lane;
    return bits;
  });
}
inline int __any_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(uint32_t mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
inline void __syncwarp(uint32_t mask = 0xffffffffu) { __ballot_sync(mask, 0); }

inline uint32_t __match_any_sync(uint32_t mask, uint32_t value) {
  return fdm::emulator::combine(mask, value, 0, [](uint32_t all, int own, int, const auto &value_of) {
    uint32_t bits = 0;
    for (int lane = 0; lane < 32; ++lane)
      if (all >> lane & 1 && value_of(lane) == value_of(own)) bits |= 1u << lane;
    return bits;
  });
}
template <class T> T __reduce_add_sync(uint32_t mask, T value) {
  return fdm::emulator::reduce(mask, value, [](T x, T y) { return x + y; });
}
template <class T> T __reduce_min_sync(uint32_t mask, T value) {
  return fdm::emulator::reduce(mask, value, [](T x, T y) { return x < y ? x : y; });
}
template <class T> T __reduce_max_sync(uint32_t mask, T value) {
  return fdm::emulator::reduce(mask, value, [](T x, T y) { return x > y ? x : y; });
}
inline uint32_t __reduce_or_sync(uint32_t mask, uint32_t value) {
  return fdm::emulator::reduce(mask, value, [](uint32_t x, uint32_t y) { return x | y; });
}

template <class T> T atomicAdd(T *p, std::common_type_t<T> x) {
  if constexpr (std::is_floating_point_v<T>) {
    T previous;
    __atomic_load(p, &previous, __ATOMIC_RELAXED);
    T next = previous + x;
    while (!__atomic_compare_exchange(p, &previous, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
      next = previous + x;
    return previous;
  } else {
    return __atomic_fetch_add(p, x, __ATOMIC_RELAXED);
  }
}
template <class T> T atomicOr(T *p, std::common_type_t<T> x) { return __atomic_fetch_or(p, x, __ATOMIC_RELAXED); }
template <class T, class Choose> T atomic_choose(T *p, T x, const Choose &choose) {
  T previous = __atomic_load_n(p, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(p, &previous, choose(previous, x), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return previous;
}
template <class T> T atomicMin(T *p, std::common_type_t<T> x) {
  return atomic_choose(p, x, [](T a, T b) { return b < a ? b : a; });
}
template <class T> T atomicMax(T *p, std::common_type_t<T> x) {
  return atomic_choose(p, x, [](T a, T b) { return b > a ? b : a; });
}
