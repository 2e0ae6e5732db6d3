// SPDX-License-Identifier: BSD-3-Clause
// The common base of KeyLookup (warps share each block) and BlockLookup (warps take turns at blocks).
#pragma once

#include "../row_places.cuh"
#include "key_stream.cuh"

namespace fdm::cuda {

// The position of a lookup thread in the stream of the blocks of all tasks.
//
// It calls on_column(task, stage, i, bias) for each column after storing its facts.
template <class Stream, class OnColumn> struct StreamLookup {
  static constexpr int kColumns = Stream::kColumns;

  const fdm_problem &p;
  Stream &stream;
  const OnColumn &on_column;
  const RowPlaces &places;
  // The states of the block that is stored next.
  typename Stream::KPipelineState k_state;
  typename Stream::RowState row_state;

  __device__ StreamLookup(const fdm_problem &problem, Stream &shared, const RowPlaces &rows, const OnColumn &call)
      : p(problem), stream(shared), on_column(call), places(rows) {}

  template <class Task> __device__ static int blocks_of(const Task &task) {
    return (task.columns.count + kColumns - 1) / kColumns;
  }

  __device__ void pass_block() {
    ++k_state;
    ++row_state;
  }

  // Stores the facts and the row of column c of the task. `partial`: the block has partial columns.
  template <class Task>
  __device__ void store_column(const Task &task, const ScoreView &bias, int c, bool partial,
                               const ColumnEntry &entry) const {
    const int stage = k_state.index, i = c % kColumns;
    auto &facts = stream.facts[stage];
    const int32_t key = store_facts<kColumns>(facts, task.columns, bias, c, partial, entry);
    on_column(task, stage, i, facts.bias[i]);
    stream.rows[row_state.index][Stream::Gather::list_index(i)] =
        key < 0 ? -1 : places.row(p, task.sequence_index, key);
  }
};

} // namespace fdm::cuda
