// SPDX-License-Identifier: BSD-3-Clause
// Computes delta = dO . O - dlse of each row, with as many threads for a row as it has chunks of 16 bytes; and finds rows that
// the fused kernel cannot deal with (dense.h).
#include "../backward/make_statistics.cuh"
#include "../host/launch.cuh"
#include "../tile/copy_rows.cuh"
#include "ptx/dependent.cuh"
#include "statistics.cuh"

namespace fdm::cuda {
namespace {

constexpr int kThreads = 256;

template <class Element, int kAcross, bool kAligned>
__global__ void __launch_bounds__(kThreads) deltas_kernel(const __grid_constant__ DenseBackward work, bool again) {
  ptx::start_dependents();
  if (again && is_superseded(work)) return;
  const fdm_problem &p = work.call.p;
  const fdm_tensor &out = work.a.out, &dout = work.a.dout, &lse = work.a.lse, &dlse = work.a.dlse;
  const int lane = threadIdx.x % kAcross, head_dim = int(p.head_dim);
  // Heads go fastest, as rows of all heads lie in memory.
  const int64_t number = int64_t(blockIdx.x) * (kThreads / kAcross) + threadIdx.x / kAcross;
  const int64_t row = quotient(number, p.heads), head = number - row * p.heads;
  const int64_t of_these = quotient(row, p.queries), i = row - of_these * p.queries;
  const int64_t batch = work.first_delta + of_these;
  const bool exists = of_these < work.delta_batches;
  const Sequence s = dense_sequence(p, batch);
  float delta = 0.0f;
  const float natural = exists ? static_cast<const float *>(lse.data)[lse_offset(lse, s, i, head)] : INFINITY;
  const bool usable = fabsf(natural) <= kUnusableLse;
  bool odd = exists && (usable ? fabsf(natural) * kLog2E > kLargeLse : !(natural < 0.0f));
  if (exists && usable) {
    const auto *a = static_cast<const Element *>(dout.data) + row_offset(dout, s, i, head);
    const auto *b = static_cast<const Element *>(out.data) + row_offset(out, s, i, head);
    if constexpr (kAligned) {
      if (lane * 8 < head_dim) {
        const uint4 x = *reinterpret_cast<const uint4 *>(a + lane * 8),
                    y = *reinterpret_cast<const uint4 *>(b + lane * 8);
        const auto *u = reinterpret_cast<const Element *>(&x), *v = reinterpret_cast<const Element *>(&y);
#pragma unroll
        for (int d = 0; d < 8; ++d) delta = fmaf(to_float(u[d]), to_float(v[d]), delta);
      }
    } else {
      for (int d = lane; d < head_dim; d += kAcross)
        delta = fmaf(to_float(a[d * dout.stride[3]]), to_float(b[d * out.stride[3]]), delta);
    }
    if (lane == 0 && present(dlse)) delta -= static_cast<const float *>(dlse.data)[lse_offset(dlse, s, i, head)];
  }
#pragma unroll
  for (int distance = kAcross / 2; distance > 0; distance /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, distance);
  odd |= !(fabsf(delta) < INFINITY);
  if (work.odd && odd) *work.odd = 1;
  if (!exists) return;
  float *const to = &delta_of(work, batch, head, i);
  // Where it lies in a row of dq, a whole sector of 32 bytes is written, of which the others are not needed.
  if (work.delta_row > 1 && kAcross >= 4 && head_dim >= 16) {
    if (lane < 4) reinterpret_cast<float2 *>(to)[lane] = {delta, delta};
  } else if (lane == 0) {
    *to = delta;
  }
}

template <class Element, int kAcross>
cudaError_t launch_for(const DenseBackward &work, bool again, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  const bool aligned = work.dout_aligned && rows_are_aligned(work.a.out, p.head_dim);
  const auto kernel = aligned ? deltas_kernel<Element, kAcross, true> : deltas_kernel<Element, kAcross, false>;
  return launch(kernel, ceil_div(work.delta_batches * p.queries * p.heads, kThreads / kAcross), kThreads, 0, stream,
                work, again);
}

template <class Element> cudaError_t launch_for_dim(const DenseBackward &work, bool again, cudaStream_t stream) {
  if (work.call.p.head_dim <= 32) return launch_for<Element, 4>(work, again, stream);
  return work.call.p.head_dim <= 64 ? launch_for<Element, 8>(work, again, stream)
                                    : launch_for<Element, 16>(work, again, stream);
}

} // namespace

cudaError_t launch_deltas(const DenseBackward &work, bool again, cudaStream_t stream) {
  return work.call.p.q.dtype == FDM_FLOAT16 ? launch_for_dim<__half>(work, again, stream)
                                            : launch_for_dim<__nv_bfloat16>(work, again, stream);
}

} // namespace fdm::cuda
