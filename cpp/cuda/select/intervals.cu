// SPDX-License-Identifier: BSD-3-Clause
// Selection for a bias per key, into one interval of rows per key.
//
// With a causal limit the keys arrive in order, and each arrival may drive one key out of the window of the best
// keys. A heap would process one key at a time. Here the row of keys is divided into independent chunks:
//  1. The window after each chunk is the best of all keys up to there, found by radix selection. This reads the row
//     once per chunk, at most RouteTable::select_chunks times in all, mostly from L2.
//  2. A key of a chunk arrives if the window before the chunk does not exclude it. If the window before holds a key,
//     or a key arrives, and the window after does not hold it, it is driven out within the chunk. No other chunk can
//     drive it out. Such a key x leaves with the n-th arrival better than x, where n is the room that the window
//     before has below x. These keys are few, so all pairs of them are compared.
//  3. A key stays for keep_last more seen keys. The first keys are not ranked and stay to the end.
// Exactly one block writes each key's interval: that of its own chunk if it never enters, leaves within the chunk or
// stays to the end, else that of the chunk in which it leaves.
#include "../host/launch.cuh"
#include "../plan/plan.cuh"
#include "ptx/dependent.cuh"
#include "radix_select.cuh"
#include "seen_keys.cuh"
#include "select.h"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kChunkItems = kChunkRoom / kThreads;

// The results of the first kernel for each chunk: the window after it, and its seen keys, if they are counted.
struct ChunkResults {
  Window *windows;
  SeenWord *seen; // null: not counted
};

int64_t window_bytes(int64_t chunks) { return align_256(chunks * int64_t{sizeof(Window)}); }

struct IntervalWork {
  SelectionRow row;
  int64_t chunk;
  int32_t begin, end;   // its keys
  Window *windows;      // after each chunk of the row
  SeenWord *chunk_seen; // of the chunk's keys
  SeenKeys seen;        // of the row
  int64_t keep_last;
  int32_t *row_start, *row_end; // the results for the row's first key
  int64_t start_stride, end_stride;

  // Chunks count down: the last ones have the most keys before them.
  __device__ IntervalWork(const fdm_selection &s, const SelectionChunks &chunks, const ChunkResults &results) {
    // A grid has fewer than 2^31 blocks, so 32-bit divisions suffice.
    const auto heads = static_cast<uint32_t>(s.start.shape[1]), rows = gridDim.x / static_cast<uint32_t>(chunks.count);
    const uint32_t list = blockIdx.x % rows, head = list % heads;
    const auto begin_of = [](const Sequence &sequence) { return sequence.k_begin; };
    NumberedPart part = numbered_part(s, (gridDim.x - 1 - blockIdx.x) / rows, chunks.keys, begin_of);
    if (!is_varlen(s)) part.sequence_index = list / heads;
    const int64_t b = part.sequence_index, batch = is_varlen(s) ? 0 : b;
    chunk = part.part;
    row = selection_row(s, s.start, b, head);
    begin = static_cast<int32_t>(min64(row.k_count, chunk * chunks.keys));
    end = static_cast<int32_t>(min64(row.k_count, (chunk + 1) * chunks.keys));
    int64_t first_chunk = list * chunks.count;
    if (is_varlen(s)) first_chunk += first_number(row.k_begin, b, chunks.keys);
    windows = results.windows + first_chunk;
    seen = {nullptr, static_cast<int32_t>(row.k_count)};
    if (results.seen) seen.words = results.seen + first_chunk * (chunks.keys / 32);
    chunk_seen = results.seen ? results.seen + (first_chunk + chunk) * (chunks.keys / 32) : nullptr;
    keep_last = s.keep_last;
    start_stride = s.start.stride[3];
    end_stride = s.end.stride[3];
    row_start = static_cast<int32_t *>(s.start.data) + batch * s.start.stride[0] + head * s.start.stride[1] +
                row.k_begin * start_stride;
    row_end = static_cast<int32_t *>(s.end.data) + batch * s.end.stride[0] + head * s.end.stride[1] +
              row.k_begin * end_stride;
  }

  // Invalid bounds of sequences may give a block a chunk before the first.
  __device__ bool absent() const { return chunk < 0 || begin >= end; }
  // This thread's i-th key of the chunk.
  __device__ int32_t own_key(int i) const { return begin + i * kThreads + static_cast<int32_t>(threadIdx.x); }
  __device__ int64_t first_row(int64_t key) const { return max64(0, key - row.causal_off); }

  // The row at which a key leaves that the window holds up to `arrival`. A key that never enters has its own arrival.
  __device__ int64_t past_row(int32_t arrival) const { return row_of_arrival(row, seen.key_after(arrival, keep_last)); }

  // A key that no row selects has the interval [0, 0).
  __device__ void write(int64_t key, int64_t past_row) const {
    const int64_t first = first_row(key);
    const bool selected = first < past_row;
    row_start[key * start_stride] = selected ? static_cast<int32_t>(first) : 0;
    row_end[key * end_stride] = selected ? static_cast<int32_t>(past_row) : 0;
  }
};

template <int kBits>
__global__ void __launch_bounds__(kThreads, 2)
    find_windows(const __grid_constant__ fdm_selection s, const __grid_constant__ SelectionChunks chunks,
                 ChunkResults results) {
  using Select = RadixSelect<kThreads>;
  __shared__ typename Select::Shared shared;
  __shared__ BlockRanks<kThreads, kChunkItems> ranks;
  ptx::start_dependents();
  const IntervalWork work(s, chunks, results);
  if (work.absent()) return;
  Candidates<kBits> candidates(s, work.row, 0);
  if (work.chunk_seen) {
    const uint32_t before = Select::count_seen(shared, candidates.mask, work.begin);
    write_seen(work.chunk_seen, static_cast<int32_t>(chunks.keys / 32), ranks, candidates.mask, work.begin, work.end,
               before);
    candidates.first_ranked = Select::last_seen(shared, candidates.mask, work.end, s.keep_first) + 1;
  } else {
    candidates.first_ranked = static_cast<int32_t>(s.keep_first);
  }
  const Window window = Select::select(shared, candidates, work.end, s.window);
  if (threadIdx.x == 0) work.windows[work.chunk] = window;
}

// A value and a key in one number. Larger numbers come earlier in the order of selection.
__device__ __forceinline__ uint64_t order_of(uint32_t value, int32_t key) {
  return static_cast<uint64_t>(value) << 32 | (~static_cast<uint32_t>(key));
}
__device__ __forceinline__ int32_t key_of(uint64_t order) {
  return static_cast<int32_t>(~static_cast<uint32_t>(order));
}

struct ChunkChanges {
  uint64_t arrivals[kChunkRoom]; // in key order
  uint64_t leavers[kChunkRoom];  // keys before the chunk, in any order
  BlockRanks<kThreads, kChunkItems> ranks;
  int32_t leaver_count;
};

// Puts the keys of the chunk that the window before does not exclude into changes.arrivals, and returns their number.
// Writes the intervals of keys that never arrive or never leave. `values` belong to the keys of own_key().
template <int kBits>
__device__ int find_arrivals(ChunkChanges &changes, const IntervalWork &work, const Candidates<kBits> &candidates,
                             const uint32_t (&values)[kChunkItems], const Window &before, const Window &last) {
  uint64_t order[kChunkItems];
  bool arrives[kChunkItems];
  uint32_t rank[kChunkItems];
#pragma unroll
  for (int i = 0; i < kChunkItems; ++i) {
    const int32_t j = work.own_key(i);
    arrives[i] = false;
    if (j >= work.end) continue;
    const bool ranks = candidates.ranks(j);
    arrives[i] = ranks && before.holds(values[i], j);
    order[i] = order_of(values[i], j);
    if (values[i] == 0)
      work.write(j, 0);
    else if (!ranks || (arrives[i] && last.holds(values[i], j)))
      work.write(j, work.row.q_count);
    else if (!arrives[i])
      work.write(j, work.past_row(j));
  }
  const uint32_t total = changes.ranks.rank(arrives, rank);
#pragma unroll
  for (int i = 0; i < kChunkItems; ++i)
    if (arrives[i]) changes.arrivals[rank[i]] = order[i];
  return static_cast<int>(total);
}

// Finds the keys before the chunk that the window before holds and the window after does not. There are at most as
// many as arrivals. Invalid bounds of sequences may leave some windows unset, which breaks this limit.
template <int kBits>
__device__ void find_leavers(ChunkChanges &changes, const IntervalWork &work, const Candidates<kBits> &candidates,
                             const Window &before, const Window &after) {
  constexpr int kLoadsInFlight = 8;
  for (int32_t first = threadIdx.x; first < work.begin; first += kLoadsInFlight * kThreads) {
    uint32_t value[kLoadsInFlight];
#pragma unroll
    for (int n = 0; n < kLoadsInFlight; ++n)
      value[n] = first + n * kThreads < work.begin ? candidates(first + n * kThreads) : 0;
#pragma unroll
    for (int n = 0; n < kLoadsInFlight; ++n) {
      const int32_t j = first + n * kThreads;
      if (!before.holds(value[n], j) || after.holds(value[n], j)) continue;
      const int place = atomicAdd(&changes.leaver_count, 1);
      if (place < kChunkRoom) changes.leavers[place] = order_of(value[n], j);
    }
  }
}

// The key whose arrival drives out x: the n-th arrival before x in the order. It is x itself if x cannot enter,
// because the window before is full of better keys.
__device__ int32_t driven_out_by(const ChunkChanges &changes, int leavers, int arrivals, int64_t room, uint64_t x) {
  constexpr int kLoadsInFlight = 8; // loads that are under way together
  int64_t missing = room;
#pragma unroll kLoadsInFlight
  for (int n = 0; n < leavers; ++n) missing += changes.leavers[n] <= x;
  if (missing == 0) return key_of(x);
  int n = 0;
  for (; n + kLoadsInFlight <= arrivals; n += kLoadsInFlight) {
    int better = 0;
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) better += changes.arrivals[n + i] > x;
    if (better >= missing) break;
    missing -= better;
  }
  for (; n < arrivals; ++n) {
    missing -= changes.arrivals[n] > x;
    if (missing == 0) break;
  }
  return key_of(changes.arrivals[min(n, kChunkRoom - 1)]);
}

template <int kBits>
__global__ void __launch_bounds__(kThreads, 2)
    write_intervals(const __grid_constant__ fdm_selection s, const __grid_constant__ SelectionChunks chunks,
                    ChunkResults results) {
  __shared__ ChunkChanges changes;
  const IntervalWork work(s, chunks, results);
  Candidates<kBits> candidates(s, work.row, 0);
  const bool absent = work.absent();
  const int64_t last_chunk = ceil_div(work.row.k_count, chunks.keys) - 1;
  uint32_t values[kChunkItems];
#pragma unroll
  for (int i = 0; i < kChunkItems; ++i)
    values[i] = !absent && work.own_key(i) < work.end ? candidates.value(work.own_key(i)) : 0;
  if (threadIdx.x == 0) changes.leaver_count = 0;
  ptx::wait_for_kernel_ahead(); // the results can be read from here on
  if (absent) return;
  if (s.keep_first > 0) candidates.first_ranked = work.seen.key_of_rank(static_cast<int32_t>(s.keep_first), 0);
  const Window before =
      work.chunk > 0 ? work.windows[work.chunk - 1] : (s.window > 0 ? open_window(0) : closed_window());
  const Window after = work.windows[work.chunk], last = work.windows[last_chunk];
  const int arrivals = find_arrivals(changes, work, candidates, values, before, last);
  if (before.size + arrivals == after.size) return; // nothing leaves
  find_leavers(changes, work, candidates, before, after);
  __syncthreads();

  const int64_t room = s.window - before.size;
  const int leavers = min(changes.leaver_count, kChunkRoom);
  for (int n = threadIdx.x; n < leavers + arrivals; n += kThreads) {
    const uint64_t x = n < leavers ? changes.leavers[n] : changes.arrivals[n - leavers];
    if (n >= leavers && after.holds(static_cast<uint32_t>(x >> 32), key_of(x))) continue;
    const int32_t cause = driven_out_by(changes, leavers, arrivals, room, x);
    // A key that an earlier key drives out never enters the window.
    work.write(key_of(x), work.past_row(max(cause, key_of(x))));
  }
}

} // namespace

// The size follows from bias and mask, whose broadcast shape the result has: callers ask for it before they have a
// result.
int64_t interval_selection_workspace_bytes(const fdm_selection &s) {
  const int64_t heads = max64(s.bias.shape[1], s.mask.shape[1]);
  const int64_t batches = is_varlen(s) ? 1 : max64(s.bias.shape[0], s.mask.shape[0]);
  const SelectionChunks chunks = selection_chunks(s, kRouteTable);
  const int64_t count = heads * batches * chunks.count;
  return window_bytes(count) + (counts_seen_keys(s) ? count * (chunks.keys / 32) * int64_t{sizeof(SeenWord)} : 0);
}

cudaError_t select_intervals(const fdm_selection &s, const SelectionRoute &route, void *workspace,
                             cudaStream_t stream) {
  if (s.keys == 0) return cudaSuccess;
  const SelectionChunks &chunks = route.chunks;
  ChunkResults results{static_cast<Window *>(workspace), nullptr};
  if (counts_seen_keys(s))
    results.seen = reinterpret_cast<SeenWord *>(static_cast<char *>(workspace) + window_bytes(route.blocks));
  return with_bias_bits(s, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    const cudaError_t error = launch(find_windows<kBits>, route.blocks, kThreads, 0, stream, s, chunks, results);
    if (error) return error;
    return launch<Overlap::kernel_ahead>(write_intervals<kBits>, route.blocks, kThreads, 0, stream, s, chunks, results);
  });
}

} // namespace fdm::cuda
