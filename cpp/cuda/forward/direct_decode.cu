// SPDX-License-Identifier: BSD-3-Clause
// The host side of the kernel for one query and few keys: its parameters. All strides fit 32 bits
// (Alignment::strides_fit_32_bits).
#include "direct_decode.h"

#include "../host/dispatch.h"
#include "forward.h"

namespace fdm::cuda {
namespace {

DirectStrides row_strides(const fdm_tensor &t) {
  return {int32_t(t.stride[0]), int32_t(t.stride[1]), int32_t(t.stride[2])};
}

// If a bias or mask has query heads, each thread block has one head.
DirectKeyStrides key_strides(const fdm_problem &p, const fdm_tensor &t) {
  if (!present(t)) return {};
  const auto stride_of = [&](int dimension) { return t.shape[dimension] == 1 ? 0 : int32_t(t.stride[dimension]); };
  const bool own_heads = t.shape[1] == p.heads;
  return {stride_of(0), own_heads ? stride_of(1) : 0, own_heads ? 0 : stride_of(1), stride_of(3)};
}

} // namespace

cudaError_t run_direct_decode(const fdm_problem &p, const fdm_forward_args &args, const ForwardRoute &route,
                              const DeviceFacts &device, void *workspace) {
  DirectDecodeParams params{};
  params.heads = int32_t(p.heads);
  params.group = int32_t(group_size(p));
  params.heads_per_block = route.direct.heads_per_block;
  params.q = static_cast<const uint16_t *>(p.q.data);
  params.k = static_cast<const uint16_t *>(p.k.data);
  params.v = static_cast<const uint16_t *>(p.v.data);
  params.out = static_cast<uint16_t *>(args.out.data);
  params.out_rest = static_cast<uint8_t *>(args.out_rest.data);
  params.lse = static_cast<float *>(args.lse.data);
  params.mask = static_cast<const uint8_t *>(p.mask.data);
  params.bias = p.bias.data;
  params.bias_dtype = p.bias.dtype;
  params.sink = {p.sink.data, 0, p.sink.stride[0], p.sink.dtype, false};
  params.q_strides = row_strides(p.q);
  params.k_strides = row_strides(p.k);
  params.v_strides = row_strides(p.v);
  params.out_strides = row_strides(args.out);
  const int64_t *const lse = args.lse.stride;
  params.lse_strides = {int32_t(lse[0]), int32_t(lse[2]), int32_t(lse[1])};
  params.mask_strides = key_strides(p, p.mask);
  params.bias_strides = key_strides(p, p.bias);
  params.sequences = p.batch;
  params.blocks_of_kv_head = route.direct.blocks_per_kv_head;
  params.blocks = int32_t(p.kv_heads) * params.blocks_of_kv_head;
  params.keys = int32_t(p.keys);
  params.head_dim = int32_t(p.head_dim);
  params.factors = ScoreFactors(p);
  params.has_softcap = p.softcap > 0;
  params.packed = is_varlen(p);
  params.cu_seqlens_q = p.cu_seqlens_q;
  params.cu_seqlens_k = p.cu_seqlens_k;
  params.room = {p.q.shape[1], p.k.shape[1], p.queries, p.keys};
  params.parts = route.direct.clusters_per_block;
  if (route.partials.exists()) params.partials = partials_at(at<void>(workspace, route.partials), p, params.parts);
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  const cudaError_t error = with_types<kMaxDirectHeadDim>(p, p.head_dim, DirectHeadDims{}, [&](auto element, auto dim) {
    return launch_direct_decode<typename decltype(element)::Type, dim>({route, device, params}, stream);
  });
  return error || !route.partials.exists() ? error : launch_combine(p, args, route, params.partials, stream);
}

} // namespace fdm::cuda
