// SPDX-License-Identifier: BSD-3-Clause
// A bias per query, and its gradient, in the kernel of fused_large_heads.cuh. A thread has the elements that belong
// to its accumulators of a part of a step. Products begin with these elements, which then take no registers of their
// own.
#pragma once

#include "key_stationary.cuh"

namespace fdm::cuda {

template <class Config> struct RowBiasPart {
  using Element = typename Config::Element;
  using Gradients = typename Config::Gradients;
  static constexpr int kRows = Config::kScoreRows, kRowTiles = kRows / 8;

  const BackwardParams &params;
  const typename Config::Keys::Shared &keys;
  float sums[2][kRowTiles][2]; // of the bias gradient

  __device__ RowBiasPart(const BackwardParams &parameters, const typename Config::Keys::Shared &own_keys)
      : params(parameters), keys(own_keys) {
    clear();
  }

  // Whether the bias must be added to the scores: in units of the products, the bias of a row may leave the range of
  // float32. Rows beyond kLargeLse may have such a bias.
  __device__ bool is_exact(const StepFacts &facts) const {
    return facts.any_test_rows() || !ScoreFactors::uncapped(params.p).can_fold_bias();
  }
  // Fills the scores of a query head with the bias in units of the products, or with zeros if `exact`. The products
  // add to them.
  __device__ void init_scores(float (&scores)[kRowTiles][4], int64_t head, int first, bool exact) const {
    const float factor = 1.0f / params.p.scale;
    for_each_element(params.p.bias, head, first, [&](int half, int n, int i, const auto *element, bool exists) {
      scores[n][2 * half + i] = exists && !exact ? to_float(*element) * factor : 0.0f;
    });
  }
  // The row_bias of KeyGradients::compute_p for an exact part.
  struct Exact {
    const RowBiasPart &bias;
    int64_t head;
    int first;

    __device__ float element(int half, int n, int i) const {
      const int row = first + 8 * n + accumulator_column() + i;
      const int key = bias.keys.key[Gradients::key_row(0, half)];
      if (key < 0 || row >= bias.keys.task.s.q_count) return -INFINITY;
      return score_view(bias.params.p, bias.params.p.bias, bias.keys.task.s, head).load(row, key);
    }
  };

  // Adds dS' of the part to the sums. If these are then `complete`, writes and clears them.
  __device__ void add_score_gradients(const float (&gradients)[kRowTiles][4], int64_t head, int first, bool complete) {
    if (!present(params.a.dbias)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half)
      for_pairs<kRowTiles>([&](int n, int i) { sums[half][n][i] += gradients[n][2 * half + i]; });
    if (!complete) return;
    write(head, first);
    clear();
  }

private:
  __device__ static float to_float(float x) { return x; }
  __device__ static float to_float(Element x) { return float(x); }
  __device__ void clear() {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) sums[half][n][0] = sums[half][n][1] = 0.0f;
  }

  // Calls function(half, n, i, element, exists) for this thread's pairs of a part that begins at row `first`.
  // `element` is the address of the pair's element of the tensor. `exists` tells whether its row and key exist.
  template <class Function>
  __device__ __forceinline__ void for_each_element(const fdm_tensor &t, int64_t head, int first,
                                                   const Function &function) const {
    if (t.dtype == FDM_FLOAT32)
      for_each_of<float>(t, head, first, function);
    else
      for_each_of<Element>(t, head, first, function);
  }
  template <class Stored, class Function>
  __device__ __forceinline__ void for_each_of(const fdm_tensor &t, int64_t head, int first,
                                              const Function &function) const {
    const Sequence &s = keys.task.s;
    const Matrix m = score_matrix(params.p, t, s, head, sizeof(Stored));
    const int row = first + accumulator_column(), rows = int(s.q_count) - row;
    auto *const base = static_cast<Stored *>(const_cast<void *>(m.base)) + row * m.row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int key = keys.key[Gradients::key_row(0, half)], row_count = key < 0 ? 0 : rows;
      Stored *element = base + key * m.col;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        function(half, n, 0, element, 8 * n < row_count);
        function(half, n, 1, element + m.row, 8 * n + 1 < row_count);
        element += 8 * m.row;
      }
    }
  }

  __device__ void write(int64_t head, int first) const {
    for_each_element(params.a.dbias, head, first, [&](int half, int n, int i, auto *element, bool exists) {
      using Stored = std::remove_pointer_t<decltype(element)>;
      if (exists) *element = Stored(sums[half][n][i]);
    });
  }
};

} // namespace fdm::cuda
