// SPDX-License-Identifier: BSD-3-Clause
// Forget gates as a bias per key, the rows at which keys have decayed, and the gradient of the gates.
//
// A key decays in its own chunk of the row or in a later one. Sums only fall, so the ends of the keys of a chunk are
// in key order. The totals of the chunks tell which chunk has the end of each key. The block sums these chunks again;
// all blocks of a row together sum at most twice as many chunks as the row has.
#include "gates.h"

#include "../host/launch.cuh"
#include "chunk_sums.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

template <bool kBackward>
__global__ void __launch_bounds__(kGateThreads) sum_chunks(const __grid_constant__ GateParams params) {
  __shared__ ChunkSums shared;
  ptx::start_dependents();
  const GateChunk chunk(params);
  const GateRow<kBackward> row(params.f, chunk.row);
  const int32_t begin = row.places(chunk.past - 1).begin; // of the sequence that may continue in the next chunk
  double sum = 0;
#pragma unroll
  for (int i = 0; i < kThreadGates; ++i) {
    const int32_t place = chunk.place(i);
    if (place >= begin && place < chunk.past) sum += row(place);
  }
  sum = shared.total(sum);
  if (threadIdx.x == 0) params.totals[blockIdx.x] = sum;
}

// The running sums of a chunk, and the sequences of its places.
template <class Row> struct SummedChunk {
  double sum[kThreadGates];
  int32_t begin[kThreadGates], past[kThreadGates];

  __device__ SummedChunk(ChunkSums &shared, const Row &row, int32_t first, int32_t past_place) {
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      const int32_t place = first + i * kGateThreads + static_cast<int32_t>(threadIdx.x);
      const bool exists = place < past_place;
      const TokenRange sequence = exists ? row.places(place) : TokenRange{INT32_MAX, INT32_MAX};
      begin[i] = sequence.begin;
      past[i] = sequence.past;
      sum[i] = exists ? row(place) : 0;
    }
    shared.sum(first, sum, begin);
  }
};

struct DecayShared {
  ChunkSums sums;
  double of_chunk[kGateChunk]; // running sums of the chunk that is searched
  double reached[kGateChunk];  // running sums at the ends of chunks, from the begin of the block's own chunk on
  uint32_t next;
};

// The index of this thread's item i in a chunk.
__device__ __forceinline__ int own_item(int i) { return i * kGateThreads + static_cast<int>(threadIdx.x); }

// Advances each place to the first of the descending `numbers` before `search_end` that is with `base` below the
// limit, or to `search_end`. The searches of a thread run together, so that their loads overlap.
__device__ __forceinline__ void search_below(const double *numbers, double base, const double (&limit)[kThreadGates],
                                             const int32_t (&search_end)[kThreadGates],
                                             int32_t (&place)[kThreadGates]) {
#pragma unroll 1
  for (int step = kGateChunk; step > 0; step /= 2)
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      const int32_t next = place[i] + step;
      if (next <= search_end[i] && !(base + numbers[next - 1] < limit[i])) place[i] = next;
    }
}

using Row = GateRow<false>;

// Finds the places at which the keys of a chunk have decayed.
struct DecaySearch {
  static constexpr uint32_t kNone = UINT32_MAX;
  const GateParams &params;
  const Row &row;
  DecayShared &shared;
  int32_t end[kThreadGates], past[kThreadGates]; // end: of keys; past: of sequences
  double limit[kThreadGates];                    // a key has decayed at a sum below this
  bool open[kThreadGates];                       // the end is not found yet

  __device__ DecaySearch(DecayShared &shared_, const GateParams &params_, const Row &row_, const GateChunk &chunk,
                         const SummedChunk<Row> &summed)
      : params(params_), row(row_), shared(shared_) {
    keep_sums(summed);
    int32_t found[kThreadGates], search_end[kThreadGates];
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      past[i] = summed.past[i];
      limit[i] = summed.sum[i] + params.f.prune;
      found[i] = chunk.place(i) + 1 - chunk.begin;
      search_end[i] = chunk.place(i) < chunk.past ? min(past[i], chunk.past) - chunk.begin : 0;
    }
    search_below(shared.of_chunk, 0, limit, search_end, found);
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      end[i] = chunk.begin + found[i];
      open[i] = chunk.place(i) < chunk.past && end[i] == chunk.past && past[i] > chunk.past;
    }
    double before = shared.of_chunk[kGateChunk - 1];
    // kGateChunk chunks at a time.
    for (int32_t first = chunk.number + 1; __syncthreads_or(any_open()); first += kGateChunk) {
      reach(chunk, first, before);
      search(first, before);
      before = shared.reached[kGateChunk - 1];
    }
  }

private:
  __device__ bool any_open() const {
    bool any = false;
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) any |= open[i];
    return any;
  }

  __device__ void keep_sums(const SummedChunk<Row> &summed) {
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) shared.of_chunk[own_item(i)] = summed.sum[i];
    __syncthreads();
  }

  // Computes the running sums of the totals of the chunks from `first` on.
  __device__ void reach(const GateChunk &chunk, int32_t first, double before) {
    double value[kThreadGates];
    int32_t all[kThreadGates];
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      const int64_t number = int64_t{first} + own_item(i);
      value[i] = number < params.chunks ? chunk.totals(params)[number] : 0;
      all[i] = -1;
    }
    shared.sums.sum(0, value, all);
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) shared.reached[own_item(i)] = before + value[i];
    __syncthreads();
  }

  // Searches for ends in the chunks from `first` on, whose sums are in `reached`.
  __device__ void search(int32_t first, double before) {
    int32_t found[kThreadGates] = {}, search_end[kThreadGates] = {};
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      // The last chunk of a sequence has its total only if the next sequence does not begin in that chunk.
      const bool whole = past[i] == row.count || past[i] % kGateChunk == 0;
      if (open[i]) search_end[i] = static_cast<int32_t>(min64(last_chunk(i) + whole - first, kGateChunk));
    }
    search_below(shared.reached, 0, limit, search_end, found);
    uint32_t wanted[kThreadGates]; // the chunk with the end
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) {
      wanted[i] = kNone;
      if (!open[i]) continue;
      const int32_t number = first + found[i], last = last_chunk(i);
      if (found[i] < search_end[i] || number == last) wanted[i] = static_cast<uint32_t>(number);
      if (number > last) end[i] = past[i];
      open[i] = found[i] == search_end[i] && number < last;
    }
    for (uint32_t number = min_wanted(wanted); number != kNone; number = min_wanted(wanted)) {
      const int32_t begin = static_cast<int32_t>(number) * kGateChunk;
      const auto past_chunk = static_cast<int32_t>(min64(row.count, int64_t{begin} + kGateChunk));
      keep_sums(SummedChunk<Row>(shared.sums, row, begin, past_chunk));
      const int32_t n = static_cast<int32_t>(number) - first;
#pragma unroll
      for (int i = 0; i < kThreadGates; ++i) {
        found[i] = 0;
        search_end[i] = wanted[i] == number ? min(past[i], past_chunk) - begin : 0;
      }
      search_below(shared.of_chunk, n == 0 ? before : shared.reached[n - 1], limit, search_end, found);
#pragma unroll
      for (int i = 0; i < kThreadGates; ++i) {
        if (wanted[i] != number) continue;
        end[i] = begin + found[i];
        wanted[i] = kNone;
      }
    }
  }

  __device__ int32_t last_chunk(int i) const { return (past[i] - 1) / kGateChunk; } // of the sequence

  // The lowest chunk number that a thread wants.
  __device__ uint32_t min_wanted(const uint32_t (&wanted)[kThreadGates]) {
    uint32_t lowest = kNone;
#pragma unroll
    for (int i = 0; i < kThreadGates; ++i) lowest = min(lowest, wanted[i]);
    lowest = __reduce_min_sync(kAllLanes, lowest);
    if (threadIdx.x == 0) shared.next = kNone;
    __syncthreads();
    if (lane_id() == 0) atomicMin(&shared.next, lowest);
    __syncthreads();
    return shared.next; // a barrier precedes the next call, in keep_sums or after the search
  }
};

__global__ void __launch_bounds__(kGateThreads, 3) write_decay(const __grid_constant__ GateParams params) {
  __shared__ DecayShared shared;
  const fdm_forgetting &f = params.f;
  const GateChunk chunk(params);
  const Row row(f, chunk.row);
  const SummedChunk<Row> summed(shared.sums, row, chunk.begin, chunk.past);
  ptx::wait_for_kernel_ahead();
  const double before = sum_before(shared.sums, params, chunk, row.places(chunk.begin).begin);
#pragma unroll
  for (int i = 0; i < kThreadGates; ++i) {
    const int32_t place = chunk.place(i);
    if (place >= chunk.past) continue;
    const double sum = summed.begin[i] < chunk.begin ? before + summed.sum[i] : summed.sum[i];
    store_number(f.bias, row.offset(f.bias, place), row.is_token(place) ? -sum : -INFINITY);
  }
  if (!present(f.end)) return;
  const DecaySearch ends(shared, params, row, chunk, summed);
#pragma unroll
  for (int i = 0; i < kThreadGates; ++i) {
    const int32_t place = chunk.place(i);
    if (place >= chunk.past) continue;
    const int32_t begin = row.places(place).begin; // found again, since the search has no registers for it
    static_cast<int32_t *>(f.start.data)[row.offset(f.start, place)] = place - begin;
    static_cast<int32_t *>(f.end.data)[row.offset(f.end, place)] = row.is_token(place) ? ends.end[i] - begin : 0;
  }
}

__global__ void __launch_bounds__(kGateThreads, 3) write_gate_gradient(const __grid_constant__ GateParams params) {
  __shared__ ChunkSums shared;
  const fdm_forgetting &f = params.f;
  const GateChunk chunk(params);
  const GateRow<true> row(f, chunk.row);
  const SummedChunk<GateRow<true>> summed(shared, row, chunk.begin, chunk.past);
  ptx::wait_for_kernel_ahead();
  const double before = sum_before(shared, params, chunk, row.places(chunk.begin).begin);
#pragma unroll
  for (int i = 0; i < kThreadGates; ++i) {
    const int32_t place = chunk.place(i);
    if (place >= chunk.past) continue;
    const double sum = summed.begin[i] < chunk.begin ? before + summed.sum[i] : summed.sum[i];
    const bool has_gradient = row.is_token(place) && row.gate(place) >= f.least;
    store_number(f.dlog_forget, row.offset(f.dlog_forget, place), has_gradient ? -sum : 0);
  }
}

// Launches a kernel, after that of the totals if there is more than one chunk.
template <bool kBackward>
cudaError_t launch_gates(void (*kernel)(GateParams), const fdm_forgetting &f, void *workspace) {
  const GateRoute route = gate_route(f);
  const auto stream = static_cast<cudaStream_t>(f.context.stream);
  const GateParams params{f, route.chunks, at<double>(workspace, route.totals)};
  if (!route.totals.exists()) return launch(kernel, route.blocks, kGateThreads, 0, stream, params);
  const cudaError_t error = launch(sum_chunks<kBackward>, route.blocks, kGateThreads, 0, stream, params);
  return error ? error : launch<Overlap::kernel_ahead>(kernel, route.blocks, kGateThreads, 0, stream, params);
}

} // namespace

cudaError_t run_forget(const fdm_forgetting &f, void *workspace) {
  return launch_gates<false>(write_decay, f, workspace);
}

cudaError_t run_forget_backward(const fdm_forgetting &f, void *workspace) {
  return launch_gates<true>(write_gate_gradient, f, workspace);
}

} // namespace fdm::cuda
