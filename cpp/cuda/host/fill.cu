// SPDX-License-Identifier: BSD-3-Clause
#include "fill.h"

#include <cuda_runtime.h>

#include <utility>

#include "../tile/copy_rows.cuh"
#include "launch.cuh"
#include "ptx/dependent.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = kFillThreads;

// Each row of the grid fills a tensor, whose dimension 1 is rows, with the bits of one element; for float64, the bits
// of a float32. With cu_seqlens it fills only the rows outside all sequences.
struct FillParams {
  static constexpr int kMaxTensors = 3;
  fdm_tensor tensors[kMaxTensors];
  uint32_t bits[kMaxTensors];
  bool vectors[kMaxTensors]; // eight zero elements of 16 or 8 bits at a time
  fdm_tensor cu_seqlens;
  int64_t batch;

  void set(int n, const fdm_tensor &t, uint32_t value, bool in_vectors) {
    tensors[n] = t;
    bits[n] = value;
    vectors[n] = in_vectors;
  }
};

__global__ void __launch_bounds__(kThreads) fill(const __grid_constant__ FillParams params) {
  ptx::start_dependents();
  const fdm_tensor &t = params.tensors[blockIdx.y];
  const bool vectors = params.vectors[blockIdx.y];
  int64_t begin = 0, end = 0;
  if (present(params.cu_seqlens)) {
    begin = clamp64(cu_bound(params.cu_seqlens, 0), 0, t.shape[1]);
    end = clamp64(cu_bound(params.cu_seqlens, params.batch), begin, t.shape[1]);
  }
  const int64_t rows = begin + t.shape[1] - end, chunks = vectors ? t.shape[3] / 8 : t.shape[3];
  const int64_t count = t.shape[0] * rows * t.shape[2] * chunks;
  for (int64_t n = int64_t(blockIdx.x) * kThreads + threadIdx.x; n < count; n += int64_t(gridDim.x) * kThreads) {
    const int64_t of_head = quotient(n, chunks), of_row = quotient(of_head, t.shape[2]), batch = quotient(of_row, rows);
    const int64_t number = of_row - batch * rows, row = number < begin ? number : number - begin + end;
    const int64_t head = of_head - of_row * t.shape[2], d = (n - of_head * chunks) * (vectors ? 8 : 1);
    const int64_t offset = batch * t.stride[0] + row * t.stride[1] + head * t.stride[2] + d * t.stride[3];
    if (t.dtype == FDM_FLOAT32)
      static_cast<uint32_t *>(t.data)[offset] = params.bits[blockIdx.y];
    else if (t.dtype == FDM_FLOAT64)
      static_cast<double *>(t.data)[offset] = __uint_as_float(params.bits[blockIdx.y]);
    else if (t.dtype == FDM_UINT8 && vectors)
      *reinterpret_cast<uint2 *>(static_cast<uint8_t *>(t.data) + offset) = uint2{};
    else if (t.dtype == FDM_UINT8)
      static_cast<uint8_t *>(t.data)[offset] = uint8_t(params.bits[blockIdx.y]);
    else if (vectors)
      *reinterpret_cast<uint4 *>(static_cast<uint16_t *>(t.data) + offset) = uint4{};
    else
      static_cast<uint16_t *>(t.data)[offset] = uint16_t(params.bits[blockIdx.y]);
  }
}

} // namespace

cudaError_t launch_fill_zero(const fdm_tensor &t, cudaStream_t stream) {
  if (!present(t)) return cudaSuccess;
  const FillWork work = fill_work(t);
  FillParams params{};
  params.set(0, t, 0, work.vectors);
  return launch(fill, work.blocks, kThreads, 0, stream, params);
}

cudaError_t launch_unused_rows(const fdm_problem &p, const fdm_forward_args &args, const FillWork &work,
                               cudaStream_t stream) {
  constexpr uint32_t kMinusInfinity = 0xff800000u;
  FillParams params{};
  params.cu_seqlens = p.cu_seqlens_q;
  params.batch = p.batch;
  params.set(0, args.out, 0, work.vectors);
  fdm_tensor lse = args.lse; // rows are dimension 2 of lse
  std::swap(lse.shape[1], lse.shape[2]);
  std::swap(lse.stride[1], lse.stride[2]);
  int count = 1;
  if (present(lse)) params.set(count++, lse, kMinusInfinity, false);
  if (present(args.out_rest)) params.set(count++, args.out_rest, 0, work.vectors);
  return launch(fill, Grid(work.blocks, count), kThreads, 0, stream, params);
}

} // namespace fdm::cuda
