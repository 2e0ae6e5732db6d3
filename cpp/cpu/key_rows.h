// SPDX-License-Identifier: BSD-3-Clause
// K and V as calls read them whose queries list their keys. What is listed lies anywhere, so it is read best from rows
// of float32 that follow each other head by head: rows of several heads, which lie further apart, would compete for few
// lines of the caches.
#pragma once

#include <cstdint>

#include "../pack.h"

namespace fdm::cpu {

// Bytes of the copies, and 0 where K and V are read as they are: where keys are listed too seldom to make up for them.
int64_t key_row_bytes(const fdm_problem &p);

// The problem with its K and V in `memory`, where they are copied to; as it is where key_row_bytes is 0.
fdm_problem with_key_rows(const fdm_problem &p, void *memory);

} // namespace fdm::cpu
