// SPDX-License-Identifier: BSD-3-Clause
// Copies of K and V for calls with per-query key lists. Listed keys are scattered, so float32 rows that are
// consecutive for each head are best. Rows of several heads are further apart and would compete for few cache lines.
//
// With several KV heads per thread, a task is a KV head of a sequence, and it copies its rows just before it reads
// them, so that they are still in the caches. Otherwise the rows of all heads are copied for all threads.
#pragma once

#include "../indexing.h"

namespace fdm::cpu {

// Whether each task of a pass copies the rows of its KV head.
bool copies_by_head(const fdm_problem &p);

// Bytes of the copies. 0 if K and V are read in place, as when keys are listed too seldom to make up for copies.
int64_t key_row_bytes(const fdm_problem &p, bool by_head);

// The problem with its K and V copied to `memory`; unchanged if key_row_bytes is 0.
fdm_problem with_key_rows(const fdm_problem &p, void *memory);

// The same for a single KV head of a sequence, in the memory of `worker`.
fdm_problem with_key_rows(const fdm_problem &p, const Sequence &s, int64_t kv_head, void *memory, int worker);

} // namespace fdm::cpu
