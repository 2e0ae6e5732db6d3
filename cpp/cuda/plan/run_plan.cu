// SPDX-License-Identifier: BSD-3-Clause
// Plans of runs: the rows that keep the keys of each span and section, and the run of keys of each row tile.
//
// Spans are found from all keys. A warp then finds the first key that a row of its tile keeps, and the last key that
// not all rows keep, by sections, spans and keys. So it reads few keys, and is correct for any intervals.
#include "../host/launch.cuh"
#include "../route/helper_work.h"
#include "../tile/block_scan.cuh"
#include "list_rows.cuh"
#include "make_plan.h"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kSpanThreads = 256, kSpanWarps = kSpanThreads / 32, kOwnSpans = kSectionSpans / kSpanWarps;
static_assert(kSpanKeys == 64 && kSectionSpans == 32, "a lane has two keys of a span, or a span of a section");

__device__ __forceinline__ KeySpan span_of_none() { return {INT32_MAX, 0, 0, INT32_MAX}; }

__device__ __forceinline__ KeySpan span_of(const RowInterval &rows) {
  return {rows.any() ? rows.start : INT32_MAX, rows.any() ? rows.end : 0, rows.start, rows.end};
}
__device__ __forceinline__ KeySpan merged(const KeySpan &one, const KeySpan &other) {
  return {min(one.first, other.first), max(one.past, other.past), max(one.full_from, other.full_from),
          min(one.full_past, other.full_past)};
}
// Merges the spans of all lanes.
__device__ __forceinline__ KeySpan merged_lanes(const KeySpan &lane_span) {
  return {__reduce_min_sync(kAllLanes, lane_span.first), __reduce_max_sync(kAllLanes, lane_span.past),
          __reduce_max_sync(kAllLanes, lane_span.full_from), __reduce_min_sync(kAllLanes, lane_span.full_past)};
}

// A thread block finds the spans of a section.
__global__ void __launch_bounds__(kSpanThreads)
    find_spans(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan) {
  __shared__ KeySpan section;
  ptx::start_dependents();
  ptx::wait_for_kernel_ahead();
  const auto lists = static_cast<uint32_t>(plan.lists);
  const NumberedPart found =
      numbered_part(p, blockIdx.x / lists, kSectionKeys, [](const Sequence &s) { return s.k_begin; });
  const ListWork work = list_work(p, plan, blockIdx.x % lists, found.sequence_index, found.part);
  const int64_t first = work.part * kSectionKeys;
  if (first < 0 || first >= work.s.k_count) return; // a number without a section
  if (threadIdx.x == 0) section = span_of_none();
  __syncthreads();
  const ListRows reader(p, work);
  const auto keys = static_cast<int32_t>(min64(kSectionKeys, work.s.k_count - first));
  const int32_t own_key = warp_id() * kOwnSpans * kSpanKeys + lane_id();
  KeySpan lane_spans[2 * kOwnSpans]; // all are loaded before any are merged
#pragma unroll
  for (int n = 0; n < 2 * kOwnSpans; ++n)
    lane_spans[n] = own_key + 32 * n < keys ? span_of(reader(first + own_key + 32 * n)) : span_of_none();
  KeySpan *const spans = plan.spans + work.list * plan.list_spans +
                         span_number(p, work.s, work.sequence_index, kSpanKeys) + work.part * kSectionSpans;
#pragma unroll
  for (int n = 0; n < kOwnSpans; ++n) {
    const KeySpan span = merged_lanes(merged(lane_spans[2 * n], lane_spans[2 * n + 1]));
    const int number = warp_id() * kOwnSpans + n;
    if (lane_id() > 0 || number * kSpanKeys >= keys) continue;
    spans[number] = span;
    atomicMin(&section.first, span.first);
    atomicMax(&section.past, span.past);
    atomicMax(&section.full_from, span.full_from);
    atomicMin(&section.full_past, span.full_past);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    plan.sections[work.list * plan.list_sections + span_number(p, work.s, work.sequence_index, kSectionKeys) +
                  work.part] = section;
}

// A warp searches the keys of a tile's rows [first, past).
struct RunSearch {
  const ListRows reader;
  const KeySpan *spans, *sections;
  int32_t first, past;

  __device__ bool meets(const KeySpan &span) const { return span.first < past && span.past > first; }
  __device__ bool is_full(const KeySpan &span) const { return span.full_from <= first && span.full_past >= past; }

  // The first key before `limit` that a row keeps, or `limit`.
  __device__ int32_t first_kept(int32_t limit) const {
    const int32_t span_count = (limit + kSpanKeys - 1) / kSpanKeys, lane = lane_id();
    for (int32_t base = 0; base * kSectionKeys < limit; base += 32) {
      const int32_t section = base + lane;
      uint32_t near = __ballot_sync(kAllLanes, section * kSectionKeys < limit && meets(sections[section]));
      for (; near; near &= near - 1) {
        const int32_t first_span = (base + __ffs(near) - 1) * kSectionSpans;
        const bool close = first_span + lane < span_count && meets(spans[first_span + lane]);
        for (uint32_t next = __ballot_sync(kAllLanes, close); next; next &= next - 1) {
          const int32_t key = (first_span + __ffs(next) - 1) * kSpanKeys;
          const auto keeps = [&](int32_t own_key) { return own_key < limit && meets(span_of(reader(own_key))); };
          const bool low = keeps(key + lane), high = keeps(key + 32 + lane);
          const uint32_t lows = __ballot_sync(kAllLanes, low), highs = __ballot_sync(kAllLanes, high);
          if (lows | highs) return key + (lows ? __ffs(lows) - 1 : 31 + __ffs(highs));
        }
      }
    }
    return limit;
  }

  // The key after the last one before `limit` that not all rows keep, or 0.
  __device__ int32_t past_last_partial(int32_t limit) const {
    const int32_t lane = lane_id();
    for (int32_t top = (limit - 1) / kSectionKeys; limit > 0 && top >= 0; top -= 32) { // lanes count down
      const int32_t section = top - lane;
      uint32_t near = __ballot_sync(
          kAllLanes, section >= 0 && !((section + 1) * kSectionKeys <= limit && is_full(sections[section])));
      for (; near; near &= near - 1) {
        const int32_t last_span = (top - __ffs(near) + 2) * kSectionSpans - 1, span = last_span - lane;
        const bool close = span * kSpanKeys < limit && !((span + 1) * kSpanKeys <= limit && is_full(spans[span]));
        for (uint32_t next = __ballot_sync(kAllLanes, close); next; next &= next - 1) {
          const int32_t key = (last_span - __ffs(next) + 1) * kSpanKeys;
          const auto partial = [&](int32_t own_key) { return own_key < limit && !is_full(span_of(reader(own_key))); };
          const bool low = partial(key + lane), high = partial(key + 32 + lane);
          const uint32_t lows = __ballot_sync(kAllLanes, low), highs = __ballot_sync(kAllLanes, high);
          if (lows | highs) return key + (highs ? 64 - __clz(highs) : 32 - __clz(lows));
        }
      }
    }
    return 0;
  }
};

// A warp finds the run of a tile.
__global__ void __launch_bounds__(kRunThreads)
    find_runs(const __grid_constant__ fdm_problem p, const __grid_constant__ Plan plan) {
  ptx::start_dependents();
  ptx::wait_for_kernel_ahead();
  const int64_t number = int64_t(blockIdx.x) * (kRunThreads / 32) + warp_id();
  if (number >= plan.lists * plan.tiles) return;
  const ListWork work = tile_of_list(p, plan, static_cast<uint32_t>(number));
  const int64_t first_row = work.part * kTileRows, past_row = min64(work.s.q_count, first_row + kTileRows);
  TileRun run{};
  if (first_row >= 0 && first_row < past_row) { // else a number without a tile
    const auto seen = [&](int64_t rows) {       // keys that the first `rows` rows see
      return static_cast<int32_t>(clamp64(rows + work.s.causal_off, 0, work.s.k_count));
    };
    const auto place = [&](int64_t size) { return span_number(p, work.s, work.sequence_index, size); };
    const RunSearch search{ListRows(p, work), plan.spans + work.list * plan.list_spans + place(kSpanKeys),
                           plan.sections + work.list * plan.list_sections + place(kSectionKeys),
                           static_cast<int32_t>(first_row), static_cast<int32_t>(past_row)};
    const int32_t past_key = seen(past_row), past_full = seen(first_row + 1);
    run.first = search.first_kept(past_key);
    run.count = past_key - run.first;
    run.full_first = max(run.first, search.past_last_partial(past_full));
    run.full = max(0, past_full - run.full_first);
  }
  if (lane_id() == 0) plan.runs[work.list * plan.tiles + tile_number(p, work.s, work.sequence_index, work.part)] = run;
}

} // namespace

cudaError_t launch_runs(const fdm_problem &p, const Plan &plan, const PlanRoute &route, cudaStream_t stream) {
  if (cudaError_t error =
          launch<Overlap::kernel_ahead>(find_spans, route.chunk_blocks, kSpanThreads, 0, stream, p, plan))
    return error;
  return launch<Overlap::kernel_ahead>(find_runs, route.blocks, kRunThreads, 0, stream, p, plan);
}

} // namespace fdm::cuda
