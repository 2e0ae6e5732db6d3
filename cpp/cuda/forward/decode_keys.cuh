// SPDX-License-Identifier: BSD-3-Clause
// Lists of kept keys without a plan: if only one query row reads a key mask, a plan would be read once. Instead, each
// warp lists the kept keys of its part, as many at a time as a list holds.
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

// Scans the mask of a part, kTurns turns at a time. Those that follow are being loaded meanwhile.
struct KeyScan {
  static constexpr int kTurn = 16, kLoads = 8;                 // keys of a turn; loads in flight per thread
  static constexpr int kThreadsPerTurn = kTurn / kMaskBytes;   // threads of a turn
  static constexpr int kTurns = kLoads * 32 / kThreadsPerTurn; // turns that are scanned at a time
  static constexpr int kQuarterKeys = kTurns * kTurn / 4;      // keys of a quarter of the loads
  static constexpr uint32_t kQuarter = 0x03030303u;            // the bits of the first quarter

  PartOfKeys part;
  int32_t turn = -kTurns; // the first of the scanned turns
  uint32_t kept = 0;      // bit 8 b + i: key b of load i is kept and has not been listed
  uint32_t next[kLoads];  // the booleans of four keys for each load of the following turns

  // Starts the loads of the first turns.
  __device__ void start(const PartOfKeys &own_part) {
    part = own_part;
    load();
  }

  // The first key of a load.
  __device__ int32_t first_key(int32_t first_turn, int load) const {
    const int32_t lane_turn = first_turn + load * (32 / kThreadsPerTurn) + lane_id() / kThreadsPerTurn;
    return (lane_turn * part.warps + part.warp) * kTurn + lane_id() % kThreadsPerTurn * kMaskBytes;
  }
  // Whether there are turns that have not been scanned.
  __device__ bool has_next() const { return ((turn + kTurns) * part.warps + part.warp) * kTurn < part.keys; }

  // Whether keys are left to list. All lanes of the warp call this.
  __device__ bool has_more() const { return has_next() || __any_sync(kAllLanes, kept != 0); }

  // Scans the following turns.
  __device__ void advance() {
    turn += kTurns;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) kept |= upper_bits(next[i]) >> (7 - i);
    if (has_next()) load();
  }

private:
  // Starts the loads of the following turns.
  __device__ void load() {
    const auto *const bytes = static_cast<const uint8_t *>(part.mask.base);
    const bool aligned = part.mask.col == 1 && reinterpret_cast<uintptr_t>(bytes) % kMaskBytes == 0;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int32_t key = first_key(turn + kTurns, i), left = part.keys - key;
      next[i] = 0;
      if (aligned && left >= kMaskBytes)
        next[i] = load_mask<MaskLoad::word>(bytes + key, 1, kMaskBytes);
      else if (left > 0)
        next[i] = load_mask<MaskLoad::bytes>(bytes + key * part.mask.col, part.mask.col, left);
    }
  }
};

struct ListedKeys {
  static constexpr int kMaxKeys = 512;
  int32_t keys[kMaxKeys];

  // Lists kept keys until the list is full or all keys are scanned. Returns their number. All lanes of the warp call
  // this.
  __device__ int32_t list(KeyScan &scan) {
    static_assert(2 * KeyScan::kQuarterKeys <= kMaxKeys);
    int32_t count = 0;
    uint32_t quarter = KeyScan::kQuarter;
    __syncwarp(); // all reads of the previous list are complete
    for (;;) {
      int32_t found = __reduce_add_sync(kAllLanes, __popc(scan.kept));
      if (found == 0) {
        if (!scan.has_next()) break;
        scan.advance();
        quarter = KeyScan::kQuarter;
        continue;
      }
      uint32_t taken = scan.kept;
      if (count + found > kMaxKeys) {
        if (count + KeyScan::kQuarterKeys > kMaxKeys) break;
        taken &= quarter;
        quarter <<= 2;
      }
      scan.kept &= ~taken;
      const uint32_t own = __popc(taken), up_to_own = warp_inclusive_sum(own);
      uint32_t place = count + up_to_own - own;
      for (; taken != 0; taken &= taken - 1) {
        const int n = __ffs(static_cast<int>(taken)) - 1;
        keys[place++] = scan.first_key(scan.turn, n % 8) + n / 8;
      }
      count += static_cast<int32_t>(__shfl_sync(kAllLanes, up_to_own, 31));
    }
    __syncwarp();
    return count;
  }
};

} // namespace fdm::cuda
