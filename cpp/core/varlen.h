// SPDX-License-Identifier: BSD-3-Clause
//
// Packed sequences: cumulative lengths, and key/value pages.
#pragma once

#include "checks.h"
#include "record.h"

namespace fdm {

// Cumulative sequence lengths, int32 (batch + 1,). Their values are checked only on the CPU: on a GPU the check would
// synchronize.
struct SequenceLengths {
  const char *name, *max_name; // of the arguments with the bounds and the longest length
  fdm_tensor tensor;
  int64_t batch;
  int64_t total; // the last value; Extents::unknown on a GPU
};

// The lengths of the same sequences, as queries and as keys.
struct PackedLengths {
  SequenceLengths queries, keys;
};

// Reads sequence bounds; `max_name` is the argument with their longest length.
SequenceLengths read_bounds(const TensorField &field, const char *name, const char *max_name, Device device);

// Whether both cu_seqlens are given. Raises an exception if only one is.
bool is_varlen(const CuSeqlens &cu_seqlens);

// Reads both, and checks that they have the same number of sequences.
PackedLengths read_cu_seqlens(const CuSeqlens &cu_seqlens, Device device);

// The last value must be `total`, the size of the packed dimension of `tensor`.
void require_total(const SequenceLengths &lengths, int64_t total, const char *tensor);

// `max_length` must be at least every length.
void require_max_length(const SequenceLengths &lengths, int64_t max_length);

// The block table of keys and values: int32 (batch, pages of a sequence). On the CPU its used entries must be valid
// pages.
fdm_tensor read_block_table(const TensorField &field, const SequenceLengths &keys, int64_t pages, int64_t page_size,
                            Device device);

} // namespace fdm
