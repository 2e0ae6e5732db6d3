// SPDX-License-Identifier: BSD-3-Clause
// The kernel for one query and few keys on the host: which problems it serves, and how keys are divided.
#include <algorithm>

#include "../host/device.h"
#include "../host/dispatch.h"
#include "../tile/copy_rows.cuh"
#include "direct_decode.h"
#include "forward.h"

namespace fdm::cuda {
namespace {

int32_t narrow(int64_t stride, bool *fits) {
  *fits &= stride == int32_t(stride);
  return int32_t(stride);
}

DirectStrides row_strides(const fdm_tensor &t, bool *fits) {
  return {narrow(t.stride[0], fits), narrow(t.stride[1], fits), narrow(t.stride[2], fits)};
}

// A bias or mask of each query head has blocks of one head.
DirectKeyStrides key_strides(const fdm_problem &p, const fdm_tensor &t, bool *fits) {
  if (!present(t)) return {};
  const auto own = [&](int dimension) { return t.shape[dimension] == 1 ? 0 : narrow(t.stride[dimension], fits); };
  const bool own_heads = t.shape[1] == p.heads;
  return {own(0), own_heads ? own(1) : 0, own_heads ? 0 : own(1), own(3)};
}

// The heads of a block: equal shares of a group, if its heads have their columns in common.
int64_t direct_rows(const fdm_problem &p) {
  const int64_t group = group_size(p);
  return heads_share_columns(p) ? ceil_div(group, ceil_div(group, kDirectRows)) : 1;
}
int64_t blocks_of_kv_head(const fdm_problem &p) { return ceil_div(group_size(p), direct_rows(p)); }
int64_t direct_blocks(const fdm_problem &p) { return p.batch * p.kv_heads * blocks_of_kv_head(p); }

// Clusters that share the keys of a block, where these keep each of the largest clusters busy and SMs are idle.
// Merging their results takes as long as a few turns. With a mask of more keys the list of those that are kept is
// faster (seen on an H100, one KV head of 64 columns).
int64_t direct_parts(const fdm_problem &p, int64_t sms, int64_t most) {
  constexpr int64_t kKeysOfTurn = kDirectKeys * kMostDirectWarps * kMostDirectSplits, kTurnsOfPart = 2;
  constexpr int64_t kLeastTurns = 4, kMostMaskedKeys = 32768;
  if (!kHasClusters || is_varlen(p)) return 1;
  const bool masked = mask_kind(p) != FDM_MASK_NONE;
  if (p.keys < kLeastTurns * kKeysOfTurn + masked || (masked && p.keys > kMostMaskedKeys)) return 1;
  const int64_t idle = sms / (direct_blocks(p) * kMostDirectSplits);
  return std::clamp<int64_t>(std::min(idle, p.keys / (kTurnsOfPart * kKeysOfTurn)), 1, most);
}

} // namespace

bool decodes_directly(const fdm_problem &p, const fdm_forward_args &args, int64_t sms, int64_t most_parts) {
  // Turns of its warps up to which the kernel is the faster one; without a mask the other kernel reads all keys, too,
  // and where there are enough blocks of threads it is never faster (seen on an H100).
  constexpr int64_t kMostTurns = 6, kMostTurnsOfAll = 8;
  const fdm_mask_kind kind = mask_kind(p);
  if (p.queries != 1 || p.keys > INT32_MAX / 2 || args.splits > 0 || p.head_dim > kMaxDirectHeadDim) return false;
  if (has_rows(p.bias)) return false; // of packed sequences, each of one query
  if (present(p.block_table) || !(kind == FDM_MASK_NONE || (kind == FDM_MASK_KEYS && needs_no_plan(p)))) return false;
  bool fits = true;
  for (const fdm_tensor *t : {&p.q, &p.k, &p.v, &args.out}) fits &= rows_are_aligned(*t, p.head_dim);
  for (const fdm_tensor *t : {&p.q, &p.k, &p.v, &args.out, &args.lse, &p.mask, &p.bias})
    for (int64_t stride : t->stride) narrow(stride, &fits);
  const int64_t blocks = direct_blocks(p);
  if (!fits || blocks == 0) return false;
  if (kind == FDM_MASK_NONE && kHasClusters && 4 * blocks >= sms) return true;
  const int64_t splits = std::clamp<int64_t>(sms / blocks, 1, kMostDirectSplits) * direct_parts(p, sms, most_parts);
  const int64_t turns = ceil_div(p.keys, kDirectKeys * kMostDirectWarps * splits) * ceil_div(blocks, sms);
  return turns <= (kind == FDM_MASK_NONE ? kMostTurnsOfAll : kMostTurns);
}

cudaError_t run_direct_decode(const fdm_problem &p, const fdm_forward_args &args, int64_t sms, int64_t most_parts,
                              void *workspace) {
  DirectDecodeParams params{};
  params.heads = int32_t(p.heads);
  params.group = int32_t(group_size(p));
  params.rows = int32_t(direct_rows(p));
  params.q = static_cast<const uint16_t *>(p.q.data);
  params.k = static_cast<const uint16_t *>(p.k.data);
  params.v = static_cast<const uint16_t *>(p.v.data);
  params.out = static_cast<uint16_t *>(args.out.data);
  params.lse = static_cast<float *>(args.lse.data);
  params.mask = static_cast<const uint8_t *>(p.mask.data);
  params.bias = p.bias.data;
  params.bias_dtype = p.bias.dtype;
  params.sink = {p.sink.data, 0, p.sink.stride[0], p.sink.dtype, false};
  bool fits = true;
  params.q_strides = row_strides(p.q, &fits);
  params.k_strides = row_strides(p.k, &fits);
  params.v_strides = row_strides(p.v, &fits);
  params.out_strides = row_strides(args.out, &fits);
  params.lse_strides = {narrow(args.lse.stride[0], &fits), narrow(args.lse.stride[2], &fits),
                        narrow(args.lse.stride[1], &fits)};
  params.mask_strides = key_strides(p, p.mask, &fits);
  params.bias_strides = key_strides(p, p.bias, &fits);
  params.sequences = p.batch;
  params.blocks_of_kv_head = int32_t(blocks_of_kv_head(p));
  params.blocks = int32_t(p.kv_heads) * params.blocks_of_kv_head;
  params.keys = int32_t(p.keys);
  params.head_dim = int32_t(p.head_dim);
  params.factors = ScoreFactors(p);
  params.capped = p.softcap > 0;
  params.packed = is_varlen(p);
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.cu_seqlens_k = p.cu_seqlens_k;
  params.room = {p.q.shape[1], p.k.shape[1], p.queries, p.keys};
  params.parts = int32_t(direct_parts(p, sms, most_parts));
  params.partials = partials_at(workspace, p, params.parts);
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  const cudaError_t error = with_types<kMaxDirectHeadDim>(p, DirectHeadDims{}, [&](auto element, auto dim) {
    return launch_direct_decode<typename decltype(element)::Type, decltype(dim)::value>(params, stream);
  });
  return error || params.parts == 1 ? error : launch_combine(p, args, params.parts, params.partials, stream);
}

} // namespace fdm::cuda
