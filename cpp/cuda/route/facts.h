// SPDX-License-Identifier: BSD-3-Clause
// The inputs of a route beside the sizes of a problem: facts of the pack and of the tensors' device, and how tensors
// lie in memory.
#pragma once

#include "../../indexing.h"
#include "../tile/sm90/tile_sizes.cuh"
#include "tables.h"

namespace fdm::cuda {

// Whether values are narrower than keys.
inline bool has_narrow_values(const fdm_problem &p) { return p.v.shape[3] != p.head_dim; }

// The head dimensions that the kernels of a family were instantiated for, in ascending order.
struct HeadDimList {
  int count, dims[8];

  // 0 where there are none.
  int most() const { return count == 0 ? 0 : dims[count - 1]; }
  // The instantiation that serves heads of so many columns, or the largest.
  int serving(int64_t head_dim) const {
    for (int n = 0; n < count; ++n)
      if (dims[n] >= head_dim) return dims[n];
    return most();
  }
};

// What a pack was built for. Rare calls (`rare`) have fewer instantiations. Pair biases have kernels with mma.sync, and
// others (`pair_bias_sm90`) for sm_90.
struct BuiltFor {
  int tile_arch;
  HeadDimList all, rare, pair_bias, pair_bias_sm90, direct;
};

// Facts about the device of the tensors.
struct DeviceFacts {
  const BuiltFor *built;
  const RouteTable *table;
  int sms;

  // That of values: narrower ones than keys have instantiations of their own.
  int value_instantiation(const fdm_problem &p, int head_dim) const {
    return has_narrow_values(p) ? narrow_value_dim(head_dim) : head_dim;
  }
  bool has_wgmma() const { return built->tile_arch == 90; } // and clusters, and copies of boxes
  // The head dimension of the instantiation that serves a problem. Rare calls have fewer of them.
  int instantiation(const fdm_problem &p, bool is_rare) const {
    return (is_rare ? built->rare : built->all).serving(p.head_dim);
  }
};

// What depends on the device has room for as many SMs: more than any device has.
constexpr int kSmLimit = 256;

// Facts that stand for every device of an architecture, where the device is not known yet.
inline DeviceFacts any_device(const BuiltFor &built) { return {&built, &route_table(built.tile_arch), kSmLimit}; }

// Whether the rows of a (B, rows, heads, D) tensor can be copied 16 bytes at a time.
inline bool rows_are_aligned(const fdm_tensor &t, int64_t head_dim) {
  bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && head_dim % 8 == 0 && t.stride[3] == 1;
  for (int d = 0; d < 3; ++d) aligned &= t.shape[d] <= 1 || t.stride[d] % 8 == 0;
  return aligned;
}
// The same of each of these tensors that is present.
template <class... Tensors> bool all_aligned(int64_t head_dim, const Tensors &...tensors) {
  return ((!present(tensors) || rows_are_aligned(tensors, head_dim)) && ...);
}

// How the tensors of a call lie. Those of its results are not known when room for a workspace is asked for.
struct Alignment {
  bool inputs;      // rows_are_aligned says so of Q, K and V
  bool out, dout;   // and of these
  bool gradients;   // and of the gradients of Q, K and V that are wanted
  bool dk_dv;       // and of those of K and V
  bool dbias_pairs; // two neighbours of a row of dbias can be stored at once
  bool row_places;  // rows of Q, K and V lie as tile/row_places.cuh needs it
  bool row_maps;    // the driver describes boxes of Q, K and V; it is asked where a route would use them
  bool narrow;      // 32 bits hold all strides of a forward pass of one query
  // Rows of a bias or mask per query can be copied 16 bytes at a time.
  bool bias_chunks, mask_chunks;
  bool
      hold_sums; // the wanted gradients may hold float32 sums until they are written: their sequences fill memory without a gap
  int64_t dk_room; // bytes of dk, which may hold something else until it is written; 0 if it has gaps
};

// input_alignment takes the results, which it does not know, as aligned.
Alignment input_alignment(const fdm_problem &p);
Alignment forward_alignment(const fdm_problem &p, const fdm_forward_args &args);
Alignment backward_alignment(const fdm_problem &p, const fdm_backward_args &args);

} // namespace fdm::cuda
