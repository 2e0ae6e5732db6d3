// SPDX-License-Identifier: BSD-3-Clause
// The inputs of a route besides the sizes of a problem: facts about the pack, the device and the memory layout of
// tensors.
#pragma once

#include "../../indexing.h"
#include "../tile/sm90/tile_sizes.cuh"
#include "tables.h"

namespace fdm::cuda {

// Whether the value dimension is smaller than the head dimension of keys.
inline bool has_narrow_values(const fdm_problem &p) { return p.v.shape[3] != p.head_dim; }

// The head dimensions of the instantiations of a kernel family, in ascending order.
struct HeadDimList {
  int count, dims[8];

  // 0 if there are none.
  int max() const { return count == 0 ? 0 : dims[count - 1]; }
  // The smallest instantiation for `head_dim`, or the largest.
  int serving(int64_t head_dim) const {
    for (int n = 0; n < count; ++n)
      if (dims[n] >= head_dim) return dims[n];
    return max();
  }
};

// The instantiations of a pack. Rare calls (`rare`) have fewer. Pair biases have mma.sync kernels (`pair_bias`) and
// sm_90 kernels (`pair_bias_sm90`).
struct BuiltFor {
  int tile_arch;
  HeadDimList all, rare, pair_bias, pair_bias_sm90, direct;
};

// Facts about the device of the tensors.
struct DeviceFacts {
  const BuiltFor *built;
  const RouteTable *table;
  int sms;

  // The instantiation for values; values narrower than keys have separate instantiations.
  int value_instantiation(const fdm_problem &p, int head_dim) const {
    return has_narrow_values(p) ? narrow_value_dim(head_dim) : head_dim;
  }
  bool has_wgmma() const { return built->tile_arch == 90; } // also clusters and TMA box copies
  // The head dimension of the instantiation that serves a problem.
  int instantiation(const fdm_problem &p, bool is_rare) const {
    return (is_rare ? built->rare : built->all).serving(p.head_dim);
  }
};

// The SM count that device-independent sizes assume: more than any device has.
constexpr int kSmLimit = 256;

// Facts that stand for every device of an architecture when the device is unknown.
inline DeviceFacts any_device(const BuiltFor &built) { return {&built, &route_table(built.tile_arch), kSmLimit}; }

// Whether the rows of a (B, rows, heads, D) tensor can be copied 16 bytes at a time.
inline bool rows_are_aligned(const fdm_tensor &t, int64_t head_dim) {
  return head_dim % 8 == 0 && rows_have_chunks(t, 8, 16);
}
// The same for each tensor that is present.
template <class... Tensors> bool all_aligned(int64_t head_dim, const Tensors &...tensors) {
  return ((!present(tensors) || rows_are_aligned(tensors, head_dim)) && ...);
}

// Whether the byte stride of heads of a (B, rows, heads, D) tensor fits 32 bits.
inline bool has_head_places(const fdm_tensor &t) { return 2 * t.stride[2] == int32_t(2 * t.stride[2]); }

// The alignment of the tensors of a call. That of the results is unknown during a workspace query. In backward passes,
// rows of the inputs, out and dout are always aligned.
struct Alignment {
  bool inputs;              // rows_are_aligned for Q, K and V
  bool out;                 // and for out
  bool dout_places;         // has_head_places for dout
  bool gradients;           // rows_are_aligned for the requested gradients of Q, K and V
  bool dk_dv;               // and for dK and dV
  bool dbias_pairs;         // two neighbours of a row of dbias can be stored at once
  bool row_places;          // the strides of Q, K and V satisfy tile/row_places.cuh
  bool row_maps;            // the driver can encode TMA boxes of Q, K and V; queried only where a route would use them
  bool strides_fit_32_bits; // all strides of a forward pass of one query fit 32 bits
  // Rows of a per-query bias or mask can be copied 16 bytes at a time.
  bool bias_chunks, mask_chunks;
  // The requested gradients may hold float32 sums until they are written: their sequences are contiguous.
  bool gradients_hold_sums;
  // Bytes of dK, which may serve as scratch memory until it is written; 0 if it is not contiguous.
  int64_t dk_scratch_bytes;
};

// input_alignment assumes aligned results, which it does not know.
Alignment input_alignment(const fdm_problem &p);
Alignment forward_alignment(const fdm_problem &p, const fdm_forward_args &args);
Alignment backward_alignment(const fdm_problem &p, const fdm_backward_args &args);

} // namespace fdm::cuda
