// SPDX-License-Identifier: BSD-3-Clause
// Backward pass of queries that list their keys, with mma.sync. See list_tile.cuh.
//
// A thread block has all rows of a tile. In each step, a warp computes P and dS of its rows and columns, and stores
// them in shared memory. For dQ, a warp then has its rows and a part of the head dimension. For dK and dV, it has 16
// of the step's columns, and all or a part of the head dimension. dK and dV are added to float32 sums in global
// memory, in no fixed order.
//
// If L2 does not hold the sums of a KV head, one launch per part of the keys computes them (ListPass).
#pragma once

#include "row_gradients.cuh"

namespace fdm::cuda {

template <class Config> struct ListBackwardShared : ListShared<Config> {
  using ScoreTile = SmemTile<Config::kColumns>;
  alignas(1024) char sdO[Config::Tile::bytes(Config::kRows)];
  alignas(128) char sP[ScoreTile::bytes(Config::kRows)];
  alignas(128) char sdS[ScoreTile::bytes(Config::kRows)];
  ListRow rows[Config::kRows];
  float column_sums[Config::kRowWarps][Config::kColumns];
  int32_t pass_entries[Config::kThreads / 32]; // of each warp's share of the list
  uint16_t places[list_places(FDM_TILE_ARCH)];
};

template <class Config> struct ListBackward : ListTile<Config> {
  using Base = ListTile<Config>;
  using Shared = ListBackwardShared<Config>;
  using Base::task, Base::kRowTiles, Base::kColumnTiles, Base::kColumns;
  using Element = typename Config::Element;
  using Tile = typename Config::Tile;
  using ScoreTile = typename Shared::ScoreTile;
  static constexpr int kHeadDim = Config::kHeadDim, kWarps = Config::kThreads / 32;
  // Warps with the same rows of dQ divide the head dimension, in parts of at least 32.
  static constexpr int kDqParts = kHeadDim / 32 < Config::kKeyWarps ? kHeadDim / 32 : Config::kKeyWarps;
  static constexpr int kDqDims = kHeadDim / kDqParts;
  static_assert(kHeadDim % kDqParts == 0 && kDqDims % 32 == 0);
  // kKeyParts warps with the same columns divide the head dimension of dK and dV. Each computes kDimsAtOnce
  // dimensions at a time.
  static constexpr int kKeyParts = kWarps / (kColumns / 16), kKeyDims = kHeadDim / kKeyParts;
  static constexpr int kDimsAtOnce = kKeyDims % 32 == 0 ? 32 : 16;
  static_assert(kWarps % (kColumns / 16) == 0 && kKeyDims % kDimsAtOnce == 0);
  static_assert(Config::kPartColumns == Config::kWarpColumns);

  const ListBackwardParams &params;
  Shared &smem;
  float dq[kRowTiles][kDqDims / 8][4];

  __device__ ListBackward(const ListBackwardParams &parameters, Shared &memory)
      : Base(parameters, memory), params(parameters), smem(memory) {}

  __device__ static int dq_part() { return Base::key_warp(); }

  __device__ void run() {
    const ListPass &pass = params.pass;
    if (!pass.is_first || !pass.is_last) find_places();
    if (task.length == 0 && !pass.is_first && !pass.is_last) return;
    find_statistics();
    __syncthreads();
    const auto load = [&](const fdm_tensor &t, const char *tile) {
      copy_rows<Tile, Config::kRows, Config::kThreads>(
          ptx::shared_address(tile), int(params.p.head_dim), [&](int r) -> const uint16_t * {
            // Rows without keys may hold NaN.
            return smem.rows[r].keeps() ? static_cast<const uint16_t *>(t.data) + this->row_place(t, r) : kZeroRow;
          });
    };
    load(params.p.q, smem.sQ);
    load(params.backward.dout, smem.sdO);
    ptx::cp_async_fence();
    clear(dq);
    this->for_steps([&](int step) {
      if (this->has_rows_of_warp()) {
        if (params.p.softcap > 0)
          compute_p_and_ds<true>(step);
        else
          compute_p_and_ds<false>(step);
      } else {
        clear_scores();
      }
      __syncthreads();
      add_biases(step);
      add_keys(step);
      if (this->has_rows_of_warp() && dq_part() < kDqParts) sum_queries(step);
    });
    write();
  }

  // Finds the list entries whose keys this pass has, in the order of the list. Each warp counts those of its share of
  // the list, then stores them.
  __device__ void find_places() {
    const ListPass &pass = params.pass;
    const int lane = threadIdx.x % 32, length = task.length;
    const int share = (length + Config::kThreads - 1) / Config::kThreads * 32, first = Base::warp() * share;
    const auto entries_of_pass = [&](int c) { // of the 32 entries from c on
      const int32_t index = c + lane < length ? task.indices[(c + lane) * params.p.indices.stride[3]] : -1;
      return __ballot_sync(0xffffffffu, index >= pass.first_key && index < pass.past_key);
    };
    int count = 0;
    for (int c = first; c < first + share; c += 32) count += __popc(entries_of_pass(c));
    if (lane == 0) smem.pass_entries[Base::warp()] = count;
    __syncthreads();
    int number = 0, all = 0;
    for (int w = 0; w < kWarps; ++w) {
      if (w == Base::warp()) number = all;
      all += smem.pass_entries[w];
    }
    for (int c = first; c < first + share; c += 32) {
      const uint32_t entries = entries_of_pass(c);
      if (entries >> lane & 1) smem.places[number + __popc(entries & ((1u << lane) - 1))] = uint16_t(c + lane);
      number += __popc(entries);
    }
    __syncthreads(); // all threads have read the task's length
    if (threadIdx.x == 0) {
      smem.task.length = all;
      smem.task.places = smem.places;
    }
    __syncthreads();
  }

  // An element of out, with its rest if there is one.
  __device__ float load_out(int64_t offset) const {
    const fdm_backward_args &a = params.backward;
    const float rounded = load_element(a.out, offset);
    return present(a.out_rest)
               ? with_rest<typename Config::Element>(rounded, static_cast<const int8_t *>(a.out_rest.data)[offset])
               : rounded;
  }

  // The lanes of a warp share the elements of a row.
  __device__ void find_statistics() {
    const fdm_backward_args &a = params.backward;
    const int lane = threadIdx.x % 32;
    for (int r = Base::warp(); r < Config::kRows; r += kWarps) {
      const bool exists = r < task.heads;
      float delta = 0.0f;
      if (exists) {
        const int64_t out = this->row_place(a.out, r), dout = this->row_place(a.dout, r);
        for (int d = lane; d < params.p.head_dim; d += 32)
          delta += load_out(out + d * a.out.stride[3]) * load_element(a.dout, dout + d * a.dout.stride[3]);
      }
#pragma unroll
      for (int distance = 16; distance > 0; distance /= 2) delta += __shfl_xor_sync(0xffffffffu, delta, distance);
      if (lane > 0) continue;
      smem.rows[r] = exists ? ListRow::find(params, task, task.head + r, delta, params.pass.is_first) : ListRow::none();
    }
  }

  __device__ bool adds_to_biases() const { return params.sums.bias || params.sums.index; }

  // Stores P and dS of the warp's rows and columns in shared memory, and the sums of dS over its rows.
  template <bool kHasSoftcap> __device__ void compute_p_and_ds(int step) {
    float p[kRowTiles][kColumnTiles][4], ds[kRowTiles][kColumnTiles][4], slopes[kRowTiles][kColumnTiles][4];
    this->multiply(p, smem.sQ, step, 0, 0);
    this->template finish_scores<kHasSoftcap>(p, step, 0,
                                              [&](int m, int n, int i, float slope) { slopes[m][n][i] = slope; });
    this->multiply(ds, smem.sdO, step, 1, 0);
#pragma unroll
    for (int n = 0; n < kColumnTiles; ++n) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const ListRow row = smem.rows[this->row(m, i / 2)];
          const float score = p[m][n][i];
          p[m][n][i] = row.unnormalized_p(score);
          row.finish(p[m][n][i], ds[m][n][i]);
          // Without a key the gradient is zero, even if the row's gradients are non-finite.
          if (score == -INFINITY) p[m][n][i] = ds[m][n][i] = 0.0f;
          sums[i % 2] += ds[m][n][i];
          if (kHasSoftcap) ds[m][n][i] *= slopes[m][n][i];
        }
      if (!adds_to_biases()) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int distance = 4; distance < 32; distance *= 2) sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], distance);
        if (threadIdx.x % 32 < 4)
          smem.column_sums[Base::row_warp()][first_column() + 8 * n + accumulator_column() + i] = sums[i];
      }
    }
    store_accumulators<Element, ScoreTile>(p, ptx::shared_address(smem.sP), first_row(), first_column());
    store_accumulators<Element, ScoreTile>(ds, ptx::shared_address(smem.sdS), first_row(), first_column());
  }
  __device__ void clear_scores() {
    float zeros[kRowTiles][kColumnTiles][4];
    clear(zeros);
    store_accumulators<Element, ScoreTile>(zeros, ptx::shared_address(smem.sP), first_row(), first_column());
    store_accumulators<Element, ScoreTile>(zeros, ptx::shared_address(smem.sdS), first_row(), first_column());
    for (int c = threadIdx.x % 32; c < Config::kWarpColumns; c += 32)
      smem.column_sums[Base::row_warp()][first_column() + c] = 0.0f;
  }
  __device__ static int first_row() { return Base::row_warp() * (16 * kRowTiles); }
  __device__ static int first_column() { return Base::key_warp() * Config::kWarpColumns; }

  // Each thread adds the sum of its column to the gradients of the biases.
  __device__ void add_biases(int step) const {
    const int c = threadIdx.x;
    if (c >= kColumns || !adds_to_biases()) return;
    const int32_t key = this->shared.slots[step % Config::kSlots].key(c);
    if (key < 0) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < Config::kRowWarps; ++w) sum += smem.column_sums[w][c];
    add_bias_gradients(params, task, task.entry(step * kColumns + c), key, sum);
  }

  __device__ void add_keys(int step) const {
    if (params.sums.dv) add_products(step, smem.sP, smem.sdO, params.sums.dv);
    if (params.sums.dk) add_products(step, smem.sdS, smem.sQ, params.sums.dk);
  }

  // Multiplies 16 columns of P or dS by all rows of dO or Q, and adds the products to the sums of the columns' keys.
  __device__ void add_products(int step, const char *left, const char *rows, float *sums) const {
    const int first_key = Base::warp() / kKeyParts * 16, first_dim = Base::warp() % kKeyParts * kKeyDims;
    const auto &slot = this->shared.slots[step % Config::kSlots];
    float *to[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t key = slot.key(first_key + accumulator_row(half));
      const int64_t row =
          (task.s.batch * params.p.k.shape[1] + task.s.k_begin + key) * params.p.kv_heads + task.kv_head;
      to[half] = key < 0 ? nullptr : sums + row * kHeadDim + first_dim + 4 * (threadIdx.x % 4);
    }
    // P and dS are stored by rows, which the product sums over, so the left operand is loaded transposed.
    const uint32_t left_fragment = ScoreTile::right_rows(ptx::shared_address(left));
    const uint32_t right_fragment = Tile::right_columns(ptx::shared_address(rows));
#pragma unroll 1
    for (int dim = 0; dim < kKeyDims; dim += kDimsAtOnce) {
      float products[1][kDimsAtOnce / 8][4];
      clear(products);
      gemm_columns_at<Element, Config::kRows>(
          products, [&](int k, int d) { return Tile::fragment_address(right_fragment, k, first_dim + dim + 8 * d); },
          [&](uint32_t (&a)[1][4], int k) {
            ptx::ldmatrix_trans(a[0], ScoreTile::fragment_address(left_fragment, k, first_key));
          });
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kDimsAtOnce / 8; n += 2) {
          // Four adjacent sums take two columns of a tile of 8, and two of the next tile.
          const float four[4] = {products[0][n][2 * half], products[0][n][2 * half + 1], products[0][n + 1][2 * half],
                                 products[0][n + 1][2 * half + 1]};
          if (to[half]) add_neighbours(to[half] + dim + 8 * n, four);
        }
    }
  }

  // dQ += dS K, for the warp's rows and dimensions.
  __device__ void sum_queries(int step) {
    const uint32_t left = ScoreTile::left(ptx::shared_address(smem.sdS), first_row());
    const uint32_t right = Tile::right_columns(this->stage(step, 0));
    gemm_columns_at<Element, kColumns>(
        dq, [&](int k, int d) { return Tile::fragment_address(right, k, dq_part() * kDqDims + 8 * d); },
        [&](uint32_t (&a)[kRowTiles][4], int k) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) ptx::ldmatrix(a[m], ScoreTile::fragment_address(left, 16 * m, k));
        });
  }

  // Adds the dQ sums of the previous pass, and stores the sums for the next pass.
  __device__ void pass_sums() {
    const int column = dq_part() * kDqDims + accumulator_column();
    float *tile = params.query_sums + int64_t(blockIdx.x) * params.tiles.heads_per_tile * kHeadDim + column;
    for_pairs<kRowTiles>([&](int m, int half) {
      const int r = this->row(m, half);
      if (r >= task.heads) return;
#pragma unroll
      for (int n = 0; n < kDqDims / 8; ++n) {
        auto &two = *reinterpret_cast<float2 *>(tile + r * kHeadDim + 8 * n);
        float &left = dq[m][n][2 * half], &right = dq[m][n][2 * half + 1];
        if (!params.pass.is_first) {
          left += two.x;
          right += two.y;
        }
        if (!params.pass.is_last) two = make_float2(left, right);
      }
    });
  }

  __device__ void write() {
    const fdm_tensor &t = params.backward.dq;
    if (!present(t) || dq_part() >= kDqParts) return;
    if (params.query_sums) pass_sums();
    if (!params.pass.is_last) return;
    const int first_dim = dq_part() * kDqDims;
    for_pairs<kRowTiles>([&](int m, int half) {
      const int r = this->row(m, half);
      const bool exists = r < task.heads;
      Element *to = exists ? static_cast<Element *>(t.data) + this->row_place(t, r) + first_dim * t.stride[3] : nullptr;
      write_row(to, t.stride[3], int(params.p.head_dim) - first_dim, dq[m], half, params.p.scale, exists);
    });
  }
};

template <class Config>
__global__ void __launch_bounds__(Config::kThreads, 2)
    list_backward_kernel(const __grid_constant__ ListBackwardParams params) {
  auto &shared = dynamic_memory<ListBackwardShared<Config>>();
  if (threadIdx.x == 0) shared.task.set(params.p, params.tiles, params.pass.first_tile + blockIdx.x);
  __syncthreads();
  ListBackward<Config>(params, shared).run();
}

} // namespace fdm::cuda
