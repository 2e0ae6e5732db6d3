// SPDX-License-Identifier: BSD-3-Clause
// Lists of kept keys without a plan: if only one query row reads a key mask, a plan would be read once. Instead, each
// warp lists the kept keys of its part, some hundred at a time.
//
// Warps take 16 keys at a time in turns, so that they have about equally many kept keys wherever those are.
#pragma once

#include "../plan/plan.cuh"
#include "../tile/block_scan.cuh"
#include "../tile/mask_bytes.cuh"

namespace fdm::cuda {

// The keys that one of `warps` warps scans.
struct PartOfKeys {
  Matrix mask;
  int32_t keys; // of the sequence
  int32_t warp, warps;
};

struct ListedKeys {
  static constexpr int kTurn = 16, kLoadsInFlight = 4;                 // keys of a turn; loads in flight per thread
  static constexpr int kThreadsPerTurn = kTurn / kMaskBytes;           // threads of a turn
  static constexpr int kTurns = kLoadsInFlight * 32 / kThreadsPerTurn; // turns that are scanned at a time
  static constexpr int kMaxKeys = kTurns * kTurn;                      // and their keys
  int32_t keys[kMaxKeys];

  // The booleans of four keys for each load.
  struct Words {
    uint32_t word[kLoadsInFlight];
  };

  __device__ static int32_t first_key(const PartOfKeys &part, int32_t turn, int load) {
    const int32_t lane_turn = turn + load * (32 / kThreadsPerTurn) + lane_id() / kThreadsPerTurn;
    return (lane_turn * part.warps + part.warp) * kTurn + lane_id() % kThreadsPerTurn * kMaskBytes;
  }
  // Whether this turn or a later one has keys.
  __device__ static bool has_keys(const PartOfKeys &part, int32_t turn) {
    return (turn * part.warps + part.warp) * kTurn < part.keys;
  }

  // Starts to load the booleans of kTurns turns.
  __device__ static Words load(const PartOfKeys &part, int32_t turn) {
    const auto *const bytes = static_cast<const uint8_t *>(part.mask.base);
    const bool aligned = part.mask.col == 1 && reinterpret_cast<uintptr_t>(bytes) % kMaskBytes == 0;
    Words words{};
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) {
      const int32_t key = first_key(part, turn, i), left = part.keys - key;
      if (aligned && left >= kMaskBytes)
        words.word[i] = load_mask<MaskLoad::word>(bytes + key, 1, kMaskBytes);
      else if (left > 0)
        words.word[i] = load_mask<MaskLoad::bytes>(bytes + key * part.mask.col, part.mask.col, left);
    }
    return words;
  }

  // Lists the kept keys of these turns and returns their number. The keys that a thread finds are contiguous.
  __device__ int32_t list(const PartOfKeys &part, int32_t turn, const Words &words) {
    uint32_t kept = 0; // bit 8 b + i: key b of load i
#pragma unroll
    for (int i = 0; i < kLoadsInFlight; ++i) kept |= upper_bits(words.word[i]) >> (7 - i);
    const uint32_t lane_kept = __popc(kept), all = warp_inclusive_sum(lane_kept);
    uint32_t place = all - lane_kept;
    __syncwarp(); // all reads of the previous list are complete
    for (; kept != 0; kept &= kept - 1) {
      const int n = __ffs(static_cast<int>(kept)) - 1;
      keys[place++] = first_key(part, turn, n % 8) + n / 8;
    }
    __syncwarp();
    return static_cast<int32_t>(__shfl_sync(kAllLanes, all, 31));
  }
};

} // namespace fdm::cuda
