// SPDX-License-Identifier: BSD-3-Clause
// The tile table of the Hopper kernels: 128 query rows, 64 for each of two consumer warpgroups; columns of a stage and
// stages, with the reason for each. Registers of a consumer thread: 208; shared memory of a block: 227 KB.
#pragma once

namespace fdm::cuda::sm90 {

struct KeyTileChoice {
  int columns, stages;
};

// Accumulators take head_dim / 2 + columns / 2 registers of a thread, probabilities columns / 4. Wide products read less
// shared memory for each operation.
constexpr KeyTileChoice forward_tile(int head_dim) {
  return head_dim <= 128 ? KeyTileChoice{128, 2} : KeyTileChoice{64, 2};
}

// Accumulators take head_dim / 2 + columns registers, dS columns / 4; Q and dO stay in shared memory beside the stages.
constexpr KeyTileChoice dq_tile(int head_dim) {
  if (head_dim <= 128) return {64, 4};
  return head_dim <= 192 ? KeyTileChoice{64, 2} : KeyTileChoice{64, 1};
}

// The gradients of keys and values: 128 keys, 64 for each consumer warpgroup; rows of a stage and stages. Accumulators of
// both gradients take head_dim registers of a thread, scores and their gradients `rows`: larger head dimensions are left
// to the mma.sync kernels.
struct RowTileChoice {
  int rows, stages;
};

constexpr int kMostDkdvHeadDim = 128;

constexpr RowTileChoice dkdv_tile(int) { return {64, 3}; }

} // namespace fdm::cuda::sm90
