// SPDX-License-Identifier: BSD-3-Clause
#include "relative_bias.h"

#include <cuda_runtime.h>

#include "../route/workspaces.h"
#include "../tile/key_ring.cuh"
#include "launch.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = kRelativeThreads;
static_assert(sizeof(RelativeBias) == kRelativeBiasBytes);

// Whether any existing row of the tile keeps the column of an entry.
__device__ bool keeps(const TileColumns &columns, int32_t c, const ColumnEntry &entry, int32_t rows) {
  if (c < columns.full) return true;
  const RowWord word = column_word(columns, c, entry.key, entry.start, entry.end, entry.word);
  uint32_t any = 0;
#pragma unroll
  for (int part = 0; part < kTileRows / 32; ++part) {
    const int there = rows - 32 * part;
    any |= there >= 32 ? word.part[part] : there > 0 ? word.part[part] & ((1u << there) - 1) : 0u;
  }
  return any != 0;
}

// One thread block finds the reference of a tile: the largest finite bias of the keys that its rows keep.
__global__ void __launch_bounds__(kThreads)
    find_relative_biases(const __grid_constant__ fdm_problem p, const Plan plan, RelativeBias *table) {
  __shared__ double largest[kThreads / 32];
  ptx::start_dependents();
  ptx::wait_for_kernel_ahead();
  const int64_t tiles = relative_bias_tiles(p), list = quotient(blockIdx.x, tiles), tile = blockIdx.x - list * tiles;
  const int64_t sequence_index = quotient(list, p.heads), head = list - sequence_index * p.heads;
  const Sequence s = sequence(p, sequence_index);
  const int64_t rows = min64(s.q_count - tile * kTileRows, kTileRows);
  const Matrix bias = score_matrix(p, p.bias, s, head, sizeof(double));
  const auto *first = static_cast<const double *>(bias.base);
  if (rows <= 0) { // kernels that iterate over keys also read the biases of sequences without rows
    if (threadIdx.x == 0) table[blockIdx.x] = {first, 0.0};
    return;
  }
  const TileColumns columns = tile_columns(p, plan, s, sequence_index, head, tile);
  double thread_largest = -INFINITY;
  for (int32_t c = threadIdx.x; c < columns.count; c += kThreads) {
    ColumnEntry entry{column_key(columns, c)};
    const double found = first[entry.key * bias.col];
    if (c >= columns.full) fetch_kept_rows(entry, columns); // while the bias load is in flight
    if (found > thread_largest && found < INFINITY && keeps(columns, c, entry, int32_t(rows))) thread_largest = found;
  }
  const auto of_lanes = [](double value) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2)
      value = fmax(value, __shfl_xor_sync(0xffffffffu, value, distance));
    return value;
  };
  thread_largest = of_lanes(thread_largest);
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = thread_largest;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  thread_largest = of_lanes(threadIdx.x < kThreads / 32 ? largest[threadIdx.x] : -INFINITY);
  if (threadIdx.x == 0) table[blockIdx.x] = {first, thread_largest > -INFINITY ? thread_largest : 0.0};
}

// A row index of the packed dimension or of a batch element, as a sequence and a row within it.
struct RowPlace {
  int64_t sequence_index, i;
  bool exists; // the row belongs to a sequence

  __device__ RowPlace(const fdm_problem &p, int64_t batch, int64_t row) : sequence_index(batch), i(row), exists(true) {
    if (!is_varlen(p)) return;
    int64_t low = 0, high = p.batch; // the sequence is in [low, high)
    while (high - low > 1) {
      const int64_t middle = (low + high) / 2;
      (sequence(p, middle).q_begin <= row ? low : high) = middle;
    }
    const Sequence s = sequence(p, low);
    sequence_index = low;
    i = row - s.q_begin;
    exists = p.batch > 0 && i >= 0 && i < s.q_count;
  }
};

struct Conversion {
  fdm_problem p; // with the table as its bias
  fdm_tensor lse, dlse, relative_lse, relative_dlse;
};

template <bool kToAbsolute>
__global__ void __launch_bounds__(kThreads) convert_rows(const __grid_constant__ Conversion work) {
  ptx::start_dependents();
  ptx::wait_for_kernel_ahead();
  const fdm_problem &p = work.p;
  const int64_t number = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t list = quotient(number, total_rows(p)), row = number - list * total_rows(p);
  const int64_t batch = quotient(list, p.heads), head = list - batch * p.heads;
  if (batch >= work.lse.shape[0]) return;
  const RowPlace place(p, batch, row);
  const auto offset = [&](const fdm_tensor &t) { return batch * t.stride[0] + head * t.stride[1] + row * t.stride[2]; };
  const auto *table = static_cast<const RelativeBias *>(p.bias.data);
  double reference = 0.0;
  if (place.exists)
    reference =
        table[place.sequence_index * p.bias.stride[0] + head * p.bias.stride[1] + place.i / kTileRows].reference;
  double &absolute = static_cast<double *>(work.lse.data)[offset(work.lse)];
  float &relative = static_cast<float *>(work.relative_lse.data)[number];
  if constexpr (kToAbsolute) {
    if (place.exists) absolute = relative + reference;
  } else {
    relative = place.exists ? static_cast<float>(absolute - reference) : -INFINITY;
    if (present(work.dlse))
      static_cast<float *>(work.relative_dlse.data)[number] =
          place.exists ? static_cast<float>(static_cast<const double *>(work.dlse.data)[offset(work.dlse)]) : 0.0f;
  }
}

// A float32 tensor with one number for each row of each head, in the shape of lse.
fdm_tensor row_numbers(const fdm_problem &p, float *data) {
  const int64_t rows = total_rows(p);
  return {data, {is_varlen(p) ? 1 : p.batch, p.heads, rows, 1}, {p.heads * rows, rows, 1, 1}, FDM_FLOAT32, 0};
}

} // namespace

RelativeProblem::RelativeProblem(const fdm_problem &absolute, const RelativeParts &parts, void *workspace)
    : parts_(parts), absolute_(absolute), relative_(absolute),
      lse_(row_numbers(absolute, at<float>(workspace, parts.lse))), dlse_{} {
  if (parts.dlse.exists()) dlse_ = row_numbers(absolute, at<float>(workspace, parts.dlse));
  const int64_t tiles = relative_bias_tiles(absolute);
  fdm_tensor &bias = relative_.bias;
  bias.data = at<RelativeBias>(workspace, parts.biases);
  bias.stride[0] = absolute.heads * tiles; // stride of sequences, including packed ones
  bias.stride[1] = tiles;                  // stride of query heads
  bias.stride[2] = 0;
}

cudaError_t RelativeProblem::launch_references(const Plan &plan, cudaStream_t stream) const {
  return launch<Overlap::kernel_ahead>(find_relative_biases, parts_.reference_blocks, kThreads, 0, stream, absolute_,
                                       plan, static_cast<RelativeBias *>(relative_.bias.data));
}

cudaError_t RelativeProblem::launch_absolute_lse(const fdm_tensor &lse, cudaStream_t stream) const {
  return launch<Overlap::kernel_ahead>(convert_rows<true>, parts_.conversion_blocks, kThreads, 0, stream,
                                       Conversion{relative_, lse, {}, lse_, {}});
}

cudaError_t RelativeProblem::launch_relative_lse(const fdm_tensor &lse, const fdm_tensor &dlse,
                                                 cudaStream_t stream) const {
  return launch<Overlap::kernel_ahead>(convert_rows<false>, parts_.conversion_blocks, kThreads, 0, stream,
                                       Conversion{relative_, lse, dlse, lse_, dlse_});
}

} // namespace fdm::cuda
