// SPDX-License-Identifier: BSD-3-Clause
// The columns of the persistent forward kernel (forward.cuh) without a mask: the columns of a tile are consecutive
// keys. One warp copies Q, K and V as TMA boxes, as far ahead as the pipeline stages allow, also across tiles. A
// lookup warpgroup finds tiles, and the bias and the rows of each key.
#pragma once

#include "../../tile/sm90/key_boxes.cuh"
#include "../../tile/sm90/tile_sizes.cuh"
#include "box_params.cuh"
#include "forward_consumer.cuh"

namespace fdm::cuda {

template <class Config> __device__ void look_up_boxes(const ForwardParams &params, ForwardSharedSm90<Config> &shared) {
  const auto maker = forward_task_maker(params, shared);
  LookupTasks scheduler(maker);
  const BiasStore<Config> on_column{params, shared};
  BoxLookup<typename Config::Pipeline, BiasStore<Config>> keys(params.p, shared.pipeline, on_column);
  for (; !scheduler.at_end(); scheduler.advance())
    keys.run(scheduler, [&] {
      if (scheduler.prepares()) scheduler.prepare_ahead();
    });
  keys.finish();
}

// Copies Q of the task if `copies`, and hands the task to the consumers.
template <class Config>
__device__ void copy_queries(const BoxForwardParams &params, const typename Config::Loader &tasks, const char *sQ,
                             bool copies) {
  tasks.producer_acquire();
  if (threadIdx.x % 32 > 0) return;
  const ForwardTask &task = tasks.current();
  const BoxCoordinates rows{int32_t(task.s.q_begin + task.first_row), int32_t(task.head), int32_t(task.s.batch)};
  if (copies) copy_tile<typename Config::QTile>(sQ, params.q, rows, tasks.full());
  ptx::arrive(tasks.full());
}

template <class Config> __device__ void copy_boxes(const BoxForwardParams &params, ForwardSharedSm90<Config> &shared) {
  BoxCopier<typename Config::Pipeline> keys(shared.pipeline, params.k, params.v);
  typename Config::Loader tasks(shared.tasks);
  for (; tasks.wait(); tasks.advance()) {
    const ForwardTask &task = tasks.current();
    const int boxes = (task.columns.count + Config::kColumns - 1) / Config::kColumns;
    const bool reversed = task.columns.walk_begin >= 0;
    BoxCoordinates coordinates{int32_t(task.s.k_begin), int32_t(task.kv_head), int32_t(task.s.batch)};
    if (reversed) coordinates.row += (boxes - 1) * Config::kColumns;
#pragma unroll 1
    for (int box = 0; box == 0 || box < boxes; ++box) {
      if (box < boxes) keys.copy(coordinates);
      coordinates.row += reversed ? -Config::kColumns : Config::kColumns;
      // The first keys do not wait for an empty stage of Q.
      if (box == 0) copy_queries<Config>(params, tasks, shared.sQ[tasks.stage()], boxes > 0);
      keys.copy_previous_values();
    }
  }
  keys.copy_previous_values();
  copy_queries<Config>(params, tasks, nullptr, false);
}

template <class ConfigType> struct BoxColumns {
  using Config = ConfigType;
  using Params = BoxForwardParams;
  using Registers = BoxForwardRegisters<Config::kHeadDim>;

  __device__ static const ForwardParams &forward(const BoxForwardParams &params) { return params.forward; }
  __device__ static void look_up(const BoxForwardParams &params, ForwardSharedSm90<Config> &shared) {
    look_up_boxes<Config>(params.forward, shared);
  }
  __device__ static void produce(const BoxForwardParams &params, ForwardSharedSm90<Config> &shared) {
    if (Roles::producer_thread() < 32) copy_boxes<Config>(params, shared);
  }
};

} // namespace fdm::cuda
