// SPDX-License-Identifier: BSD-3-Clause
// The launch of an instantiation of the row bias kernel. Generated files hold nothing but an include of this and a line
// for each.
#pragma once

#include "device.h"
#include "row_bias.cuh"
#include "tiles.cuh"

namespace fdm::cuda {

template <class Element, int kHeadDim> cudaError_t launch_row_bias(const BackwardParams &params, cudaStream_t stream) {
  constexpr RowBiasTileChoice tile = row_bias_tile(FDM_TILE_ARCH, kHeadDim);
  using Config = RowBiasConfig<Element, kHeadDim, tile.columns, tile.warps, tile.query_buffers, tile.key_buffers>;
  constexpr int bytes = int(sizeof(RowBiasShared<Config>));
  static_assert(bytes <= shared_limit(FDM_TILE_ARCH), "the tile does not fit the arch's shared memory");
  static std::atomic<uint64_t> allowed{0};
  if (cudaError_t error = allow_shared(row_bias_kernel<Config>, bytes, allowed)) return error;
  const fdm_problem &p = params.p;
  const fdm_tensor &dbias = params.a.dbias;
  const int64_t tiles = ceil_div(p.queries, Config::kRows), batches = is_varlen(p) ? p.batch : dbias.shape[0];
  const int64_t blocks = dbias.shape[1] * tiles * batches;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  row_bias_kernel<Config><<<unsigned(blocks), Config::kThreads, bytes, stream>>>(params);
  return cudaGetLastError();
}

} // namespace fdm::cuda
