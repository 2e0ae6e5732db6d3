// SPDX-License-Identifier: BSD-3-Clause
// Index arithmetic for a problem's tensors: sequences, head groups and rows. All packs share it. CUDA packs use it in
// host and device code.
//
// Everything here has internal linkage. The cpu pack compiles these functions once for each SIMD level. With shared
// (weak) definitions the linker could keep one that was compiled with AVX-512 instructions.
#pragma once

#include <cstdint>

#include "pack.h"

#if defined(__CUDACC__)
#define FDM_INLINE static __host__ __device__ __forceinline__
#define FDM_DEVICE static __device__ __forceinline__
#define FDM_MEMBER __host__ __device__ __forceinline__ // a member of a struct that is a kernel parameter
#else
#define FDM_INLINE static inline
#define FDM_DEVICE static inline
#define FDM_MEMBER inline
#endif

namespace fdm {

// The rows and keys of one batch element; for varlen, its range of the packed dimension.
struct Sequence {
  int64_t batch;      // index into batch dimensions
  int64_t q_begin;    // first row in the row dimension
  int64_t q_count;    // Q
  int64_t k_begin;    // first key in the key dimension of keys, values, per-key mask and per-key bias
  int64_t k_count;    // K
  int64_t causal_off; // K - Q: query i sees keys j <= i + causal_off
};

FDM_INLINE bool is_varlen(const fdm_problem &p) { return p.cu_seqlens_q.data != nullptr; }
FDM_INLINE bool is_varlen(const fdm_selection &s) { return s.cu_seqlens_q.data != nullptr; }
FDM_INLINE bool is_causal(const fdm_problem &p) { return (p.flags & FDM_CAUSAL) != 0; }
// 32-bit division: on a GPU a 64-bit division takes longer than some of the work of a small kernel.
FDM_INLINE int64_t group_size(const fdm_problem &p) {
  return static_cast<uint32_t>(p.heads) / static_cast<uint32_t>(p.kv_heads);
}
FDM_INLINE int64_t kv_head_of(const fdm_problem &p, int64_t h) {
  return static_cast<uint32_t>(h) / static_cast<uint32_t>(group_size(p));
}
FDM_INLINE int64_t dtype_size(int32_t dtype) {
  switch (dtype) {
  case FDM_FLOAT64:
    return 8;
  case FDM_FLOAT32:
  case FDM_INT32:
    return 4;
  case FDM_FLOAT16:
  case FDM_BFLOAT16:
    return 2;
  default:
    return 1;
  }
}

FDM_INLINE bool present(const fdm_tensor &t) { return t.data != nullptr; }

FDM_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
FDM_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }
FDM_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
FDM_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Most operands fit 32 bits, and a GPU divides those in a fifth of the time.
FDM_INLINE int64_t quotient(int64_t n, int64_t d) {
  if (((n | d) >> 32) == 0) return static_cast<uint32_t>(n) / static_cast<uint32_t>(d);
  return n / d;
}

FDM_INLINE int64_t clamp64(int64_t x, int64_t low, int64_t high) { return max64(low, min64(x, high)); }

// Whether a mask or bias is per query. With a single query both forms are equivalent; the per-key form is cheaper.
FDM_INLINE bool is_per_query(const fdm_tensor &t) { return t.shape[2] > 1; }
FDM_INLINE bool has_query_rows(const fdm_tensor &t) { return present(t) && is_per_query(t); }

// The capacity for rows and keys in the tensors of a packed batch: in total, and for the longest sequence.
struct PackedCapacity {
  int64_t rows, keys, max_rows, max_keys;
};

FDM_INLINE void limit_capacity(PackedCapacity *capacity, const fdm_tensor &scores) {
  if (!present(scores)) return;
  if (is_per_query(scores))
    capacity->rows = min64(capacity->rows, scores.shape[2]);
  else
    capacity->keys = min64(capacity->keys, scores.shape[3]);
}

FDM_INLINE int64_t cu_bound(const fdm_tensor &cu_seqlens, int64_t i) {
  return static_cast<const int32_t *>(cu_seqlens.data)[i * cu_seqlens.stride[0]];
}

// Clamps the bounds of cu_seqlens to the tensors and to the lengths that the caller gave. On a GPU the host cannot
// check them.
FDM_INLINE Sequence packed_sequence(const fdm_tensor &cu_seqlens_q, const fdm_tensor &cu_seqlens_k, int64_t b,
                                    const PackedCapacity &capacity) {
  const int64_t q0 = clamp64(cu_bound(cu_seqlens_q, b), 0, capacity.rows);
  const int64_t k0 = clamp64(cu_bound(cu_seqlens_k, b), 0, capacity.keys);
  const int64_t q1 = clamp64(cu_bound(cu_seqlens_q, b + 1), q0, capacity.rows);
  const int64_t k1 = clamp64(cu_bound(cu_seqlens_k, b + 1), k0, capacity.keys);
  const int64_t q_count = min64(q1 - q0, capacity.max_rows), k_count = min64(k1 - k0, capacity.max_keys);
  return {0, q0, q_count, k0, k_count, k_count - q_count};
}

// A sequence of a batch that is not packed.
FDM_INLINE Sequence whole_sequence(const fdm_problem &p, int64_t b) {
  return {b, 0, p.queries, 0, p.keys, p.keys - p.queries};
}

FDM_INLINE Sequence sequence(const fdm_problem &p, int64_t b) {
  if (!is_varlen(p)) return whole_sequence(p, b);
  PackedCapacity capacity{p.q.shape[1], p.k.shape[1], p.queries, p.keys};
  if (present(p.block_table)) {
    // The shapes of pages do not bound the total number of keys. The shapes of per-key masks and biases do.
    capacity.keys = INT32_MAX;
    capacity.max_keys = min64(p.keys, p.block_table.shape[1] * p.k.shape[1]);
    limit_capacity(&capacity, p.mask);
    limit_capacity(&capacity, p.start);
    limit_capacity(&capacity, p.bias);
  }
  return packed_sequence(p.cu_seqlens_q, p.cu_seqlens_k, b, capacity);
}

// A sequence of a selection. Without cu_seqlens, b is an index into the batch of the result.
FDM_INLINE Sequence sequence(const fdm_selection &s, int64_t b) {
  if (!present(s.cu_seqlens_q)) return {b, 0, s.queries, 0, s.keys, s.keys - s.queries};
  PackedCapacity capacity{INT32_MAX, INT32_MAX, s.queries, s.keys};
  limit_capacity(&capacity, s.bias);
  limit_capacity(&capacity, s.mask);
  limit_capacity(&capacity, s.start);
  limit_capacity(&capacity, s.keep);
  return packed_sequence(s.cu_seqlens_q, s.cu_seqlens_k, b, capacity);
}

// The first token of the sequence that contains `token`, and one past its last. Invalid cu_seqlens give a range that
// still contains the token.
struct TokenRange {
  int32_t begin, past;
};

FDM_INLINE TokenRange sequence_of(const fdm_forgetting &f, int64_t token) {
  const int64_t tokens = f.log_forget.shape[3], sequences = f.cu_seqlens.shape[0] - 1;
  if (!present(f.cu_seqlens) || sequences < 1) return {0, static_cast<int32_t>(tokens)};
  int64_t low = 1, high = sequences; // search range for the first bound above the token
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (cu_bound(f.cu_seqlens, middle) > token)
      high = middle;
    else
      low = middle + 1;
  }
  return {static_cast<int32_t>(clamp64(cu_bound(f.cu_seqlens, low - 1), 0, token)),
          static_cast<int32_t>(clamp64(cu_bound(f.cu_seqlens, low), token + 1, tokens))};
}

// A gate clamped below at `least`. NaN stays NaN.
FDM_INLINE double clamped_gate(const fdm_forgetting &f, double gate) { return gate < f.least ? f.least : gate; }

// The number of sequences in each list of a plan. Without cu_seqlens a list belongs to one batch element, or to the
// whole batch if it is broadcast.
FDM_INLINE int64_t list_sequences(const fdm_problem &p) { return is_varlen(p) ? p.batch : 1; }

// Rows of the row dimension, over all packed sequences.
FDM_INLINE int64_t total_rows(const fdm_problem &p) { return is_varlen(p) ? p.q.shape[1] : p.queries; }
// Keys of the key dimension of per-key tensors. For varlen it reads cu_seqlens_k, so that must be host memory.
FDM_INLINE int64_t total_keys(const fdm_problem &p) {
  if (!is_varlen(p)) return p.keys;
  const auto *k = static_cast<const int32_t *>(p.cu_seqlens_k.data);
  return k[p.batch * p.cu_seqlens_k.stride[0]];
}

// The index of query head h in a head dimension of size 1, Hk or H.
FDM_INLINE int64_t head_index(const fdm_problem &p, const fdm_tensor &t, int64_t h) {
  if (t.shape[1] == 1) return 0;
  return t.shape[1] == p.heads ? h : kv_head_of(p, h);
}
FDM_INLINE int64_t batch_index(const fdm_tensor &t, const Sequence &s) { return t.shape[0] == 1 ? 0 : s.batch; }

// Whether each key has a start and an end. They may have no memory yet if a selection is still to write them.
FDM_INLINE bool has_intervals(const fdm_problem &p) { return present(p.start) || (p.flags & FDM_SELECTS); }

FDM_INLINE fdm_mask_kind mask_kind(const fdm_problem &p) {
  if (has_intervals(p)) return FDM_MASK_INTERVALS;
  if (!present(p.mask)) return FDM_MASK_NONE;
  return is_per_query(p.mask) ? FDM_MASK_ROWS : FDM_MASK_KEYS;
}

// Whether the mask is one of blocks (fdm_mask_blocks). The plan has it all, and p.mask only its shape.
FDM_INLINE bool has_mask_blocks(const fdm_problem &p) { return present(p.mask) && p.mask.dtype == FDM_INT32; }

// Whether each query lists its keys (fdm_problem.indices).
FDM_INLINE bool has_key_lists(const fdm_problem &p) { return present(p.indices); }

// The tensor of the mask, whose first two dimensions enumerate the lists of the plan.
FDM_INLINE const fdm_tensor &mask_tensor(const fdm_problem &p) { return has_intervals(p) ? p.start : p.mask; }

// A matrix of scalars: element (i, j) at base + i * row + j * col, in elements.
struct Matrix {
  const void *base;
  int64_t row, col;
};

// Whether `count` neighbours of a row, which have `bytes` bytes, can be copied at a time.
inline bool rows_have_chunks(const fdm_tensor &t, int64_t count, int64_t bytes) {
  bool aligned = reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && t.stride[3] == 1;
  for (int d = 0; d < 3; ++d) aligned &= t.shape[d] <= 1 || t.stride[d] % count == 0;
  return aligned;
}

// Whether the forward pass takes rows that fdm_pack.row_bytes excludes: where it reads few rows of K and V, or few
// queries share a copy of them.
constexpr int64_t kAnyRowQueries = 16;
FDM_INLINE bool forward_takes_any_rows(const fdm_problem &p) {
  const bool is_empty = p.batch == 0 || p.keys == 0;
  const bool reads_few = p.queries <= kAnyRowQueries || has_key_lists(p) || present(p.block_table);
  return (is_empty || reads_few) && p.v.shape[3] == p.head_dim;
}

// The (query, key) matrix of a mask or bias for query head h of a sequence. Row and key indices count from the start
// of the sequence. A dimension of size 1 is broadcast.
FDM_INLINE Matrix score_matrix(const fdm_problem &p, const fdm_tensor &t, const Sequence &s, int64_t h,
                               int64_t element_size) {
  const bool rows = is_per_query(t);
  const int64_t row = rows ? t.stride[2] : 0;
  const int64_t col = t.shape[3] == 1 ? 0 : t.stride[3];
  int64_t offset = batch_index(t, s) * t.stride[0] + head_index(p, t, h) * t.stride[1];
  offset += rows ? s.q_begin * row : s.k_begin * col;
  return {static_cast<const char *>(t.data) + offset * element_size, row, col};
}

// The offset of row i of head h in a (B, rows, heads, D) tensor such as q, out or dout.
FDM_INLINE int64_t row_offset(const fdm_tensor &t, const Sequence &s, int64_t i, int64_t h) {
  return s.batch * t.stride[0] + (s.q_begin + i) * t.stride[1] + h * t.stride[2];
}
// The same in a (B, heads, rows, ...) tensor such as lse or indices.
FDM_INLINE int64_t head_major_offset(const fdm_tensor &t, const Sequence &s, int64_t i, int64_t h) {
  return s.batch * t.stride[0] + h * t.stride[1] + (s.q_begin + i) * t.stride[2];
}

} // namespace fdm
