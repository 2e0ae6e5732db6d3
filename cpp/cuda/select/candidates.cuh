// SPDX-License-Identifier: BSD-3-Clause
// The candidates of a selection: the rows of bias and mask that a result row reads, and the order of their keys.
#pragma once

#include <cstdint>
#include <type_traits>

#include "../../indexing.h"
#include "../tile/mask_bytes.cuh"

namespace fdm::cuda {

// A sequence and a head of the attention problem, which determine what the rows of a result read and see.
struct SelectionRow : Sequence {
  int64_t head;
};

// The rows of sequence b and of a head of the result. Without cu_seqlens, b is an index into the result's batch.
__device__ __forceinline__ SelectionRow selection_row(const fdm_selection &s, const fdm_tensor &result, int64_t b,
                                                      int64_t result_head) {
  return {sequence(s, b), result_head * (s.heads / result.shape[1])};
}

// Row i of a bias or mask, from key 0 of the sequence on.
template <class T> struct KeyRow {
  const T *base;
  int64_t stride;

  __device__ KeyRow(const fdm_selection &s, const fdm_tensor &t, const SelectionRow &r, int64_t i) {
    const int64_t head = t.shape[1] == 1 ? 0 : (t.shape[1] == s.heads ? r.head : r.head / (s.heads / s.kv_heads));
    const bool rows = t.shape[2] > 1;
    stride = t.shape[3] > 1 ? t.stride[3] : 0;
    int64_t offset = (t.shape[0] == 1 ? 0 : r.batch) * t.stride[0] + head * t.stride[1];
    offset += rows ? (r.q_begin + i) * t.stride[2] : r.k_begin * stride;
    base = static_cast<const T *>(t.data) + offset;
  }
  __device__ T load(int32_t j) const { return __ldg(base + j * stride); }
};

// Maps biases of kBits bits to unsigned integers of the same order. NaN and -inf, which are never selected, become 0.
// With 16 bits the lower half is 0, which saves the selection a pass. `infinity` differs between float16 and
// bfloat16.
template <int kBits> __device__ __forceinline__ uint32_t ordered_bias(uint32_t bits, uint32_t infinity) {
  constexpr uint32_t kSign = 1u << (kBits - 1);
  const uint32_t magnitude = bits & (kSign - 1);
  const bool negative = (bits & kSign) != 0;
  if (magnitude > infinity || (negative && magnitude == infinity)) return 0;
  const uint32_t ordered = negative ? kSign - magnitude : kSign + magnitude; // -0 as +0
  return ordered << (32 - kBits);
}

// Values of adjacent keys, as many as 16 bytes of biases have.
template <int kBits> struct NeighbourValues {
  static constexpr int kNeighbours = 128 / kBits;
  uint32_t value[kNeighbours];
};

template <int kBiasBits> struct Candidates {
  static constexpr int kBits = kBiasBits;
  KeyRow<std::conditional_t<kBits == 32, uint32_t, uint16_t>> bias;
  KeyRow<uint8_t> mask;
  bool masked;
  uint32_t infinity;
  // The keys that are ranked. Others are kept because of their position.
  int32_t first_ranked = 0;
  uint32_t ranked_count = INT32_MAX;

  __device__ Candidates(const fdm_selection &s, const SelectionRow &r, int64_t i)
      : bias(s, s.bias, r, i), mask(s, s.mask, r, i), masked(present(s.mask)),
        infinity(kBits == 32                    ? 0x7f800000u
                 : s.bias.dtype == FDM_BFLOAT16 ? 0x7f80
                                                : 0x7c00) {}

  // Returns 0 for a key that the mask or the bias excludes.
  __device__ uint32_t value(int32_t j) const {
    const uint32_t bits = bias.load(j);
    if (masked && !mask.load(j)) return 0;
    return ordered_bias<kBits>(bits, infinity);
  }
  // The biases of adjacent keys from j on, a multiple of their number, and bytes that are nonzero for keys that the
  // mask keeps and that come before `past`.
  using Values = NeighbourValues<kBits>;
  struct Loaded {
    uint4 bias;
    uint32_t kept[Values::kNeighbours / 4];
  };
  __device__ Loaded load_neighbours(int32_t j, int32_t past) const {
    constexpr int kNeighbours = Values::kNeighbours;
    Loaded loaded{};
    const int count = min(kNeighbours, past - j);
    if (count <= 0) return loaded;
    const bool words = mask.stride == 1 && reinterpret_cast<uintptr_t>(mask.base) % 4 == 0;
#pragma unroll
    for (int w = 0; w < kNeighbours / 4; ++w) {
      const int left = count - 4 * w;
      if (left <= 0) continue;
      const uint8_t *first = mask.base + (j + 4 * w) * mask.stride;
      if (!masked)
        loaded.kept[w] = left >= 4 ? ~0u : ~0u >> (32 - 8 * left);
      else if (words && left >= 4)
        loaded.kept[w] = load_mask<MaskLoad::word>(first, 1, 4);
      else
        loaded.kept[w] = load_mask<MaskLoad::bytes>(first, mask.stride, left);
    }
    if (count == kNeighbours && bias.stride == 1 && reinterpret_cast<uintptr_t>(bias.base) % sizeof(uint4) == 0) {
      loaded.bias = __ldg(reinterpret_cast<const uint4 *>(bias.base + j));
      return loaded;
    }
    uint32_t words_of_bias[4] = {};
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i)
      if (i < count) words_of_bias[i * kBits / 32] |= uint32_t{bias.load(j + i)} << i * kBits % 32;
    loaded.bias = {words_of_bias[0], words_of_bias[1], words_of_bias[2], words_of_bias[3]};
    return loaded;
  }
  __device__ Values values(const Loaded &loaded) const {
    const uint32_t words[4] = {loaded.bias.x, loaded.bias.y, loaded.bias.z, loaded.bias.w};
    Values found;
#pragma unroll
    for (int i = 0; i < Values::kNeighbours; ++i) {
      const uint32_t bits = kBits == 32 ? words[i * kBits / 32] : words[i * kBits / 32] >> i * kBits % 32 & 0xffff;
      found.value[i] = (loaded.kept[i / 4] >> i % 4 * 8 & 0xff) != 0 ? ordered_bias<kBits>(bits, infinity) : 0;
    }
    return found;
  }
  __device__ bool ranks(int32_t j) const { return static_cast<uint32_t>(j - first_ranked) < ranked_count; }
  // The value of a ranked key, and 0 for other keys.
  __device__ uint32_t operator()(int32_t j) const {
    const uint32_t found = value(j);
    return ranks(j) ? found : 0;
  }
};

// The best keys of a row up to some key, in the order of selection: larger values come first, and the lower key of
// equal values. They have a value larger than `value`, or an equal value and a key up to `last`. The window also
// holds all later keys that can enter, and perhaps some that cannot: the lower bits of `value` are 0 if no key of the
// row needs them.
struct Window {
  uint32_t value;
  int32_t last;
  int32_t size;

  __device__ bool holds(uint32_t key_value, int32_t key) const {
    return key_value > value || (key_value == value && key <= last);
  }
};

// A window that is not full holds every candidate. Excluded keys have the value 0, and no key is -1 or less.
__device__ __forceinline__ Window open_window(int32_t size) { return {0, -1, size}; }
__device__ __forceinline__ Window closed_window() { return {~0u, -1, 0}; }

// Calls function with the bits of a bias as a compile-time constant.
template <class Function> auto with_bias_bits(const fdm_selection &s, const Function &function) {
  if (s.bias.dtype == FDM_FLOAT32) return function(std::integral_constant<int, 32>{});
  return function(std::integral_constant<int, 16>{});
}

} // namespace fdm::cuda
