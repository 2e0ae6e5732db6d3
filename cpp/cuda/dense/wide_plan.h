// SPDX-License-Identifier: BSD-3-Clause
// Which problems the kernels of dense blocks for sm_90 serve, and how the forward one's work is divided.
#pragma once

#include <algorithm>

#include "../host/dispatch.h"
#include "../plan/plan.cuh"
#include "dense.h"

namespace fdm::cuda {

// With more keys than these, the kernels that gather columns are faster than those with mma.sync in two cases: where the
// bias gradient is summed over nothing, since they then need no third pass; and where a boolean mask has a row for each
// query, which dense blocks fold into each tile of the bias. On one H200, forward and backward with 1024 keys kept by each
// of 8192 queries took them 2.7 ms, and those dense blocks 5.0 ms. The kernels for sm_90 pass over tiles of such a mask
// that keep nothing.
constexpr int64_t kMostKeysOfRows = 2048;
// The second case has more where sm90/fused.cuh serves it and so few rows that latency decides: with two heads of 4096
// queries, on one H200, the other kernels took 1.1 ms.
constexpr int64_t kMostKeysOfFewRows = 4096, kFewRows = 16384;
constexpr int64_t kMaxDenseSplits = 32; // combine.cu has a lane for each

inline int64_t sources_of(const DenseCall &call) { return int64_t(call.batches) * call.heads; }

// The head dimension of the instantiation that serves a problem: a pack may have been built with few of them.
inline int wide_head_dim(const fdm_problem &p) {
  return with_head_dim(p.head_dim, WideHeadDims{}, [](auto dim) { return int(decltype(dim)::value); });
}

// Do the kernels for sm_90 serve problems of these sizes? Not where most of their tiles would be empty.
inline bool has_wide_sizes(const fdm_problem &p) {
  if (FDM_TILE_ARCH != 90 || p.softcap > 0 || p.head_dim > kMaxWideHeadDim) return false;
  return 2 * p.queries * p.keys >= round_up(p.queries, kWideTile) * round_up(p.keys, kWideTile);
}
inline bool has_wide_tiles(const DenseCall &call) { return call.aligned && has_wide_sizes(call.p); }

// Does sm90/fused_windows.cuh serve a problem? Not where most of its tiles, or most SMs, would be idle.
inline bool has_windows(const DenseCall &call) {
  constexpr int64_t kLeastSources = 1024;
  const fdm_problem &p = call.p;
  if (FDM_TILE_ARCH != 90 || p.softcap > 0 || !call.aligned) return false;
  if (p.head_dim > kWindowHeadDim || wide_head_dim(p) != kWindowHeadDim) return false;
  return p.queries <= kWindow && p.keys <= kWindow && 2 * p.queries * p.keys >= kWindow * kWindow && call.batches > 1 &&
         group_size(p) == 1 && p.batch * p.heads >= kLeastSources;
}

inline bool has_room_for_mask(const fdm_problem &p) {
  return has_room_for_mask(wide_head_dim(p), p.bias.dtype == FDM_FLOAT32);
}

inline int64_t partial_rows(const fdm_problem &p) { return p.batch * p.heads * p.queries; }
inline int64_t units_of(const fdm_problem &p) { return p.bias.shape[0] * p.bias.shape[1]; }

inline int64_t key_tiles_of(const fdm_problem &p) { return max64(1, ceil_div(p.keys, kWideTile)); }

inline int32_t wide_splits(const DenseForward &work) {
  return int32_t(ceil_div(key_tiles_of(work.call.p), work.split_tiles));
}

// Chooses how many tiles of keys a split of the forward kernel for sm_90 has, by the time that they take. Its unit is that
// of a tile of scores: on one H200 about 2 us, which a block of threads also takes before its first and after its last,
// and in which 4 MB of partial results are written and merged; a launch takes about as long.
inline int32_t choose_split_tiles(const DenseForward &work, int sms) {
  const fdm_problem &p = work.call.p;
  const int64_t key_tiles = key_tiles_of(p), sources = sources_of(work.call) * units_of(p);
  int64_t seen = 0; // tiles of keys, of all tiles of rows
  for (int64_t tile = 0; tile < work.tiles; ++tile) seen += visible_key_tiles(p, tile);
  int64_t least_time = INT64_MAX, best = key_tiles;
  for (int64_t splits = 1; splits <= std::min(key_tiles, kMaxDenseSplits); ++splits) {
    const int64_t split_tiles = ceil_div(key_tiles, splits);
    // Of each tile of rows, half of a split is missing if the mask is causal.
    const int64_t tasks = splits == 1 ? work.tiles : ceil_div(seen, split_tiles) + (is_causal(p) ? work.tiles / 2 : 0);
    const int64_t merged = splits == 1 ? 0 : 1 + partial_rows(p) * splits * p.head_dim * 4 / (int64_t(1) << 22);
    const int64_t time = ceil_div(tasks * sources, sms) * (split_tiles + 1) + merged;
    if (time >= least_time) continue;
    least_time = time;
    best = split_tiles;
  }
  return int32_t(best);
}

// The forward kernel for sm_90 copies the bias in chunks. Sources share the bias of a block as long as there are blocks for
// all SMs; beside a mask of rows, which is read where the bias is, keys are divided too.
inline bool divide_wide_forward(DenseForward *work, int sms) {
  const fdm_problem &p = work->call.p;
  if (!has_wide_tiles(work->call) || !work->call.bias_chunks || present(p.start)) return false;
  const int64_t sources = sources_of(work->call), most = wide_sources(wide_head_dim(p));
  work->tiles = int32_t(ceil_div(p.queries, kWideTile));
  work->splits = 1;
  work->split_tiles = int32_t(key_tiles_of(p));
  if (has_rows(p.mask)) {
    if (!work->call.mask_chunks || !work->call.shares_mask || !has_room_for_mask(p)) return false;
    work->slots = 1;
    work->split_tiles = choose_split_tiles(*work, sms);
  } else {
    const int64_t tiles = units_of(p) * work->tiles;
    work->slots = int32_t(sources >= most && tiles * (sources / most) >= sms ? most : 1);
    if (tiles * ceil_div(sources, work->slots) < sms / 2) return false;
  }
  work->groups = int32_t(ceil_div(sources, work->slots));
  return true;
}

// What depends on the tiles of keys of a split.
inline void count_splits(DenseForward *work, int64_t splits) {
  const fdm_problem &p = work->call.p;
  work->split_tiles = int32_t(ceil_div(key_tiles_of(p), splits));
  work->splits = wide_splits(*work);
  work->row_splits = work->tiles;
  if (work->splits == 1) return;
  work->row_splits = 0;
  for (int64_t tile = 0; tile < work->tiles; ++tile)
    work->row_splits += std::max(1, int32_t(ceil_div(visible_key_tiles(p, tile), work->split_tiles)));
}

// Finding the live tiles of a mask takes a launch, so there must be many.
inline bool finds_live_tiles(const DenseCall &call) {
  return has_rows(call.p.mask) && call.mask_chunks && call.shares_mask && call.p.keys > kMostKeysOfRows;
}
inline LiveTiles live_tiles(const DenseCall &call, void *words) {
  const fdm_problem &p = call.p;
  LiveTiles live{};
  live.words = static_cast<uint32_t *>(words);
  live.row_tiles = int32_t(ceil_div(p.queries, kWideTile));
  live.row_words = int32_t(ceil_div(p.keys, 32 * kWideTile));
  return live;
}
inline int64_t live_bytes(const DenseCall &call) {
  if (!finds_live_tiles(call)) return 0;
  const LiveTiles live = live_tiles(call, nullptr);
  return align_256(units_of(call.p) * live.row_tiles * live.row_words * int64_t(sizeof(uint32_t)));
}

} // namespace fdm::cuda
