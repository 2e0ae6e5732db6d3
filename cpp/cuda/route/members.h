// SPDX-License-Identifier: BSD-3-Clause
// A call in which the query heads of a GQA group have separate masks or biases is split into calls with one query
// head per KV head: call n has member n of each group. The kernels that compute all gradients at once serve these
// calls, with a key list for each member.
#pragma once

#include "facts.h"

namespace fdm::cuda {

// Whether the heads of a group have separate per-key masks, intervals or per-key biases. The intervals of a selection
// have no data during the workspace query.
inline bool has_members(const fdm_problem &p) {
  const auto has_heads = [&](const fdm_tensor &t) { return t.shape[1] == p.heads; };
  if (group_size(p) == 1 || has_query_rows(p.bias) || mask_kind(p) == FDM_MASK_ROWS) return false;
  return has_heads(p.bias) || has_heads(p.mask) || has_heads(p.start);
}

// The heads of a member, if the tensor has one head for each query head.
inline fdm_tensor of_member(const fdm_problem &p, const fdm_tensor &t, int axis, int64_t member) {
  if (t.shape[axis] != p.heads) return t;
  const int64_t bytes = dtype_size(t.dtype);
  fdm_tensor view = t;
  if (present(t)) view.data = static_cast<char *>(t.data) + member * t.stride[axis] * bytes;
  view.shape[axis] = p.kv_heads;
  view.stride[axis] *= group_size(p);
  return view;
}

inline fdm_problem member_of(const fdm_problem &p, int64_t member) {
  fdm_problem member_problem = p;
  member_problem.heads = p.kv_heads;
  member_problem.q = of_member(p, p.q, 2, member);
  member_problem.sink = of_member(p, p.sink, 0, member);
  for (fdm_tensor fdm_problem::*t : {&fdm_problem::mask, &fdm_problem::start, &fdm_problem::end, &fdm_problem::bias})
    member_problem.*t = of_member(p, p.*t, 1, member);
  return member_problem;
}

// Without dk and dv: each member has its own.
inline fdm_backward_args member_of(const fdm_problem &p, const fdm_backward_args &args, int64_t member) {
  fdm_backward_args member_args = args;
  for (fdm_tensor fdm_backward_args::*t :
       {&fdm_backward_args::out, &fdm_backward_args::dout, &fdm_backward_args::dq, &fdm_backward_args::out_rest})
    member_args.*t = of_member(p, args.*t, 2, member);
  for (fdm_tensor fdm_backward_args::*t :
       {&fdm_backward_args::lse, &fdm_backward_args::dlse, &fdm_backward_args::dbias})
    member_args.*t = of_member(p, args.*t, 1, member);
  member_args.dsink = of_member(p, args.dsink, 0, member);
  return member_args;
}

// Elements of a row of a member's dk or dv, which are read 16 bytes at a time.
inline int64_t member_pitch(const fdm_problem &p) { return 8 * ceil_div(p.head_dim, 8); }
inline int64_t member_elements(const fdm_problem &p) {
  return p.k.shape[0] * p.k.shape[1] * p.kv_heads * member_pitch(p);
}

} // namespace fdm::cuda
