// SPDX-License-Identifier: BSD-3-Clause
//
// Packed sequences: cumulative lengths, and key/value pages.
#pragma once

#include "checks.h"

namespace fdm {

// Cumulative sequence lengths, int32 (batch + 1,). Their values are checked on the CPU only: on a GPU that would wait.
struct SequenceLengths {
  fdm_tensor tensor;
  int64_t batch;
  int64_t total; // the last value; Extents::unknown on a GPU
};

SequenceLengths read_cu_seqlens(nb::handle object, const char *name, Device device);

// Both cu_seqlens or none.
bool is_varlen(nb::handle cu_seqlens_q, nb::handle cu_seqlens_k);

// Both must number the same sequences.
void require_same_batch(const SequenceLengths &queries, const SequenceLengths &keys);

// The last value must be `total`, the size of the packed dimension of `tensor`.
void require_total(const SequenceLengths &lengths, const char *name, int64_t total, const char *tensor);

// `longest` must not be below any length.
void require_longest(const SequenceLengths &lengths, const char *name, int64_t longest, const char *longest_name);

// The pages of keys and values: int32 (batch, pages of a sequence). On the CPU its used entries must be existing pages.
fdm_tensor read_block_table(nb::handle object, const SequenceLengths &keys, int64_t pages, int64_t page_size,
                            Device device);

} // namespace fdm
