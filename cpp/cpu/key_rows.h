// SPDX-License-Identifier: BSD-3-Clause
// K and V as calls read them whose queries list their keys. What is listed lies anywhere, so it is read best from rows
// of float32 that follow each other head by head: rows of several heads, which lie further apart, would compete for few
// lines of the caches.
//
// Where there are several KV heads for each thread, a task is a KV head of a sequence, whose rows it copies just before
// it reads them, so that they are still in the caches. Otherwise the rows of all heads are copied for all threads.
#pragma once

#include "../indexing.h"

namespace fdm::cpu {

// Whether each task of a pass is to copy the rows of a KV head for itself.
bool copies_by_head(const fdm_problem &p);

// Bytes of the copies, and 0 where K and V are read as they are: where keys are listed too seldom to make up for them.
int64_t key_row_bytes(const fdm_problem &p, bool by_head);

// The problem with its K and V in `memory`, where they are copied to; as it is where key_row_bytes is 0.
fdm_problem with_key_rows(const fdm_problem &p, void *memory);

// The same for the keys of a KV head of a sequence alone, in the memory of `worker`.
fdm_problem with_key_rows(const fdm_problem &p, const Sequence &s, int64_t kv_head, void *memory, int worker);

} // namespace fdm::cpu
