// SPDX-License-Identifier: BSD-3-Clause
// A tile of a bias per query in shared memory, kPairBiasKeys keys wide.
//
// 16-bit elements have the layout of SmemTile, so ldmatrix gives each thread the elements of its accumulators, also
// transposed. 32-bit elements have a row pitch of kPitch words, which each kernel chooses so that its reads cover all
// banks. The bytes of a row mask lie beside the bias. fold() sets the bias of pairs that the mask drops to -inf, once
// for all sources of the tile. It folds in intervals the same way.
#pragma once

#include "../tile/key_ring.cuh"
#include "../tile/products.cuh"
#include "../tile/smem_tile.cuh"
#include "sources.cuh"

namespace fdm::cuda {

// Copies a tile element by element, for rows that cannot be copied in 16-byte chunks. Absent elements become 0.
template <class Integer, int kThreads, class Address>
__device__ __forceinline__ void copy_scores_by_elements(const Integer *first, int64_t row, int64_t col, int rows,
                                                        int rows_there, int keys_there, const Address &address) {
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * kPairBiasKeys; i += kThreads) {
    const int r = i / kPairBiasKeys, c = i % kPairBiasKeys;
    *address(r, c) = r < rows_there && c < keys_there ? first[r * row + c * col] : Integer(0);
  }
}

// For each of four keys, a byte of ones if it is kept, else of zeros. Booleans may have any bits set.
__device__ __forceinline__ uint32_t mask_of_booleans(uint32_t booleans) {
  // The addition carries the lower seven bits of a byte into its highest bit.
  const uint32_t highest = (((booleans & 0x7f7f7f7fu) + 0x7f7f7f7fu) | booleans) & 0x80808080u;
  return (highest >> 7) * 0xffu;
}

// Sets the dropped ones of eight adjacent 16-bit elements to -inf. `kept` is from mask_of_booleans().
template <class Element> __device__ __forceinline__ void drop_16_bit(uint4 &pairs, uint2 kept) {
  constexpr uint32_t kDropped = __is_same(Element, __half) ? 0xfc00fc00u : 0xff80ff80u;
  const auto drop = [&](uint32_t pair, uint32_t keep) { return (pair & keep) | (kDropped & ~keep); };
  pairs.x = drop(pairs.x, __byte_perm(kept.x, 0, 0x1100));
  pairs.y = drop(pairs.y, __byte_perm(kept.x, 0, 0x3322));
  pairs.z = drop(pairs.z, __byte_perm(kept.y, 0, 0x1100));
  pairs.w = drop(pairs.w, __byte_perm(kept.y, 0, 0x3322));
}
// The same for four adjacent float32 elements.
__device__ __forceinline__ void drop_32_bit(uint4 &words, uint32_t kept) {
  constexpr uint32_t kDropped = 0xff800000u;
  words.x = kept & 0xff ? words.x : kDropped;
  words.y = kept & 0xff00 ? words.y : kDropped;
  words.z = kept & 0xff0000 ? words.z : kDropped;
  words.w = kept & 0xff000000 ? words.w : kDropped;
}

// Whether the mask is folded into tiles of the bias.
FDM_INLINE bool folds_mask(const fdm_problem &p) { return has_query_rows(p.mask) || present(p.start); }

template <class ElementType, int kThreads, int kPitch> struct ScoreTile {
  using Element = ElementType;
  using Tile16Bit = SmemTile<kPairBiasKeys>;
  static constexpr int kChunks16Bit = kPairBiasKeys / 8, kChunks32Bit = kPairBiasKeys / 4,
                       kMaskChunks = kPairBiasKeys / 16;
  static_assert(kPitch % 4 == 0 && kPitch >= kPairBiasKeys);

  static constexpr int bytes(int rows, bool float32_bias) { return pair_bias_bias_bytes(rows, kPitch, float32_bias); }

  const PairBiasCall &call;
  char *memory;   // the base of the offsets below
  int bias, mask; // byte offsets of the bias, a multiple of 128, and of the mask
  bool float32_bias;

  __device__ bool mask_is_per_query() const { return has_query_rows(call.p.mask); }

  // Starts the copies of `rows` rows from first_row on, and of the keys from first_key on, of a source.
  __device__ __forceinline__ void copy(const Source &source, int rows, int first_row, int first_key) const {
    const fdm_problem &p = call.p;
    const Sequence s = pair_bias_sequence(p, source.batch);
    const int rows_there = min(rows, int(p.queries) - first_row),
              keys_there = min(kPairBiasKeys, int(p.keys) - first_key);
    if (rows_there <= 0 || keys_there <= 0) return;
    const uint32_t base = ptx::shared_address(memory) + bias;
    const Matrix m = score_matrix(p, p.bias, s, source.head, float32_bias ? 4 : 2);
    const int64_t offset = first_row * m.row + first_key * m.col;
    if (float32_bias) {
      const auto *first = static_cast<const uint32_t *>(m.base) + offset;
      if (call.bias_chunks)
        copy_chunks<4, kChunks32Bit, kPitch * 4>(first, m.row * 4, rows, rows_there, keys_there,
                                                 [&](int r, int c) { return base + r * (kPitch * 4) + c * 16; });
      else
        copy_scores_by_elements<uint32_t, kThreads>(
            first, m.row, m.col, rows, rows_there, keys_there,
            [&](int r, int c) { return reinterpret_cast<uint32_t *>(memory + bias) + r * kPitch + c; });
    } else {
      const auto *first = static_cast<const uint16_t *>(m.base) + offset;
      if (call.bias_chunks)
        copy_chunks<2, kChunks16Bit, kPairBiasKeys * 2>(
            first, m.row * 2, rows, rows_there, keys_there,
            [&](int r, int c) { return Tile16Bit::chunk_address(base, r, c); });
      else
        copy_scores_by_elements<uint16_t, kThreads>(
            first, m.row, m.col, rows, rows_there, keys_there, [&](int r, int c) {
              return reinterpret_cast<uint16_t *>(memory + bias + Tile16Bit::chunk_address(0, r, c / 8)) + c % 8;
            });
    }
    if (mask_is_per_query()) copy_mask(s, source.head, rows, rows_there, keys_there, first_row, first_key);
  }

  // own_chunk() is the address of this thread's first chunk at the first key, for the rows from first_row on.
  // copy_whole() copies a complete tile from there.
  __device__ static __forceinline__ const char *own_chunk(const PairBiasCall &pair_bias, const Source &source,
                                                          int first_row, bool is_float32) {
    const int size = is_float32 ? 4 : 2, chunks = is_float32 ? kChunks32Bit : kChunks16Bit;
    const Matrix m =
        score_matrix(pair_bias.p, pair_bias.p.bias, pair_bias_sequence(pair_bias.p, source.batch), source.head, size);
    return static_cast<const char *>(m.base) + (first_row + int(threadIdx.x) / chunks) * m.row * size +
           int(threadIdx.x) % chunks * 16;
  }
  template <int kRows> __device__ __forceinline__ void copy_whole(const char *thread_row, int first_key) const {
    const uint32_t base = ptx::shared_address(memory) + bias;
    const int64_t row = call.p.bias.stride[2];
    if (float32_bias)
      copy_chunks_whole<kRows, kChunks32Bit, kPitch * 4>(thread_row + first_key * 4, row * 4,
                                                         base + int(threadIdx.x) / kChunks32Bit * (kPitch * 4) +
                                                             threadIdx.x % kChunks32Bit * 16);
    else
      copy_chunks_whole<kRows, kChunks16Bit, kPairBiasKeys * 2>(
          thread_row + first_key * 2, row * 2,
          Tile16Bit::chunk_address(base, threadIdx.x / kChunks16Bit, threadIdx.x % kChunks16Bit));
  }

  // Sets the bias of pairs that a row mask or intervals drop to -inf. All threads of the block call it once the
  // copies have arrived, and synchronize afterwards.
  __device__ __forceinline__ void fold(const Source &source, int rows, int first_row, int first_key) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kChunks16Bit; i += kThreads) {
      const int r = i / kChunks16Bit, c = i % kChunks16Bit;
      const uint2 kept =
          mask_is_per_query() ? kept_of_mask(r, c) : kept_of_intervals(source, first_row + r, first_key + 8 * c);
      if (kept.x == ~0u && kept.y == ~0u) continue;
      if (float32_bias) {
        auto *words = reinterpret_cast<uint32_t *>(memory + bias) + r * kPitch + 8 * c;
#pragma unroll
        for (int k = 0; k < 8; ++k)
          if (!((k < 4 ? kept.x : kept.y) >> (8 * (k % 4)) & 1)) words[k] = 0xff800000u;
      } else {
        auto &chunk = *reinterpret_cast<uint4 *>(memory + bias + Tile16Bit::chunk_address(0, r, c));
        uint4 pairs = chunk;
        drop_16_bit<Element>(pairs, kept);
        chunk = pairs;
      }
    }
  }

  // Reads the bias of the accumulators of a 16 x 16 tile of scores that begins at this row and key.
  template <BiasType kBias> __device__ __forceinline__ void read(int row, int key, float (&values)[2][4]) const {
    const int lane = threadIdx.x % 32;
    if constexpr (kBias == BiasType::float32) {
      const auto *words =
          reinterpret_cast<const float *>(memory + bias) + (row + lane / 4) * kPitch + key + 2 * (lane % 4);
      for_pairs<2>([&](int n, int half) {
        const float2 pair = *reinterpret_cast<const float2 *>(words + 8 * half * kPitch + 8 * n);
        values[n][2 * half] = pair.x;
        values[n][2 * half + 1] = pair.y;
      });
    } else {
      uint32_t pairs[4];
      const uint32_t fragment = Tile16Bit::left(ptx::shared_address(memory) + bias, row);
      ptx::ldmatrix(pairs, Tile16Bit::fragment_address(fragment, 0, key));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::unpack<Element>(pairs[i], values[i / 2][i % 2 * 2], values[i / 2][i % 2 * 2 + 1]);
    }
  }

  // The same for scores whose accumulator rows are keys: keys `key` ... key + 15 and rows `row` ... row + 15.
  template <BiasType kBias>
  __device__ __forceinline__ void read_transposed(int row, int key, float (&values)[2][4]) const {
    const int lane = threadIdx.x % 32;
    if constexpr (kBias == BiasType::float32) {
      const auto *words =
          reinterpret_cast<const float *>(memory + bias) + (row + 2 * (lane % 4)) * kPitch + key + lane / 4;
      for_accumulators(values, [&](int n, int i) { values[n][i] = words[(8 * n + i % 2) * kPitch + i / 2 * 8]; });
    } else {
      uint32_t pairs[4];
      const uint32_t fragment = Tile16Bit::right_rows(ptx::shared_address(memory) + bias);
      ptx::ldmatrix_trans(pairs, Tile16Bit::fragment_address(fragment, row, key));
#pragma unroll
      for (int i = 0; i < 4; ++i)
        ptx::unpack<Element>(pairs[i], values[i / 2][i % 2 * 2], values[i / 2][i % 2 * 2 + 1]);
    }
  }

private:
  // kRowBytes is the row pitch in shared memory. The 16-bit rows that a thread copies are a multiple of eight apart,
  // so their chunks have the same swizzle.
  template <int kElementBytes, int kChunks, int kRowBytes, class Address>
  __device__ static __forceinline__ void copy_chunks(const void *first, int64_t row_bytes, int rows, int rows_there,
                                                     int keys_there, const Address &address) {
    constexpr int kRowsAtOnce = kThreads / kChunks;
    static_assert(kThreads % kChunks == 0 && (kRowsAtOnce % 8 == 0 || kElementBytes == 4));
    const int c = threadIdx.x % kChunks, row = threadIdx.x / kChunks;
    const int bytes = max(0, min(16, keys_there * kElementBytes - c * 16));
    const char *source = static_cast<const char *>(first) + row * row_bytes + c * 16;
    const uint32_t own_address = address(row, c);
#pragma unroll 4
    for (int r = 0; r + row < rows; r += kRowsAtOnce) {
      ptx::cp_async_up_to_16(own_address + r * kRowBytes, source, r + row < rows_there ? bytes : 0);
      source += kRowsAtOnce * row_bytes;
    }
  }

  template <int kRows, int kChunks, int kRowBytes>
  __device__ static __forceinline__ void copy_chunks_whole(const char *source, int64_t row_bytes, uint32_t address) {
    constexpr int kRowsAtOnce = kThreads / kChunks;
#pragma unroll
    for (int r = 0; r < kRows; r += kRowsAtOnce) {
      ptx::cp_async_16(address + r * kRowBytes, source, true);
      source += kRowsAtOnce * row_bytes;
    }
  }

  __device__ __forceinline__ void copy_mask(const Sequence &s, int64_t head, int rows, int rows_there, int keys_there,
                                            int first_row, int first_key) const {
    const Matrix m = score_matrix(call.p, call.p.mask, s, head, 1);
    const auto *first = static_cast<const uint8_t *>(m.base) + first_row * m.row + first_key * m.col;
    const uint32_t base = ptx::shared_address(memory) + mask;
    if (call.mask_chunks)
      copy_chunks<1, kMaskChunks, kPairBiasKeys>(first, m.row, rows, rows_there, keys_there,
                                                 [&](int r, int c) { return base + r * kPairBiasKeys + c * 16; });
    else
      copy_scores_by_elements<uint8_t, kThreads>(first, m.row, m.col, rows, rows_there, keys_there, [&](int r, int c) {
        return reinterpret_cast<uint8_t *>(memory + mask) + r * kPairBiasKeys + c;
      });
  }

  __device__ __forceinline__ uint2 kept_of_mask(int r, int c) const {
    const uint2 bytes = *reinterpret_cast<const uint2 *>(memory + mask + r * kPairBiasKeys + 8 * c);
    return {mask_of_booleans(bytes.x), mask_of_booleans(bytes.y)};
  }
  __device__ __forceinline__ uint2 kept_of_intervals(const Source &source, int64_t row, int64_t first_key) const {
    const fdm_problem &p = call.p;
    const auto load = [&](const fdm_tensor &t, int64_t key) {
      const int64_t batch = t.shape[0] == 1 ? 0 : source.batch;
      return static_cast<const int32_t *>(
          t.data)[batch * t.stride[0] + head_index(p, t, source.head) * t.stride[1] + key * t.stride[3]];
    };
    uint2 kept{};
#pragma unroll 1
    for (int k = 0; k < 8 && first_key + k < p.keys; ++k)
      if (load(p.start, first_key + k) <= row && row < load(p.end, first_key + k))
        (k < 4 ? kept.x : kept.y) |= 0xffu << (8 * (k % 4));
    return kept;
  }
};

} // namespace fdm::cuda
