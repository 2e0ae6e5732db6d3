// SPDX-License-Identifier: BSD-3-Clause
// Dense blocks on the host: which problems they serve, and how the work is divided.
#include "dense.h"

#include <algorithm>

#include "../forward/decode.h"
#include "../host/device.h"
#include "../host/dispatch.h"
#include "../plan/plan.cuh"
#include "../tile/copy_rows.cuh"
#include "dbias.cuh"
#include "dense_launch.cuh"
#include "dkdv.cuh"
#include "fused.h"
#include "row_block.cuh"
#include "wide_plan.h"

namespace fdm::cuda {
namespace {

constexpr int kMostSms = 256; // of any device: what depends on the device has room for so many
// The tiles of a kernel: rows or keys of a block of threads, over all slots, and the least of a slot; and the shared
// memory for a number of slots.
struct Tiles {
  int rows, least;
  int (*shared_bytes)(int slots, bool wide, bool mask);
};

template <template <int> class Config> Tiles tiles_of(const fdm_problem &p) {
  return with_head_dim(p.head_dim, DenseHeadDims{}, [](auto dim) {
    using Chosen = Config<decltype(dim)::value>;
    constexpr DenseTileChoice choice = Chosen::kChoice;
    return Tiles{16 * choice.tiles * choice.warps, 16 * choice.tiles, Chosen::shared_bytes};
  });
}
// Sizes do not depend on the dtype.
template <int kDim> using ForwardSizes = RowBlockConfig<__half, kDim, 1, DenseForward>;
template <int kDim> using DqSizes = RowBlockConfig<__half, kDim, 2, DenseBackward>;
template <int kDim> using DkdvSizes = DenseDkdvConfig<__half, kDim>;

// Whether the rows of a mask or bias can be copied 16 bytes at a time.
bool has_chunks(const fdm_tensor &t, int64_t element_bytes) {
  if (!present(t)) return false;
  const int64_t elements = 16 / element_bytes;
  bool aligned = reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.shape[3] > 1 && t.stride[3] == 1;
  for (int d = 0; d < 3; ++d) aligned &= t.shape[d] <= 1 || t.stride[d] % elements == 0;
  return aligned;
}

// Whether two neighbours of a row can be stored at once.
bool has_pairs(const fdm_tensor &t) {
  const int64_t bytes = t.dtype == FDM_FLOAT32 ? 8 : 4;
  bool pairs = reinterpret_cast<uintptr_t>(t.data) % bytes == 0 && t.stride[3] == 1;
  for (int d = 0; d < 3; ++d) pairs &= t.shape[d] <= 1 || t.stride[d] % 2 == 0;
  return pairs;
}

// Whether all sources of an element of the bias have the same rows of mask, or the same intervals.
bool shares_mask(const fdm_problem &p, int64_t batches, int64_t heads) {
  const auto shared = [&](const fdm_tensor &t) {
    return (batches == 1 || t.shape[0] == 1) &&
           (heads == 1 || t.shape[1] == 1 || (t.shape[1] == p.kv_heads && p.bias.shape[1] == p.kv_heads));
  };
  if (has_rows(p.mask)) return shared(p.mask);
  return !present(p.start) || shared(p.start);
}

// Sequences that share an element of the bias.
int64_t batches_of(const fdm_problem &p) { return p.bias.shape[0] == 1 ? p.batch : 1; }

DenseCall make_call(const fdm_problem &p) {
  DenseCall call{};
  call.p = p;
  call.batches = int32_t(batches_of(p));
  call.heads = int32_t(p.heads / p.bias.shape[1]);
  call.shares_mask = shares_mask(p, call.batches, call.heads);
  call.bias_chunks = has_chunks(p.bias, p.bias.dtype == FDM_FLOAT32 ? 4 : 2);
  call.mask_chunks = has_rows(p.mask) && has_chunks(p.mask, 1);
  call.aligned =
      rows_are_aligned(p.q, p.head_dim) && rows_are_aligned(p.k, p.head_dim) && rows_are_aligned(p.v, p.head_dim);
  return call;
}

// Returns as many slots as keep the rows or keys of a tile busy and find room in shared memory, and no more than there
// are sources.
int choose_slots(const Tiles &tiles, const fdm_problem &p, int64_t length, int64_t sources) {
  const auto fits = [&](int slots) {
    return tiles.shared_bytes(slots, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask)) <= kMostShared;
  };
  int slots = 1;
  while (2 * slots <= sources && tiles.rows / slots > tiles.least && tiles.rows / slots / 2 >= length &&
         fits(2 * slots))
    slots *= 2;
  return slots;
}

DenseForward divide_forward(const DenseCall &call) {
  const fdm_problem &p = call.p;
  const Tiles rows = tiles_of<ForwardSizes>(p);
  DenseForward work{};
  work.call = call;
  work.slots = choose_slots(rows, p, p.queries, call.shares_mask ? sources_of(call) : 1);
  work.tiles = int32_t(ceil_div(p.queries, rows.rows / work.slots));
  work.groups = int32_t(ceil_div(sources_of(call), work.slots));
  return work;
}

int64_t forward_blocks(const DenseForward &work) {
  return work.call.p.bias.shape[0] * work.call.p.bias.shape[1] * work.groups * work.tiles;
}

// Few rows leave most of the chip idle, unless the keys are divided. Blocks of threads that an SM holds beside each other
// take little longer than one, since they mostly wait. On one H200 a block of 64 keys took 3.6 us where a mask was folded,
// and 1024 rows of partial results took about as long to be merged; without a mask, a block takes less.
int64_t choose_splits(const DenseForward &work, int sms) {
  const fdm_problem &p = work.call.p;
  const bool mask = has_rows(p.mask);
  const int bytes = tiles_of<ForwardSizes>(p).shared_bytes(work.slots, p.bias.dtype == FDM_FLOAT32, mask);
  const int64_t resident = std::min(dense_forward_tile(int(p.head_dim)).blocks, kMostShared / bytes);
  const int64_t key_blocks = ceil_div(p.keys, kDenseKeys), launched = std::max<int64_t>(1, forward_blocks(work));
  const int64_t most = std::min({resident * sms / launched, key_blocks, kMaxDenseSplits});
  const int64_t merge = (mask ? 1 : 2) * (1 + partial_rows(p) / 1024);
  const auto time_of = [&](int64_t splits) {
    return ceil_div(key_blocks, splits) + (splits > 1 ? merge + splits / 4 : 0);
  };
  int64_t best = 1;
  for (int64_t splits = 2; splits <= most; ++splits)
    if (time_of(splits) < time_of(best)) best = splits;
  return best;
}

// On any device. Without a mask of rows, what is large enough for the kernel for sm_90 on all of them needs no room for
// partial results.
int64_t most_splits(const DenseCall &call) {
  DenseForward work = divide_forward(call);
  const int64_t splits = choose_splits(work, kMostSms);
  return divide_wide_forward(&work, kMostSms, false) ? work.splits : splits;
}

// Gives a tile its slots and stages. False if it does not fit shared memory.
bool fit_dbias_tile(const fdm_problem &p, DbiasWork *work) {
  return with_head_dim(p.head_dim, DenseHeadDims{}, [&](auto dim) {
    using Config = DbiasConfig<__half, decltype(dim)::value>;
    work->slots = Config::kWarps * kDbiasWarpRows * kDbiasWarpKeys / (work->tile_rows * work->tile_keys);
    for (work->stages = 2; work->stages > 0; --work->stages)
      if (Config::shared_bytes(*work, p.bias.dtype == FDM_FLOAT32, has_rows(p.mask)) <= kMostShared) return true;
    return false;
  });
}

DbiasWork divide_dbias(const DenseCall &call, int sms) {
  const fdm_problem &p = call.p;
  DbiasWork work{};
  // The largest tile has one slot. Where there are fewer rows and keys, and the sources have the tile of the bias in
  // common, smaller tiles of several sources leave less of a block idle.
  const int elements = with_head_dim(p.head_dim, DenseHeadDims{}, [](auto dim) {
    return dbias_warps(FDM_TILE_ARCH, decltype(dim)::value) * kDbiasWarpRows * kDbiasWarpKeys;
  });
  const int most_keys = elements >= 64 * 128 ? 128 : 64, most_rows = elements / most_keys;
  work.tile_keys = call.shares_mask && p.keys <= 64 ? 64 : most_keys;
  work.tile_rows = most_rows;
  while (call.shares_mask && work.tile_rows / 2 >= std::max<int64_t>(p.queries, kDbiasWarpRows)) work.tile_rows /= 2;
  while (!fit_dbias_tile(p, &work)) {
    if (work.tile_keys < most_keys)
      work.tile_keys *= 2;
    else
      work.tile_rows *= 2;
  }
  work.row_tiles = int32_t(ceil_div(p.queries, work.tile_rows));
  work.key_tiles = int32_t(ceil_div(p.keys, work.tile_keys));
  work.groups = int32_t(ceil_div(sources_of(call), work.slots));
  work.tiles = int64_t(work.row_tiles) * work.key_tiles;
  if (is_causal(p)) {
    work.tiles = 0;
    for (int64_t tile = 0; tile < work.row_tiles; ++tile) work.tiles += live_key_tiles(p, work, tile);
  }
  work.steps = p.bias.shape[0] * p.bias.shape[1] * work.tiles * work.groups;
  work.blocks = int32_t(std::clamp<int64_t>(work.steps, 1, sms));
  return work;
}

int64_t parts_bytes(const DbiasWork &work) {
  return align_256(2 * int64_t(work.blocks) * work.tile_rows * work.tile_keys * int64_t(sizeof(float)));
}

bool has_one_source(const DenseCall &call) { return sources_of(call) == 1; }

// Whether the fused kernel may compute all gradients, if all are wanted.
bool may_fuse(const DenseCall &call) {
  return call.p.batch > 0 && (has_wide_tiles(call) || has_windows(call)) && !(call.p.flags & FDM_DETERMINISTIC) &&
         call.shares_mask;
}

// Where dk is large, it holds the parts until it is written, so that they take no memory of their own. They have none either
// where the fused kernel would do all, if the tensors lie as it needs them.
bool lends_dk(const DenseCall &call) {
  const fdm_problem &p = call.p;
  return may_fuse(call) || p.batch * p.keys * p.kv_heads * p.head_dim * 2 >= parts_bytes(divide_dbias(call, kMostSms));
}

constexpr int64_t kOddBytes = 256; // of DenseBackward::odd

int64_t deltas_bytes(const fdm_problem &p) { return align_256(partial_rows(p) * int64_t(sizeof(float))); }

template <class Function> cudaError_t with_dense_types(const fdm_problem &p, const Function &function) {
  return with_types<kMaxDenseHeadDim>(p, DenseHeadDims{}, function);
}

FusedPlan plan_of_fused(const DenseCall &call, int sms) {
  if (has_windows(call)) return plan_windows(call, sms);
  return has_clusters(call) ? plan_clusters(call) : plan_fused(call, sms);
}

// The gradient of a bias with several sources.
cudaError_t run_dbias(DenseBackward &work, char *parts, int sms, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  work.dbias = divide_dbias(work.call, sms);
  // What the fused kernel leaves is rare, and no launch is to be spent on its parts.
  if (work.odd)
    work.dbias.whole = true;
  else if (!lends_dk(work.call))
    work.dbias.parts = reinterpret_cast<float *>(parts);
  else if (contiguous_bytes(work.a.dk) >= parts_bytes(work.dbias))
    work.dbias.parts = static_cast<float *>(work.a.dk.data);
  else
    work.dbias.whole = true;
  if (cudaError_t error = with_dense_types(p, [&](auto element, auto dim) {
        return launch_dense_dbias<typename decltype(element)::Type, decltype(dim)::value>(work, stream);
      }))
    return error;
  return work.dbias.whole || work.dbias.blocks == 1 ? cudaSuccess : launch_dense_dbias_sum(work, stream);
}

cudaError_t run_dq(DenseBackward &work, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  const Tiles tiles = tiles_of<DqSizes>(p);
  work.slots = choose_slots(tiles, p, p.queries, work.call.shares_mask ? sources_of(work.call) : 1);
  work.tiles = int32_t(ceil_div(p.queries, tiles.rows / work.slots));
  work.groups = int32_t(ceil_div(sources_of(work.call), work.slots));
  return with_dense_types(p, [&](auto element, auto dim) {
    return launch_dense_dq<typename decltype(element)::Type, decltype(dim)::value>(work, stream);
  });
}

cudaError_t run_dkdv(DenseBackward &work, cudaStream_t stream) {
  const fdm_problem &p = work.call.p;
  const Tiles tiles = tiles_of<DkdvSizes>(p);
  // Sequences side by side read the same bias and mask.
  const bool shares = p.bias.shape[0] == 1 && (!has_rows(p.mask) || p.mask.shape[0] == 1) &&
                      (!present(p.start) || p.start.shape[0] == 1);
  work.slots = choose_slots(tiles, p, p.keys, shares ? p.batch : 1);
  work.tiles = int32_t(ceil_div(p.keys, tiles.rows / work.slots));
  work.groups = int32_t(ceil_div(p.batch, work.slots));
  return with_dense_types(p, [&](auto element, auto dim) {
    return launch_dense_dkdv<typename decltype(element)::Type, decltype(dim)::value>(work, stream);
  });
}

} // namespace

bool is_dense(const fdm_problem &p) {
  if (!has_rows(p.bias) || p.bias.shape[3] != p.keys || p.queries <= kDecodeRows || is_varlen(p)) return false;
  if (p.head_dim > kMaxDenseHeadDim || present(p.sink)) return false;
  const bool one_source = p.bias.shape[0] == p.batch && p.bias.shape[1] == p.heads;
  if (p.keys <= kMostKeysOfRows || !(one_source || has_rows(p.mask))) return true;
  const bool fuses = FDM_TILE_ARCH == 90 && p.softcap <= 0 && p.head_dim <= kMaxWideHeadDim;
  if (!one_source && fuses && p.keys <= kMostKeysOfFewRows && partial_rows(p) <= kFewRows) return true;
  // Where the kernels for sm_90 will not serve a problem, since its tensors do not lie as they need it, slower ones do:
  // what is decided here must be the same for all calls of a plan, so it must not depend on how tensors lie.
  // Without a mask of rows, they need many rows (divide_wide_forward).
  const bool even = p.keys % 16 == 0 && p.head_dim % 8 == 0;
  return even && (has_rows(p.mask) || partial_rows(p) > kFewRows) && has_wide_sizes(p) &&
         !(p.flags & FDM_DETERMINISTIC) && !present(p.start) &&
         (!has_rows(p.mask) || (has_room_for_mask(p) && shares_mask(p, batches_of(p), p.heads / p.bias.shape[1])));
}

int64_t dense_forward_workspace_bytes(const fdm_problem &p) {
  const DenseCall call = make_call(p);
  return live_bytes(call) + partials_bytes(p, most_splits(call));
}

cudaError_t run_dense_forward(const fdm_problem &p, const fdm_forward_args &args, void *workspace) {
  if (p.batch == 0 || p.queries == 0) return cudaSuccess;
  int count;
  if (cudaError_t error = sm_count(&count)) return error;
  DenseForward work = divide_forward(make_call(p));
  work.a = args;
  work.out_aligned = rows_are_aligned(args.out, p.head_dim);
  const auto stream = static_cast<cudaStream_t>(p.context.stream);
  DenseForward wide = work;
  wide.windows = has_windows(work.call) && work.call.shares_mask && work.out_aligned;
  if (wide.windows) {
    wide.splits = 1;
    wide.groups = int32_t(std::clamp<int64_t>(count / p.bias.shape[1], 1, sources_of(work.call)));
  }
  const bool is_wide = args.splits <= 1 && (wide.windows || divide_wide_forward(&wide, count, true));
  const int64_t room = most_splits(work.call);
  if (is_wide) {
    work = wide;
    if (!work.windows && (args.splits == 1 || work.splits > room)) use_whole_tiles(&work, count);
  } else {
    work.splits = int32_t(std::clamp<int64_t>(args.splits > 0 ? args.splits : choose_splits(work, count), 1, room));
  }
  work.partials = partials_at(static_cast<char *>(workspace) + live_bytes(work.call), p, work.splits);
  if (is_wide && finds_live_tiles(work)) {
    work.live = live_tiles(work.call, workspace);
    if (cudaError_t error = launch_live_tiles(work.call, work.live, stream)) return error;
  }
  const cudaError_t error =
      is_wide ? with_wide_types(p,
                                [&](auto element, auto dim) {
                                  using Element = typename decltype(element)::Type;
                                  return launch_dense_wide_forward<Element, decltype(dim)::value>(work, stream);
                                })
              : with_dense_types(p, [&](auto element, auto dim) {
                  using Element = typename decltype(element)::Type;
                  return launch_dense_forward<Element, decltype(dim)::value>(work, stream);
                });
  return error || work.splits == 1 ? error : launch_combine(p, args, work.splits, work.partials, stream);
}

int64_t dense_backward_workspace_bytes(const fdm_problem &p) {
  const DenseCall call = make_call(p);
  const int64_t deltas = deltas_bytes(p), first = kOddBytes + live_bytes(call);
  if (!may_fuse(call))
    return first + deltas + (has_one_source(call) || lends_dk(call) ? 0 : parts_bytes(divide_dbias(call, kMostSms)));
  // The number of SMs decides whether blocks of threads share a tile of dbias.
  FusedPlan plan = plan_of_fused(call, kMostSms);
  if (sources_of(call) > 1 && plan.sums_dbias) plan.dbias_bytes = fused_dbias_bytes(plan.work);
  return first + (plan.keeps_deltas() ? deltas + plan.bytes() : std::max(deltas, plan.bytes()));
}

namespace {

// All deltas, in memory of their own, or in the first elements of the rows of dq.
void use_deltas(DenseBackward *work, char *memory) {
  const fdm_problem &p = work->call.p;
  work->deltas = reinterpret_cast<float *>(memory);
  work->first_delta = 0;
  work->delta_batches = int32_t(p.batch);
  work->delta_batch = p.heads * p.queries;
  work->delta_head = p.queries;
  work->delta_row = 1;
}
void use_deltas_in_dq(DenseBackward *work) {
  const fdm_tensor &dq = work->a.dq;
  work->deltas = static_cast<float *>(dq.data);
  work->delta_batch = dq.stride[0] / 2;
  work->delta_row = dq.stride[1] / 2;
  work->delta_head = dq.stride[2] / 2;
}

} // namespace

cudaError_t run_dense_backward(const fdm_problem &p, const fdm_backward_args &args, void *workspace) {
  int count;
  if (cudaError_t error = sm_count(&count)) return error;
  DenseBackward work{};
  work.call = make_call(p);
  work.a = args;
  work.dout_aligned = rows_are_aligned(args.dout, p.head_dim);
  const fdm_tensor &dbias = args.dbias;
  work.writes_dbias = present(dbias) && has_one_source(work.call);
  work.dbias_pairs = present(dbias) && has_pairs(dbias);
  const auto stream = static_cast<cudaStream_t>(p.context.stream);

  bool fused = may_fuse(work.call) && work.dout_aligned && rows_are_aligned(args.out, p.head_dim) && present(args.dq) &&
               (present(args.dk) || present(args.dv));
  FusedPlan plan{};
  if (fused) plan = plan_of_fused(work.call, count);
  for (const fdm_tensor *t : {&args.dq, &args.dk, &args.dv}) {
    if (plan.work.windows || plan.work.clusters) fused &= !present(*t) || rows_are_aligned(*t, p.head_dim);
    if (plan.in_gradients) fused &= may_hold_sums(*t);
  }
  // Deltas, `odd`, live tiles, and then parts or sums. Where the fused kernel does not keep its deltas, those for the others
  // come last.
  const bool keeps_deltas = !fused || plan.keeps_deltas();
  char *const odd = static_cast<char *>(workspace) + (keeps_deltas ? deltas_bytes(p) : 0),
              *const live = odd + kOddBytes, *const rest = live + live_bytes(work.call);
  use_deltas(&work, keeps_deltas ? static_cast<char *>(workspace) : rest);
  if (fused) {
    if (!present(dbias)) plan.dbias_bytes = 0;
    work.odd = reinterpret_cast<uint32_t *>(odd);
    if (cudaError_t error = cudaMemsetAsync(odd, 0, rest - odd + plan.bytes(), stream)) return error;
    if (finds_live_tiles(work.call)) {
      work.live = live_tiles(work.call, live);
      if (cudaError_t error = launch_live_tiles(work.call, work.live, stream)) return error;
    }
  }
  if (fused && plan.deltas_in_dq) use_deltas_in_dq(&work);
  if (!fused || plan.delta_bytes == 0)
    if (cudaError_t error = launch_deltas(work, false, stream)) return error;
  if (fused)
    if (cudaError_t error = run_fused(work, plan, rest, count, stream)) return error;
  if (!keeps_deltas) {
    use_deltas(&work, rest);
    if (cudaError_t error = launch_deltas(work, true, stream)) return error;
  }
  // First, since it may have its parts in dk.
  if (present(dbias) && !work.writes_dbias)
    if (cudaError_t error = run_dbias(work, rest, count, stream)) return error;
  if (present(args.dq) || work.writes_dbias)
    if (cudaError_t error = run_dq(work, stream)) return error;
  return present(args.dk) || present(args.dv) ? run_dkdv(work, stream) : cudaSuccess;
}

} // namespace fdm::cuda
