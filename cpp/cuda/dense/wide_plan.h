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

template <class Function> cudaError_t with_wide_types(const fdm_problem &p, const Function &function) {
  return with_types<kMaxWideHeadDim>(p, WideHeadDims{}, function);
}

// Whether the kernels for sm_90 serve problems of these sizes. They do not where most of their tiles would be empty.
inline bool has_wide_sizes(const fdm_problem &p) {
  if (FDM_TILE_ARCH != 90 || p.softcap > 0 || p.head_dim > kMaxWideHeadDim) return false;
  return 2 * p.queries * p.keys >= round_up(p.queries, kWideTile) * round_up(p.keys, kWideTile);
}
inline bool has_wide_tiles(const DenseCall &call) { return call.aligned && has_wide_sizes(call.p); }

// Whether a problem has windows (FusedEpilogue). It does not where most of its tiles, or most SMs, would be idle.
inline bool has_windows(const DenseCall &call) {
  constexpr int64_t kLeastSources = 1024;
  const fdm_problem &p = call.p;
  if (FDM_TILE_ARCH != 90 || p.softcap > 0 || !call.aligned) return false;
  if (p.head_dim > kWindowHeadDim || wide_head_dim(p) != kWindowHeadDim) return false;
  return p.queries <= kWindow && p.keys <= kWindow && 2 * p.queries * p.keys >= kWindow * kWindow && call.batches > 1 &&
         group_size(p) == 1 && p.batch * p.heads >= kLeastSources;
}

// Whether clusters complete the gradients of a problem (FusedEpilogue::exchange).
inline bool has_clusters(const DenseCall &call) {
  const fdm_problem &p = call.p;
  return has_wide_tiles(call) && !has_windows(call) && wide_head_dim(p) <= 64 && p.queries <= 2 * kWideTile &&
         p.keys <= 2 * kWideTile && group_size(p) == 1;
}

inline bool has_room_for_mask(const fdm_problem &p) {
  return has_room_for_mask(wide_head_dim(p), p.bias.dtype == FDM_FLOAT32);
}

inline int64_t units_of(const fdm_problem &p) { return p.bias.shape[0] * p.bias.shape[1]; }

inline int wide_rows(const DenseForward &work) { return work.pairs || work.halves ? kWideTile / 2 : kWideTile; }

// Whether the sources of a bias come in pairs of query heads that share K, V and the mask.
inline bool has_head_pairs(const DenseCall &call) {
  const fdm_problem &p = call.p;
  const bool mask_of_heads = present(p.mask) && p.mask.shape[1] > p.kv_heads;
  return call.heads % 2 == 0 && group_size(p) % 2 == 0 && call.shares_mask && !mask_of_heads && has_room_for_mask(p);
}

inline void use_whole_tiles(DenseForward *work, int sms) {
  work->splits = 1;
  work->blocks = int32_t(std::min<int64_t>(units_of(work->call.p) * work->groups * work->tiles, sms));
}

// Chooses how the forward kernel for sm_90 divides its work, by the time that it takes. Its unit is that of a step: of a
// tile of scores of 128 x 128, or of what a task takes beside those.
//
// Whole tiles of rows are gone through forth and back, the longest first, so the first or the last block of threads
// has most to do. Equal shares take no longer than they must, but then there are partial results, and a launch that merges
// them: about three steps, and one for each 2 MB. Returns the time.
inline int64_t choose_shares(DenseForward *work, int sms) {
  constexpr int64_t kLeastSteps = 2, kMergeSteps = 3, kStepBytes = int64_t(2) << 20;
  const fdm_problem &p = work->call.p;
  const int rows = wide_rows(*work);
  int64_t steps = work->tiles;
  for (int64_t tile = 0; tile < work->tiles; ++tile) steps += visible_key_tiles(p, tile, rows);
  const int64_t groups = units_of(p) * work->groups, tasks = groups * work->tiles, all = groups * steps;
  const auto steps_of = [&](int64_t task) {
    return int64_t(task < tasks ? 1 + visible_key_tiles(p, work->tiles - 1 - task / groups, rows) : 0);
  };
  int64_t of_first = 0, of_last = 0;
  for (int64_t turn = 0; turn * work->blocks < tasks; ++turn) {
    const int64_t near = steps_of(turn * work->blocks), far = steps_of((turn + 1) * work->blocks - 1);
    of_first += turn % 2 ? far : near;
    of_last += turn % 2 ? near : far;
  }
  // A tile of rows has its parts in blocks of threads that follow each other.
  const int64_t longest = steps_of(0) - 1, least_steps = std::max(kLeastSteps, ceil_div(longest, kMaxDenseSplits - 1));
  const int64_t shares = std::clamp<int64_t>(all / least_steps, 1, sms);
  const int64_t splits = 1 + ceil_div(longest - 1, all / shares);
  const int64_t bytes = (tasks + shares) * kWideTile * p.head_dim * int64_t(sizeof(float));
  const int64_t shares_time = ceil_div(all, shares) + 1 + kMergeSteps + bytes / kStepBytes;
  // The kernel counts steps times blocks with 32 bits.
  const int64_t whole_time = std::max(of_first, of_last);
  if (splits == 1 || shares_time >= whole_time || (all + 1) * (shares + 1) > INT32_MAX) return whole_time;
  work->splits = int32_t(splits);
  work->blocks = int32_t(shares);
  work->steps = int32_t(steps);
  return shares_time;
}

// Whether tasks of half as many rows, whose keys the consumer warpgroups divide, take less than `time` steps. All of them need
// SMs at the same time. A block of keys takes 7 tenths of a step then, or 8 with 128 columns; what a task takes beside those
// one step, and merging what the warpgroups have 6 tenths (seen on an H100).
inline bool takes_halves(const DenseForward &work, int64_t time, int sms) {
  const fdm_problem &p = work.call.p;
  const int64_t tiles = ceil_div(p.queries, kWideTile / 2), blocks = visible_key_tiles(p, tiles - 1, kWideTile / 2);
  const int64_t tenths = 16 + (wide_head_dim(p) <= 64 ? 7 : 8) * blocks;
  return units_of(p) * sources_of(work.call) * tiles <= sms && tenths < 10 * time;
}
inline void use_halves(DenseForward *work, int sms) {
  work->pairs = false;
  work->halves = true;
  work->slots = 1;
  work->groups = int32_t(sources_of(work->call));
  work->tiles = int32_t(ceil_div(work->call.p.queries, wide_rows(*work)));
  use_whole_tiles(work, sms);
}

// The forward kernel for sm_90 copies the bias in chunks. Sources share the bias of a block as long as there are blocks for
// all SMs. Where they are pairs of heads, or there is a mask of rows, keys may be divided too. Room for partial results is
// asked for without `may_take_halves`: another device may have too few SMs for halves, and divide the keys.
inline bool divide_wide_forward(DenseForward *work, int sms, bool may_take_halves) {
  const fdm_problem &p = work->call.p;
  if (!has_wide_tiles(work->call) || !work->call.bias_chunks || present(p.start)) return false;
  if (has_rows(p.mask) && (!work->call.mask_chunks || !work->call.shares_mask || !has_room_for_mask(p))) return false;
  const int64_t sources = sources_of(work->call), most = wide_sources(wide_head_dim(p));
  work->pairs = has_head_pairs(work->call);
  const bool shares = work->pairs || has_rows(p.mask);
  work->tiles = int32_t(ceil_div(p.queries, wide_rows(*work)));
  work->slots = work->pairs ? 2 : 1;
  if (!shares) {
    const int64_t tiles = units_of(p) * work->tiles;
    work->slots = int32_t(sources >= most && tiles * (sources / most) >= sms ? most : 1);
    if (tiles * ceil_div(sources, work->slots) < sms / 2) {
      constexpr int64_t kMostSteps = 17; // of a tile: with more, other kernels, which divide the keys, are faster
      const bool halves = may_take_halves && takes_halves(*work, kMostSteps, sms);
      if (halves) use_halves(work, sms);
      return halves;
    }
  }
  work->groups = int32_t(ceil_div(sources, work->slots));
  use_whole_tiles(work, sms);
  if (!shares) return true;
  const int64_t time = choose_shares(work, sms);
  if (may_take_halves && takes_halves(*work, time, sms)) use_halves(work, sms);
  return true;
}

// Finding the live tiles of a mask takes a launch, so there must be many.
inline bool finds_live_tiles(const DenseCall &call) {
  return has_rows(call.p.mask) && call.mask_chunks && call.shares_mask && call.p.keys > kMostKeysOfRows;
}
// The forward pass may have little to save by them.
inline bool finds_live_tiles(const DenseForward &work) {
  constexpr int64_t kLeastTiles = 2048; // of scores, of all sources, as if none were empty
  const fdm_problem &p = work.call.p;
  const int64_t visible = ceil_div(p.queries, kWideTile) * ceil_div(p.keys, kWideTile) / (is_causal(p) ? 2 : 1);
  return finds_live_tiles(work.call) && visible * p.batch * p.heads >= kLeastTiles;
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
