// SPDX-License-Identifier: BSD-3-Clause
// A bias per query for a tile of scores. It is copied to shared memory asynchronously. Lanes run along the keys, so
// the elements of a row take few transactions wherever the keys are.
//
// Asynchronous copies have at least four bytes. So each pair of row and key has a word: a copy of the aligned global
// word that contains the element. A 16-bit element is one half of its word.
#pragma once

#include "key_ring.cuh"

namespace fdm::cuda {

// The bias of one head of a sequence; `first` is the address of the element of row 0 and key 0.
struct RowBiasTile {
  const fdm_tensor &bias; // one of the kernel's parameters, so its fields take no registers
  uintptr_t first;

  __device__ __forceinline__ RowBiasTile(const fdm_tensor &tensor, const ScoreView &view)
      : bias(tensor), first(reinterpret_cast<uintptr_t>(view.data)) {}

  __device__ bool is_float32() const { return bias.dtype == FDM_FLOAT32; }
  __device__ int64_t row_bytes() const { return bias.stride[2] * element_bytes(); }
  __device__ int64_t key_stride() const { return bias.shape[3] == 1 ? 0 : bias.stride[3]; }

  // A warp copies kColumns keys of `rows` rows from row `row` on to kRows rows of sBias with a pitch of kPitch words.
  // For absent keys (keys[c] is -1) it copies key 0, which exists wherever this is called.
  template <int kRows, int kColumns, int kPitch>
  __device__ __forceinline__ void copy(uint32_t *sBias, const int32_t *keys, int64_t row, int rows) const {
    constexpr int kThreadsPerRow = kColumns < 32 ? kColumns : 32, kRowsAtOnce = 32 / kThreadsPerRow,
                  kSteps = kColumns / kThreadsPerRow;
    static_assert(kColumns % kThreadsPerRow == 0 && kRows % (2 * kRowsAtOnce) == 0);
    const int across = threadIdx.x % kThreadsPerRow, down = threadIdx.x % 32 / kThreadsPerRow;
    const int64_t pitch = row_bytes(), key_bytes = key_stride() * element_bytes();
    const uintptr_t first_word = first + row * pitch, half = half_word();
    // The word addresses of a row and of this thread's next row. Two rows further, an element is in the same half of
    // its word: two row strides are a multiple of four bytes.
    uintptr_t words[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      words[s][0] = first_word + down * pitch + max(0, keys[across + s * kThreadsPerRow]) * key_bytes;
      words[s][1] = words[s][0] + kRowsAtOnce * pitch;
    }
    const uint32_t address = ptx::shared_address(sBias) + (down * kPitch + across) * 4;
    if (rows < kRows || may_hold(half, first_word, rows, pitch, key_bytes))
      return copy_carefully<kSteps, kRowsAtOnce, kThreadsPerRow, kPitch>(address, words, rows - down, half);
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int i = 0; i < 2; ++i) words[s][i] &= ~uintptr_t(3);
#pragma unroll 8
    for (int r = 0; r < kRows; r += 2 * kRowsAtOnce)
#pragma unroll
      for (int s = 0; s < kSteps; ++s)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          ptx::cp_async_4(address + ((r + i * kRowsAtOnce) * kPitch + s * kThreadsPerRow) * 4,
                          reinterpret_cast<const void *>(words[s][i]));
          words[s][i] += 2 * kRowsAtOnce * pitch;
        }
  }

private:
  __device__ int element_bytes() const { return is_float32() ? 4 : 2; }

  // The address of the word whose second half is behind the tensor's last element; 0 if there is none.
  __device__ __forceinline__ uintptr_t half_word() const {
    int64_t last = 0;
#pragma unroll
    for (int d = 0; d < 4; ++d) last += max64(0, (bias.shape[d] - 1) * bias.stride[d]);
    const auto address = reinterpret_cast<uintptr_t>(static_cast<const uint16_t *>(bias.data) + last);
    return is_float32() || address % 4 != 0 ? 0 : address;
  }

  // Whether the word may be in the rows, whatever the strides.
  __device__ __forceinline__ bool may_hold(uintptr_t word, uintptr_t first_word, int rows, int64_t pitch,
                                           int64_t key_bytes) const {
    const int64_t row_extent = (rows - 1) * pitch, key_extent = (bias.shape[3] - 1) * key_bytes;
    const auto offset = static_cast<int64_t>(word - first_word);
    return word && offset >= min64(0, row_extent) + min64(0, key_extent) &&
           offset <= max64(0, row_extent) + max64(0, key_extent);
  }

  // Copies the rows that exist. Of the word at `half_word`, it reads the first half only.
  template <int kSteps, int kRowsAtOnce, int kThreadsPerRow, int kPitch>
  __device__ __forceinline__ void copy_carefully(uint32_t address, const uintptr_t (&words)[kSteps][2], int rows,
                                                 uintptr_t half_word) const {
#pragma unroll 1
    for (int r = 0; r < rows; r += kRowsAtOnce, address += kRowsAtOnce * kPitch * 4)
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
        const uintptr_t word = (words[s][0] + r * row_bytes()) & ~uintptr_t(3);
        if (word != half_word)
          ptx::cp_async_4(address + s * kThreadsPerRow * 4, reinterpret_cast<const void *>(word));
        else // cp.async of two bytes reads four
          ptx::store_shared(address + s * kThreadsPerRow * 4, uint32_t(*reinterpret_cast<const uint16_t *>(word)));
      }
  }
};

// A warp copies the bias per query of its kWarpRows rows of a task's tile, if there is one.
template <int kWarpRows, int kColumns, int kPitch, class Task>
__device__ __forceinline__ void copy_row_bias(uint32_t (*sBias)[kPitch], const fdm_tensor &bias, const Task &task,
                                              const int32_t (&keys)[kColumns]) {
  if (!task.bias.per_query) return;
  const int first = threadIdx.x / 32 * kWarpRows;
  const int64_t row = task.first_row + first;
  RowBiasTile(bias, task.bias)
      .copy<kWarpRows, kColumns, kPitch>(sBias[first], keys, row, int(min64(kWarpRows, task.s.q_count - row)));
}

// The shifts with which a thread reads elements from their words.
template <class Element> struct RowBiasElements {
  uint32_t first_shift, row_odd, key_mask; // row_shift() and key_shift() use them
  uint32_t value_mask;                     // keeps the upper half of a word, or all of a float32
  bool float32;

  __device__ __forceinline__ explicit RowBiasElements(const RowBiasTile &tile) : float32(tile.is_float32()) {
    first_shift = float32 ? 0 : (~uint32_t(tile.first / 2) & 1) * 16;
    row_odd = float32 ? 0 : uint32_t(tile.bias.stride[2]) & 1;
    key_mask = float32 ? 0 : (uint32_t(tile.key_stride()) & 1) * 16;
    value_mask = float32 ? ~0u : 0xffff0000u;
  }

  // The distance in bits of an element from the upper half of its word is row_shift() ^ key_shift().
  __device__ __forceinline__ uint32_t row_shift(int64_t i) const {
    return first_shift ^ ((uint32_t(i) & row_odd) * 16);
  }
  __device__ __forceinline__ uint32_t key_shift(int32_t key) const { return (uint32_t(key) * 16) & key_mask; }

  __device__ __forceinline__ float element(uint32_t word, uint32_t shift) const {
    const uint32_t bits = (word << shift) & value_mask;
    if constexpr (__is_same(Element, __half))
      return float32 ? __uint_as_float(bits) : __half2float(__ushort_as_half(static_cast<uint16_t>(bits >> 16)));
    return __uint_as_float(bits);
  }
};

// Adds a bias element to a base-2 score. The clamp has the reason of to_base_2().
__device__ __forceinline__ float with_row_bias(float score, float bias) {
  return fmaf(ptx::max_or_nan(bias, -2.35e38f), kLog2E, score);
}

// Reads the bias of a thread's accumulator rows. The tile has kPitch words a row, and its first row is query `first`.
template <class Element, int kPitch> struct RowBiasReader {
  RowBiasElements<Element> reader;
  const uint32_t *words;
  const int32_t *keys;
  uint32_t row_shift; // the same for all rows of a thread, since they are a multiple of eight apart

  __device__ __forceinline__ RowBiasReader(const RowBiasTile &tile, const uint32_t (*sBias)[kPitch],
                                           const int32_t *keys_of_columns, int64_t first, int row)
      : reader(tile), words(sBias[row]), keys(keys_of_columns), row_shift(reader.row_shift(first + row)) {}

  // The shifts of a column and the next.
  __device__ __forceinline__ uint2 shifts(int column) const {
    const int2 pair = *reinterpret_cast<const int2 *>(keys + column);
    return {reader.key_shift(pair.x) ^ row_shift, reader.key_shift(pair.y) ^ row_shift};
  }
  // The elements of row tile m, half 0 or 1, in a column and the next.
  __device__ __forceinline__ float2 elements(int m, int half, int column, uint2 shifts) const {
    const uint2 pair = *reinterpret_cast<const uint2 *>(words + (16 * m + 8 * half) * kPitch + column);
    return {reader.element(pair.x, shifts.x), reader.element(pair.y, shifts.y)};
  }
};

} // namespace fdm::cuda
