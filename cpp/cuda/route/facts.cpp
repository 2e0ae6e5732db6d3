// SPDX-License-Identifier: BSD-3-Clause
#include "facts.h"

#include <initializer_list>

namespace fdm::cuda {
namespace {

// Whether the rows of a mask or bias can be copied 16 bytes at a time.
bool has_chunks(const fdm_tensor &t, int64_t element_bytes) {
  return has_query_rows(t) && t.shape[3] > 1 && rows_have_chunks(t, 16 / element_bytes, 16);
}

bool fits_32_bits(int64_t n) { return n == int32_t(n); }

bool has_row_places(const fdm_problem &p) {
  bool fits = true;
  for (const fdm_tensor *t : {&p.q, &p.k, &p.v}) fits &= fits_32_bits(2 * t->stride[1]);
  if (!fits || !present(p.block_table)) return fits;
  // A row of a page must have the same row index from the first row in K and in V.
  const int64_t rows = p.k.stride[1] ? p.k.stride[0] / p.k.stride[1] : 0;
  return rows * p.k.stride[1] == p.k.stride[0] && rows * p.v.stride[1] == p.v.stride[0] && rows >= 0 &&
         (rows == 0 || p.k.shape[0] <= INT32_MAX / rows - 1);
}

// The bytes of a contiguous gradient, which can serve as scratch memory until it is written.
int64_t contiguous_bytes(const fdm_tensor &t) {
  if (!present(t) || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return 0;
  int64_t elements = 1, last = 0;
  for (int d = 0; d < 4; ++d) {
    if (t.stride[d] < 0) return 0;
    elements *= t.shape[d];
    last += (t.shape[d] - 1) * t.stride[d];
  }
  return last + 1 == elements ? elements * 2 : 0;
}

// Each sequence must be contiguous.
bool may_hold_sums(const fdm_tensor &t) {
  return !present(t) || (rows_are_aligned(t, t.shape[3]) && contiguous_bytes(t) > 0 &&
                         t.stride[0] == t.shape[1] * t.shape[2] * t.shape[3]);
}

} // namespace

Alignment input_alignment(const fdm_problem &p) {
  Alignment alignment{};
  alignment.inputs = all_aligned(p.head_dim, p.q, p.k, p.v);
  alignment.out = alignment.dout_places = alignment.gradients = alignment.dk_dv = alignment.strides_fit_32_bits =
      alignment.row_maps = alignment.gradients_hold_sums = true;
  alignment.row_places = has_row_places(p);
  alignment.bias_chunks = has_chunks(p.bias, p.bias.dtype == FDM_FLOAT32 ? 4 : 2);
  alignment.mask_chunks = has_chunks(p.mask, 1);
  return alignment;
}

Alignment forward_alignment(const fdm_problem &p, const fdm_forward_args &args) {
  Alignment alignment = input_alignment(p);
  alignment.out = all_aligned(p.head_dim, args.out, args.out_rest);
  if (p.queries == 1)
    for (const fdm_tensor *t : {&p.q, &p.k, &p.v, &args.out, &args.lse, &p.mask, &p.bias})
      for (int64_t stride : t->stride) alignment.strides_fit_32_bits &= fits_32_bits(stride);
  return alignment;
}

Alignment backward_alignment(const fdm_problem &p, const fdm_backward_args &args) {
  Alignment alignment = input_alignment(p);
  alignment.dout_places = has_head_places(args.dout);
  alignment.dk_dv = all_aligned(p.head_dim, args.dk, args.dv);
  alignment.gradients = alignment.dk_dv && all_aligned(p.head_dim, args.dq);
  alignment.dbias_pairs = present(args.dbias) && rows_have_chunks(args.dbias, 2, 2 * dtype_size(args.dbias.dtype));
  alignment.gradients_hold_sums = may_hold_sums(args.dq) && may_hold_sums(args.dk) && may_hold_sums(args.dv);
  alignment.dk_scratch_bytes = contiguous_bytes(args.dk);
  return alignment;
}

} // namespace fdm::cuda
