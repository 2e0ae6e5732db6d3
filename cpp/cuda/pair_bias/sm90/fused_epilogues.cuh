// SPDX-License-Identifier: BSD-3-Clause
// The epilogues of the fused kernel's steps (FusedEpilogue), which take the parts of dQ, dK and dV of a step.
// finish() of each epilogue releases the stage of the step.
#pragma once

#include "complete_rows.cuh"
#include "fused_tasks.cuh"

namespace fdm::cuda {

// Accumulators with 16 rows per warp: rows of the tile for dq, keys for dk and dv.
template <class Config> struct FusedProducts {
  static constexpr int kOutTiles = Config::kHeadDim / 8;
  using Sums = float[kOutTiles][4];
  using Half = float[kOutTiles][2]; // one of the two rows of a thread
  Sums dq, dk, dv;

  __device__ static void take_half(Half &x, const Sums &sums, int half) {
    for_pairs<kOutTiles>([&](int n, int i) { x[n][i] = half ? sums[n][2 + i] : sums[n][i]; });
  }
};

template <class Config> struct FusedEpilogueBase {
  using Element = typename Config::Element;
  using Products = FusedProducts<Config>;
  using Sums = typename Products::Sums;
  using Half = typename Products::Half;
  static constexpr int kOutTiles = Products::kOutTiles;

  const PairBiasBackward &work;
  PairBiasFusedShared<Config> &shared;

  __device__ FusedEpilogueBase(const PairBiasBackward &own_work, PairBiasFusedShared<Config> &memory)
      : work(own_work), shared(memory) {}
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static int lane() { return threadIdx.x % 32; }
  // The first row of a source in a gradient.
  __device__ static Element *head_of(const fdm_tensor &t, const SourceWalk &source) {
    return static_cast<Element *>(t.data) + source.batch * t.stride[0] + source.head * t.stride[2];
  }
};

// Adds to float32 sums in global memory.
template <class Config> struct SumsEpilogue : FusedEpilogueBase<Config> {
  using Base = FusedEpilogueBase<Config>;
  using Base::Base, Base::warp, Base::work, Base::shared;

  // Adds 16 rows per warp, of a tile of 128 rows that begins at row `first`.
  __device__ static void add(const GradientSums &sums, const SumHalves &tile, int first, const typename Base::Sums &x) {
    if (!tile.first) return;
    const int64_t warp_offset = 16 * warp() * sums.row;
    SumBand<Config::kHeadDim>{
        {tile.first + warp_offset, tile.second + warp_offset}, sums.row, int(sums.rows) - first - 16 * warp()}
        .add(x);
  }
  __device__ void finish(const PairBiasFusedTask &task, const FusedProducts<Config> &sums, int stage,
                         const SourceWalk &, bool) const {
    const auto place = shared.places[stage];
    Roles::consumer_release(shared.empty[stage]);
    add(work.fused.dq, place.dq, task.row_tile * kPairBiasTileSm90, sums.dq);
    add(work.fused.dk, place.dk, task.key_tile * kPairBiasTileSm90, sums.dk);
    add(work.fused.dv, place.dv, task.key_tile * kPairBiasTileSm90, sums.dv);
  }
};

// Writes complete gradients: a warpgroup has all rows and keys of a source.
template <class Config> struct SmallTileEpilogue : FusedEpilogueBase<Config> {
  using Base = FusedEpilogueBase<Config>;
  using Base::Base, Base::work, Base::shared;

  __device__ void finish(const PairBiasFusedTask &, const FusedProducts<Config> &sums, int stage,
                         const SourceWalk &source, bool exists) const {
    const fdm_problem &p = work.call.p;
    Roles::consumer_release(shared.empty[stage]);
    float probe = 0.0f;
    write(work.a.dq, source, exists ? p.queries : 0, sums.dq, p.scale, probe);
    write(work.a.dk, source, exists ? p.keys : 0, sums.dk, p.scale, probe);
    write(work.a.dv, source, exists ? p.keys : 0, sums.dv, 1.0f, probe);
    if (probe != 0.0f) *work.non_finite = 1;
  }

private:
  __device__ static void write(const fdm_tensor &t, const SourceWalk &source, int64_t rows,
                               const typename Base::Sums &sums, float factor, float &probe) {
    if (!present(t)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * Config::band() + accumulator_row(half);
      typename Base::Half x;
      Base::Products::take_half(x, sums, half);
      write_complete_row(Base::head_of(t, source) + row * t.stride[1], row < rows, int(t.shape[3]), x, factor, probe);
    }
  }
};

// The epilogue for problems with at most two row tiles and two key tiles. A cluster has all tiles of a source, so its
// thread blocks complete dQ, dK and dV among themselves. They add to global memory only for tiles of dbias whose
// sources several clusters share.
//
// In a step all blocks compute the same kind of products. Two blocks with the same rows then exchange halves of their
// parts of dQ, and two with the same keys halves of dK and dV: of the two rows in a thread's accumulators, each block
// completes one. A warp exchanges with the same warp of the other block through the memory of P and dS, once no
// product of that block reads it.
template <class Config> struct ExchangeEpilogue : FusedEpilogueBase<Config> {
  using Base = FusedEpilogueBase<Config>;
  using Base::kOutTiles, Base::lane, Base::shared, Base::warp, Base::work;
  using typename Base::Half, typename Base::Sums;

  const int row_tile, key_tile; // this block's
  uint32_t phase = 0;

  __device__ ExchangeEpilogue(const PairBiasBackward &own_work, PairBiasFusedShared<Config> &memory)
      : Base(own_work, memory), row_tile(int(blockIdx.y) / own_work.fused.key_tiles),
        key_tile(int(blockIdx.y) % own_work.fused.key_tiles) {}

  __device__ void finish(const PairBiasFusedTask &, const FusedProducts<Config> &sums, int stage,
                         const SourceWalk &source, bool) {
    Roles::consumer_release(shared.empty[stage]);
    exchange(sums);
    const float scale = work.call.p.scale;
    float probe = 0.0f;
    write(kSameRows, 0, work.a.dq, source, row_tile, sums.dq, scale, probe);
    write(kSameKeys, 1, work.a.dk, source, key_tile, sums.dk, scale, probe);
    write(kSameKeys, 2, work.a.dv, source, key_tile, sums.dv, 1.0f, probe);
    if (probe != 0.0f) *work.non_finite = 1;
    __syncwarp(); // all lanes have read what the next step's P and dS overwrite
  }

private:
  // has_other(): an axis has another block. other(): its rank. own_half(): the accumulator row that this block
  // completes.
  __device__ bool has_other(ClusterAxis axis) const {
    return (axis == kSameRows ? work.fused.key_tiles : work.fused.row_tiles) > 1;
  }
  __device__ uint32_t other(ClusterAxis axis) const {
    return uint32_t(axis == kSameRows ? row_tile * work.fused.key_tiles + 1 - key_tile
                                      : (1 - row_tile) * work.fused.key_tiles + key_tile);
  }
  __device__ int own_half(ClusterAxis axis) const { return axis == kSameRows ? key_tile : row_tile; }

  // The memory of this warp's rows of P or dS, in panels of 64 columns. It has room for the rows of one gradient.
  __device__ float *room(int gradient) const {
    using Scores = typename Config::Scores;
    constexpr int kPanelBytes = Scores::kBytes / 2, kWarpBytes = kPanelBytes / Roles::kConsumerWarps;
    static_assert(kOutTiles * 2 * int(sizeof(float)) * 32 <= kWarpBytes && Config::kScoreTiles == 2);
    char *const panel = shared.sScores[gradient / 2] + gradient % 2 * kPanelBytes;
    return reinterpret_cast<float *>(panel + warp() * kWarpBytes) + lane() * 4;
  }

  __device__ void send(ClusterAxis axis, int gradient, const Sums &sums) const {
    Half x;
    Base::Products::take_half(x, sums, 1 - own_half(axis));
    const ptx::RemoteBuffer there(room(gradient), shared.exchange.readable[axis][warp()], other(axis));
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2)
      there.store(n / 2 * 128, make_float4(x[n][0], x[n][1], x[n + 1][0], x[n + 1][1]));
  }
  // Adds the part that the other block has sent to a row.
  __device__ void receive(Half &x, int gradient) const {
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      const float4 part = *reinterpret_cast<const float4 *>(room(gradient) + n / 2 * 128);
      x[n][0] += part.x;
      x[n][1] += part.y;
      x[n + 1][0] += part.z;
      x[n + 1][1] += part.w;
    }
  }

  // Writes this warp's rows of a gradient, times a factor, in a tile of queries or keys.
  __device__ void write(ClusterAxis axis, int gradient, const fdm_tensor &t, const SourceWalk &source, int tile,
                        const Sums &sums, float factor, float &probe) const {
    if (!present(t)) return;
    const bool shares = has_other(axis);
    const int first = tile * kPairBiasTileSm90 + 16 * warp();
    const auto write_half = [&](int half) {
      Half x;
      Base::Products::take_half(x, sums, half);
      if (shares) receive(x, gradient);
      const int64_t row = first + accumulator_row(half);
      write_complete_row(Base::head_of(t, source) + row * t.stride[1], row < t.shape[1], int(t.shape[3]), x, factor,
                         probe);
    };
    if (shares) return write_half(own_half(axis));
    write_half(0);
    write_half(1);
  }

  // Sends the other blocks their halves, and waits for this warp's own. The products of this warp have read P and dS.
  __device__ void exchange(const FusedProducts<Config> &sums) {
    constexpr uint32_t kGradientBytes = 32 * sizeof(Half);
    auto &barriers = shared.exchange;
    __syncwarp();
#pragma unroll
    for (int n = 0; n < kClusterAxes; ++n) {
      const auto axis = ClusterAxis(n);
      if (!has_other(axis) || lane() > 0) continue;
      ptx::expect_from_cluster(barriers.readable[axis][warp()],
                               axis == kSameRows ? kGradientBytes : 2 * kGradientBytes);
      ptx::arrive_remote(barriers.writable[axis], other(axis));
    }
    if (has_other(kSameRows)) {
      ptx::wait_for_cluster(barriers.writable[kSameRows], phase);
      send(kSameRows, 0, sums.dq);
    }
    if (has_other(kSameKeys)) {
      ptx::wait_for_cluster(barriers.writable[kSameKeys], phase);
      send(kSameKeys, 1, sums.dk);
      send(kSameKeys, 2, sums.dv);
    }
#pragma unroll
    for (int n = 0; n < kClusterAxes; ++n)
      if (has_other(ClusterAxis(n))) ptx::wait_for_cluster(barriers.readable[n][warp()], phase);
    phase ^= 1;
  }
};

} // namespace fdm::cuda
