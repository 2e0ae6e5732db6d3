// SPDX-License-Identifier: BSD-3-Clause
// Problems with a per-query bias: the choice of the pair bias kernels, and the division of their work.
#include <algorithm>

#include "../pair_bias/tile_sizes.cuh"
#include "route.h"
#include "workspaces.h"

namespace fdm::cuda {
namespace {

bool has_float32_bias(const fdm_problem &p) { return p.bias.dtype == FDM_FLOAT32; }

// Whether all sources of a bias element share the per-query mask or the intervals.
bool shares_mask(const fdm_problem &p, int64_t batches, int64_t heads) {
  const auto shared = [&](const fdm_tensor &t) {
    return (batches == 1 || t.shape[0] == 1) &&
           (heads == 1 || t.shape[1] == 1 || (t.shape[1] == p.kv_heads && p.bias.shape[1] == p.kv_heads));
  };
  if (has_query_rows(p.mask)) return shared(p.mask);
  return !present(p.start) || shared(p.start);
}

// Sequences that share a bias element.
int64_t batches_of(const fdm_problem &p) { return p.bias.shape[0] == 1 ? p.batch : 1; }

// Whether all sequences read the same bias and mask.
bool shares_sequences(const fdm_problem &p) {
  return p.bias.shape[0] == 1 && (!has_query_rows(p.mask) || p.mask.shape[0] == 1) &&
         (!present(p.start) || p.start.shape[0] == 1);
}

// Whether the sm_90 kernels serve problems of these sizes. They require that at least half of the tile area is used.
bool has_sm90_sizes(const fdm_problem &p, const DeviceFacts &device) {
  if (!device.has_wgmma() || p.softcap > 0 || p.head_dim > device.built->pair_bias_sm90.max()) return false;
  return 2 * p.queries * p.keys >= round_up(p.queries, kPairBiasTileSm90) * round_up(p.keys, kPairBiasTileSm90);
}

struct PairBiasChoice {
  const fdm_problem &p;
  const DeviceFacts &device;
  const RouteTable &table;
  const int arch, head_dim, sm90_head_dim; // head dimensions of the instantiations
  PairBiasFacts facts;

  PairBiasChoice(const fdm_problem &problem, const DeviceFacts &own_device, const Alignment &alignment)
      : p(problem), device(own_device), table(*own_device.table), arch(own_device.built->tile_arch),
        head_dim(own_device.built->pair_bias.serving(problem.head_dim)),
        sm90_head_dim(own_device.built->pair_bias_sm90.serving(problem.head_dim)) {
    facts.batches = int32_t(batches_of(p));
    facts.heads = int32_t(p.heads / p.bias.shape[1]);
    facts.shares_mask = shares_mask(p, facts.batches, facts.heads);
    facts.bias_chunks = alignment.bias_chunks;
    facts.mask_chunks = alignment.mask_chunks;
  }

  int64_t sources() const { return facts.sources(); }
  int64_t mask_sources() const { return facts.shares_mask ? sources() : 1; }

  // Whether the small-tile kernels (few rows and keys) serve a problem. They require that at least half of a tile is
  // used, and enough sources for the SMs.
  bool has_small_tiles() const {
    if (!device.has_wgmma() || p.softcap > 0) return false;
    if (p.head_dim > kSmallTileHeadDim || sm90_head_dim != kSmallTileHeadDim) return false;
    return p.queries <= kSmallTile && p.keys <= kSmallTile && 2 * p.queries * p.keys >= kSmallTile * kSmallTile &&
           facts.batches > 1 && group_size(p) == 1 && p.batch * p.heads >= table.small_tile_sources;
  }

  // Whether clusters complete the gradients of a problem (FusedEpilogue::exchange).
  bool has_clusters() const {
    return has_sm90_sizes(p, device) && !has_small_tiles() && sm90_head_dim <= 64 &&
           p.queries <= 2 * kPairBiasTileSm90 && p.keys <= 2 * kPairBiasTileSm90 && group_size(p) == 1;
  }

  bool has_mask_room() const { return has_room_for_mask(sm90_head_dim, has_float32_bias(p)); }

  // Whether the sources of a bias form pairs of query heads that share K, V and the mask.
  bool has_head_pairs() const {
    const bool mask_of_heads = present(p.mask) && p.mask.shape[1] > p.kv_heads;
    return facts.heads % 2 == 0 && group_size(p) % 2 == 0 && facts.shares_mask && !mask_of_heads && has_mask_room();
  }

  // The search for live tiles of a mask takes a launch, so it requires many tiles.
  bool finds_live_tiles() const {
    return has_query_rows(p.mask) && facts.mask_chunks && facts.shares_mask && p.keys > table.pair_bias_keys;
  }
  // The forward pass may save little with them.
  bool finds_live_tiles_forward() const {
    const int64_t tiles =
        ceil_div(p.queries, kPairBiasTileSm90) * ceil_div(p.keys, kPairBiasTileSm90) / (is_causal(p) ? 2 : 1);
    return finds_live_tiles() && tiles * p.batch * p.heads >= table.live_tiles;
  }
  int64_t live_bytes() const {
    if (!finds_live_tiles()) return 0;
    const int64_t row_words = ceil_div(p.keys, 32 * kPairBiasTileSm90);
    return align_256(planes_of(p) * ceil_div(p.queries, kPairBiasTileSm90) * row_words * int64_t(sizeof(uint32_t)));
  }

  // Tiles that divide `length` rows or keys. The number of slots fills the rows of a tile, fits smem, and is at most
  // `side_by_side`.
  template <class Sizes>
  PairBiasTiles divide(Sizes sizes, const PairBiasTileChoice &tile, int64_t length, int64_t side_by_side,
                       int64_t all) const {
    const int rows = 16 * tile.tiles * tile.warps, min_rows = 16 * tile.tiles;
    const auto fits = [&](int slots) {
      sizes.slots = slots;
      return sizes.shared_bytes() <= pair_bias_shared_limit(arch);
    };
    int slots = 1;
    while (2 * slots <= side_by_side && rows / slots > min_rows && rows / slots / 2 >= length && fits(2 * slots))
      slots *= 2;
    return {slots, int32_t(ceil_div(length, rows / slots)), int32_t(ceil_div(all, slots))};
  }
  RowBlockSizes row_sizes(int row_tensors, int slots) const {
    return {arch, head_dim, row_tensors, slots, has_float32_bias(p), has_query_rows(p.mask)};
  }
  PairBiasTiles divide_rows(int row_tensors) const {
    const RowBlockSizes sizes = row_sizes(row_tensors, 1);
    return divide(sizes, sizes.tile(), p.queries, mask_sources(), sources());
  }
  PairBiasTiles divide_keys() const {
    const KeyTileSizes sizes{arch, head_dim, 1, has_float32_bias(p), has_query_rows(p.mask)};
    return divide(sizes, pair_bias_dkdv_tile(head_dim), p.keys, shares_sequences(p) ? p.batch : 1, p.batch);
  }

  // With few rows most SMs are idle unless the keys are split. Several resident thread blocks on an SM take little
  // longer than one, because they mostly wait. On an H200 a block of 64 keys took 3.6 us with a mask, and the merge
  // of 1024 rows of partial results took about as long; without a mask a block takes less.
  int64_t splits_for(const PairBiasForwardWork &work, int64_t sms) const {
    const bool mask = has_query_rows(p.mask);
    const int bytes = row_sizes(1, work.slots).shared_bytes();
    const int64_t resident =
        std::min(pair_bias_forward_tile(int(p.head_dim)).blocks, pair_bias_shared_limit(arch) / bytes);
    const int64_t key_blocks = ceil_div(p.keys, kPairBiasKeys);
    const int64_t launched = std::max<int64_t>(1, planes_of(p) * work.groups * work.tiles);
    const int64_t max_splits = std::min({resident * sms / launched, key_blocks, table.pair_bias_splits});
    const int64_t merge = (mask ? table.pair_bias_mask_merge : table.pair_bias_merge) * (1 + partial_rows(p) / 1024);
    const auto time_of = [&](int64_t splits) {
      return ceil_div(key_blocks, splits) + (splits > 1 ? merge + splits / 4 : 0);
    };
    int64_t best = 1;
    for (int64_t splits = 2; splits <= max_splits; ++splits)
      if (time_of(splits) < time_of(best)) best = splits;
    return best;
  }

  PairBiasForwardWork forward_work() const {
    PairBiasForwardWork work{};
    static_cast<PairBiasTiles &>(work) = divide_rows(1);
    return work;
  }

  // The number of parts that the workspace needs on any device. Without a row mask, a problem that is large enough
  // for the sm_90 kernel on all devices needs no room for partial results.
  int64_t room_for_splits() const {
    PairBiasForwardWork work = forward_work();
    const int64_t splits = splits_for(work, kSmLimit);
    return divide_sm90(&work, kSmLimit, false) ? work.splits : splits;
  }

  static int sm90_rows(const PairBiasForwardWork &work) {
    return work.splits_heads || work.splits_keys ? kPairBiasTileSm90 / 2 : kPairBiasTileSm90;
  }

  void use_whole_tiles(PairBiasForwardWork *work, int64_t sms) const {
    work->splits = 1;
    work->blocks = int32_t(std::min<int64_t>(planes_of(p) * work->groups * work->tiles, sms));
  }

  // Chooses the division of work of the sm_90 forward kernel, by its time. The unit of time is a step: one 128 x 128
  // tile of scores, or the fixed cost of a task.
  //
  // Whole row tiles are visited forth and back, the longest first, so the first or the last thread block has the most
  // work. Equal shares take the least time, but they need partial results and a launch that merges them. Returns the
  // time.
  int64_t choose_shares(PairBiasForwardWork *work, int64_t sms) const {
    const int rows = sm90_rows(*work);
    int64_t steps = work->tiles;
    for (int64_t tile = 0; tile < work->tiles; ++tile) steps += visible_key_tiles(p, tile, rows);
    const int64_t groups = planes_of(p) * work->groups, tasks = groups * work->tiles, all = groups * steps;
    const auto steps_of = [&](int64_t task) {
      return int64_t(task < tasks ? 1 + visible_key_tiles(p, work->tiles - 1 - task / groups, rows) : 0);
    };
    int64_t of_first = 0, of_last = 0;
    for (int64_t turn = 0; turn * work->blocks < tasks; ++turn) {
      const int64_t near = steps_of(turn * work->blocks), far = steps_of((turn + 1) * work->blocks - 1);
      of_first += turn % 2 ? far : near;
      of_last += turn % 2 ? near : far;
    }
    // The parts of a row tile are in consecutive thread blocks.
    const int64_t longest = steps_of(0) - 1;
    const int64_t min_steps = std::max(table.share_steps, ceil_div(longest, table.pair_bias_splits - 1));
    const int64_t shares = std::clamp<int64_t>(all / min_steps, 1, sms);
    const int64_t splits = 1 + ceil_div(longest - 1, all / shares);
    const int64_t bytes = (tasks + shares) * kPairBiasTileSm90 * p.head_dim * int64_t(sizeof(float));
    const int64_t shares_time = ceil_div(all, shares) + 1 + table.share_merge_steps + bytes / table.share_step_bytes;
    // The kernel computes steps times blocks in 32 bits.
    const int64_t whole_time = std::max(of_first, of_last);
    if (splits == 1 || shares_time >= whole_time || (all + 1) * (shares + 1) > INT32_MAX) return whole_time;
    work->splits = int32_t(splits);
    work->blocks = int32_t(shares);
    work->steps = int32_t(steps);
    return shares_time;
  }

  // Whether tasks with half the rows, whose keys the consumer warpgroups divide, take less than `time` steps. All of
  // them must be resident at the same time.
  bool takes_split_keys(int64_t time, int64_t sms) const {
    const int64_t tiles = ceil_div(p.queries, kPairBiasTileSm90 / 2),
                  blocks = visible_key_tiles(p, tiles - 1, kPairBiasTileSm90 / 2);
    const int64_t block_tenths = sm90_head_dim <= 64 ? table.half_block_tenths_64 : table.half_block_tenths_128;
    return planes_of(p) * sources() * tiles <= sms && table.half_task_tenths + block_tenths * blocks < 10 * time;
  }
  void use_split_keys(PairBiasForwardWork *work, int64_t sms) const {
    work->splits_heads = false;
    work->splits_keys = true;
    work->slots = 1;
    work->groups = int32_t(sources());
    work->tiles = int32_t(ceil_div(p.queries, sm90_rows(*work)));
    use_whole_tiles(work, sms);
  }

  // The sm_90 forward kernel copies the bias in 16-byte chunks. Sources share the bias of a block as long as there
  // are blocks for all SMs. With pairs of heads or a row mask, keys may be split too. The workspace query passes
  // may_split_keys = false: another device may have too few SMs for these tasks, and use split-KV.
  bool divide_sm90(PairBiasForwardWork *work, int64_t sms, bool may_split_keys) const {
    if (!has_sm90_sizes(p, device) || !facts.bias_chunks || present(p.start)) return false;
    if (has_query_rows(p.mask) && (!facts.mask_chunks || !facts.shares_mask || !has_mask_room())) return false;
    const int64_t max_slots = sm90_sources(sm90_head_dim);
    work->splits_heads = has_head_pairs();
    const bool shares = work->splits_heads || has_query_rows(p.mask);
    work->tiles = int32_t(ceil_div(p.queries, sm90_rows(*work)));
    work->slots = work->splits_heads ? 2 : 1;
    if (!shares) {
      const int64_t tiles = planes_of(p) * work->tiles;
      work->slots = int32_t(sources() >= max_slots && tiles * (sources() / max_slots) >= sms ? max_slots : 1);
      if (tiles * ceil_div(sources(), work->slots) < sms / 2) {
        const bool splits_keys = may_split_keys && takes_split_keys(table.half_steps, sms);
        if (splits_keys) use_split_keys(work, sms);
        return splits_keys;
      }
    }
    work->groups = int32_t(ceil_div(sources(), work->slots));
    use_whole_tiles(work, sms);
    if (!shares) return true;
    const int64_t time = choose_shares(work, sms);
    if (may_split_keys && takes_split_keys(time, sms)) use_split_keys(work, sms);
    return true;
  }

  // Sets the slots and stages of a tile of the bias gradient. Returns false if it does not fit smem.
  bool fit_dbias_tile(DbiasDivision *work) const {
    const DbiasSizes sizes{arch, head_dim};
    work->slots = sizes.elements() / (work->tile_rows * work->tile_keys);
    for (work->stages = 2; work->stages > 0; --work->stages) {
      const int bytes = sizes.shared_bytes(work->slots, work->tile_rows, work->tile_keys, work->stages,
                                           has_float32_bias(p), has_query_rows(p.mask));
      if (bytes <= pair_bias_shared_limit(arch)) return true;
    }
    return false;
  }

  DbiasDivision divide_dbias(int64_t sms) const {
    DbiasDivision work{};
    // The largest tile has one slot. With fewer rows and keys, if the sources share the bias tile, smaller tiles of
    // several sources leave less of a block idle.
    const int elements = DbiasSizes{arch, head_dim}.elements();
    const int max_keys = elements >= 64 * 128 ? 128 : 64, max_rows = elements / max_keys;
    work.tile_keys = facts.shares_mask && p.keys <= 64 ? 64 : max_keys;
    work.tile_rows = max_rows;
    while (facts.shares_mask && work.tile_rows / 2 >= std::max<int64_t>(p.queries, kDbiasWarpRows)) work.tile_rows /= 2;
    while (!fit_dbias_tile(&work)) {
      if (work.tile_keys < max_keys)
        work.tile_keys *= 2;
      else
        work.tile_rows *= 2;
    }
    work.row_tiles = int32_t(ceil_div(p.queries, work.tile_rows));
    work.key_tiles = int32_t(ceil_div(p.keys, work.tile_keys));
    work.groups = int32_t(ceil_div(sources(), work.slots));
    work.tiles = int64_t(work.row_tiles) * work.key_tiles;
    if (is_causal(p)) {
      work.tiles = 0;
      for (int64_t tile = 0; tile < work.row_tiles; ++tile) work.tiles += live_key_tiles(p, work, tile);
    }
    work.steps = planes_of(p) * work.tiles * work.groups;
    work.blocks = int32_t(std::clamp<int64_t>(work.steps, 1, sms));
    return work;
  }

  // Whether the fused kernel may compute all gradients, if all are requested.
  bool may_fuse() const {
    return p.batch > 0 && (has_sm90_sizes(p, device) || has_small_tiles()) && !(p.flags & FDM_DETERMINISTIC) &&
           facts.shares_mask;
  }

  // Whether the parts need no workspace: a large dk holds them until it is written. A problem that the fused kernel
  // may serve gets none either. If alignment then excludes that kernel, dk holds the parts or tiles are not divided.
  bool lends_dk() const {
    return may_fuse() || p.batch * p.keys * p.kv_heads * p.head_dim * 2 >= divide_dbias(kSmLimit).parts_bytes();
  }

  int64_t deltas_bytes() const { return align_256(partial_rows(p) * int64_t(sizeof(float))); }

  FusedLaunches common_launches(int64_t sms) const {
    FusedLaunches launches{};
    launches.batch = p.batch;
    launches.bias_heads = p.bias.shape[1];
    launches.source_heads = facts.heads;
    launches.task_steps = table.fused_task_steps;
    launches.sms = int32_t(sms);
    launches.causal = is_causal(p);
    return launches;
  }

  // The launches with small tiles (FusedEpilogue): one task for each SM, with equal shares of the sources of a bias
  // head.
  FusedLaunches small_tile_launches(int64_t sms) const {
    FusedLaunches launches = common_launches(sms);
    FusedDivision &work = launches.work;
    work.small_tiles = launches.shares_bias = launches.sums_dbias = true;
    work.row_tiles = work.key_tiles = 1;
    work.planes = int32_t(p.bias.shape[1]);
    work.batches = int32_t(p.batch);
    work.sources = p.batch * facts.heads;
    work.splits = int32_t(std::clamp<int64_t>(sms / work.planes, 1, work.sources));
    launches.dbias_bytes = work.dbias_bytes();
    return launches;
  }

  // The launches of clusters (FusedEpilogue::exchange), which keep the deltas in dq until it is written. Sums of dbias
  // are used only if the batch shares the bias. The launch determines the number of resident clusters and then
  // chooses `splits`.
  FusedLaunches cluster_launches(int64_t sms) const {
    FusedLaunches launches = common_launches(sms);
    FusedDivision &work = launches.work;
    work.clusters = launches.deltas_in_dq = true;
    launches.shares_bias = launches.sums_dbias = facts.batches > 1;
    work.row_tiles = int32_t(ceil_div(p.queries, kPairBiasTileSm90));
    work.key_tiles = int32_t(ceil_div(p.keys, kPairBiasTileSm90));
    work.planes = int32_t(planes_of(p));
    work.batches = int32_t(p.batch);
    work.sources = sources();
    work.splits = launches.shares_bias ? 0 : 1;
    launches.dbias_bytes = launches.sums_dbias ? work.dbias_bytes() : 0;
    return launches;
  }

  // Returns the maximum sequences of a launch. The workspace holds their deltas, and the second halves of sums that
  // fit no later gradient. It takes less than half of the memory of lse, unless a quarter of the batch and one spare
  // sequence need more.
  int64_t max_batches_in_gradients(FusedLaunches *launches, int64_t max_batches) const {
    const int64_t sequence = launches->sequence_bytes(), deltas = launches->delta_bytes, batch = p.batch;
    const int64_t room =
        std::max(batch * deltas * 9 / 20, sequence + std::min(max_batches, ceil_div(batch, 4)) * deltas);
    launches->spare_sequences = std::clamp<int64_t>((room - max_batches * deltas) / sequence, 1, batch);
    return std::clamp<int64_t>((room - launches->spare_sequences * sequence) / deltas, 1, max_batches);
  }

  FusedLaunches launches_with_sums(int64_t sms) const {
    FusedLaunches launches = common_launches(sms);
    FusedDivision &work = launches.work;
    launches.shares_bias = facts.batches > 1;
    launches.dim = sm90_head_dim;
    work.row_tiles = int32_t(ceil_div(p.queries, kPairBiasTileSm90));
    work.key_tiles = int32_t(ceil_div(p.keys, kPairBiasTileSm90));
    work.planes = int32_t(p.bias.shape[1]);
    // The sums of a large dbias would take more memory than everything else. It has so many tiles that blocks need
    // not share them, and one launch has the whole batch if its sums take less than those of dbias. Otherwise a
    // launch has as many sequences as take no more memory than dbias.
    const int64_t dbias_bytes = work.dbias_bytes(), half_row = launches.dim * int64_t(sizeof(float)) / 2;
    launches.query_bytes = p.heads * work.row_tiles * kPairBiasTileSm90 * half_row;
    launches.key_bytes = p.kv_heads * work.key_tiles * kPairBiasTileSm90 * half_row;
    launches.sums_dbias = dbias_bytes <= table.fused_bytes;
    const int64_t sums_bytes = 2 * launches.sequence_bytes();
    const int64_t room = launches.shares_bias ? max64(table.fused_bytes, dbias_bytes) : table.fused_bytes;
    const int64_t max_batches = room / (sums_bytes + (launches.shares_bias || !launches.sums_dbias ? 0 : dbias_bytes));
    int64_t batches = ceil_div(p.batch, ceil_div(p.batch, std::clamp<int64_t>(max_batches, 1, p.batch)));
    if (launches.shares_bias && !launches.sums_dbias && batches < p.batch) {
      launches.sums_dbias = (p.batch - batches) * sums_bytes > dbias_bytes;
      if (!launches.sums_dbias) batches = p.batch;
    }
    launches.sums_in_gradients = batches < p.batch && p.head_dim == launches.dim;
    if (launches.sums_in_gradients) {
      launches.query_bytes = p.heads * p.queries * half_row;
      launches.key_bytes = p.kv_heads * p.keys * half_row;
      launches.delta_bytes = p.heads * p.queries * int64_t(sizeof(float));
      batches = max_batches_in_gradients(&launches, std::clamp<int64_t>(max_batches, 1, ceil_div(p.batch, 2)));
    }
    launches.set_batches(&work, batches, launches.sums_dbias);
    // With one thread block per tile, the block writes the tile itself.
    const bool adds_dbias = work.splits != 1 || (launches.shares_bias && work.batches < p.batch);
    launches.dbias_bytes = adds_dbias ? work.dbias_bytes() : 0;
    return launches;
  }

  FusedLaunches fused_launches(int64_t sms) const {
    if (has_small_tiles()) return small_tile_launches(sms);
    return has_clusters() ? cluster_launches(sms) : launches_with_sums(sms);
  }
};

// Returns the value of FusedDivision::splits that takes the least time.
int32_t choose_splits(const FusedDivision &work, const FusedLaunches &launches, bool may_split) {
  const int64_t tiles = work.tiles(), sources = work.sources, sms = launches.sms;
  const auto time_of = [&](int64_t splits) {
    return ceil_div(tiles * splits, sms) * (ceil_div(sources, splits) + launches.task_steps);
  };
  int32_t best = 1;
  for (int32_t splits = 2; may_split && splits <= std::min(sources, sms); ++splits)
    if (time_of(splits) < time_of(best)) best = splits;
  // The equal share of a block begins and ends within a tile. With a causal mask some shares would have only tiles
  // that no row sees. A block counts steps in 32 bits.
  const int64_t steps = tiles * sources, share = ceil_div(steps, sms), parts = ceil_div(share, sources) + 1;
  return may_split && !launches.causal && steps < INT32_MAX && share + parts * launches.task_steps < time_of(best)
             ? 0
             : best;
}

} // namespace

int64_t DbiasDivision::parts_bytes() const {
  return align_256(2 * int64_t(blocks) * tile_rows * tile_keys * int64_t(sizeof(float)));
}

int32_t FusedDivision::cluster_splits(int64_t task_steps, int64_t clusters) const {
  const auto time_of = [&](int64_t number) {
    return ceil_div(planes * number, clusters) * (ceil_div(sources, number) + task_steps);
  };
  int32_t best = 1;
  for (int32_t number = 2; number <= std::min<int64_t>(sources, 4 * clusters); ++number)
    if (time_of(number) < time_of(best)) best = number;
  return best;
}

int64_t FusedLaunches::deltas_bytes() const { return align_256(work.batches * delta_bytes); }
int64_t FusedLaunches::bytes() const {
  return deltas_bytes() + (sums_in_gradients ? spare_sequences : 2 * int64_t(work.batches)) * sequence_bytes() +
         dbias_bytes;
}
int64_t FusedLaunches::next_batches(int64_t left) const {
  return std::min<int64_t>({work.batches, left, sums_in_gradients ? (left + spare_sequences) / 2 : left});
}

void FusedLaunches::set_batches(FusedDivision *division, int64_t batches, bool splits) const {
  division->batches = int32_t(batches);
  division->planes = int32_t(bias_heads * (shares_bias ? 1 : batches));
  division->sources = (shares_bias ? batches : 1) * source_heads;
  division->splits = choose_splits(*division, *this, splits);
}

FusedDivision FusedLaunches::launch(int64_t first, int64_t *batches) const {
  FusedDivision division = work;
  const int64_t left = batch - first;
  *batches = next_batches(left);
  division.first_batch = int32_t(first);
  if (first > 0) set_batches(&division, *batches, may_split);
  if (shares_bias)
    division.first_source = first * source_heads;
  else
    division.first_plane = int32_t(first * bias_heads);
  division.clears_sums = *batches < left;
  if (sums_in_gradients) division.past_cleared = int32_t(std::min(left, *batches + 2 * next_batches(left - *batches)));
  const int64_t tasks = division.tiles() * (division.splits > 0 ? division.splits : division.sources);
  division.blocks = division.clusters ? 0 : int32_t(std::min<int64_t>(tasks, sms));
  return division;
}

bool is_pair_bias(const fdm_problem &p, const DeviceFacts &device) {
  static_assert(kDecodeRows >= kAnyRowQueries, "these kernels need aligned rows");
  const RouteTable &table = *device.table;
  if (!has_query_rows(p.bias) || p.bias.shape[3] != p.keys || p.queries <= kDecodeRows || is_varlen(p)) return false;
  if (p.head_dim > device.built->pair_bias.max() || present(p.sink)) return false;
  const bool one_source = p.bias.shape[0] == p.batch && p.bias.shape[1] == p.heads;
  if (p.keys <= table.pair_bias_keys || !(one_source || has_query_rows(p.mask))) return true;
  const bool fuses = device.has_wgmma() && p.softcap <= 0 && p.head_dim <= device.built->pair_bias_sm90.max();
  if (!one_source && fuses && p.keys <= table.pair_bias_few_rows_keys && partial_rows(p) <= table.pair_bias_few_rows)
    return true;
  // If the alignment of the bias or of results excludes the sm_90 kernels, slower pair bias kernels serve the problem.
  // This decision must be the same for all calls of a plan, so it must not depend on alignment. Without a row mask, the
  // sm_90 kernels need many rows (divide_sm90).
  const bool even = p.keys % 16 == 0 && p.head_dim % 8 == 0;
  if (!even || !has_sm90_sizes(p, device) || p.flags & FDM_DETERMINISTIC || present(p.start)) return false;
  if (!has_query_rows(p.mask)) return partial_rows(p) > table.pair_bias_few_rows;
  return has_room_for_mask(device.built->pair_bias_sm90.serving(p.head_dim), has_float32_bias(p)) &&
         shares_mask(p, batches_of(p), p.heads / p.bias.shape[1]);
}

void choose_pair_bias_forward(ForwardRoute *route, const fdm_problem &p, const DeviceFacts &device,
                              const Alignment &alignment, int64_t splits) {
  const PairBiasChoice choice(p, device, alignment);
  PairBiasForwardWork work = choice.forward_work(), sm90_work = work;
  const bool small_tiles = splits <= 1 && choice.has_small_tiles() && choice.facts.shares_mask && alignment.out;
  if (small_tiles) {
    sm90_work.splits = 1;
    sm90_work.groups = int32_t(std::clamp<int64_t>(device.sms / p.bias.shape[1], 1, choice.sources()));
  }
  const bool for_sm90 = small_tiles || (splits <= 1 && choice.divide_sm90(&sm90_work, device.sms, true));
  const int64_t room = choice.room_for_splits();
  if (for_sm90) {
    work = sm90_work;
    if (!small_tiles && (splits == 1 || work.splits > room)) choice.use_whole_tiles(&work, device.sms);
  } else {
    work.splits = int32_t(std::clamp<int64_t>(splits > 0 ? splits : choice.splits_for(work, device.sms), 1, room));
  }
  route->kernel = small_tiles ? ForwardKernel::pair_bias_small_tiles
                              : (for_sm90 ? ForwardKernel::pair_bias_sm90 : ForwardKernel::pair_bias);
  route->pair_bias_facts = choice.facts;
  route->pair_bias = work;
  route->splits = work.splits;
  route->heads_per_tile = 1;
  route->tiles = work.tiles;
  if (for_sm90) {
    route->head_dim = choice.sm90_head_dim;
    route->tile_rows = small_tiles ? kSmallTile : PairBiasChoice::sm90_rows(work);
    route->tile_columns = small_tiles ? kSmallTile : kPairBiasTileSm90;
    route->blocks = small_tiles ? work.groups * p.bias.shape[1] : work.blocks;
  } else {
    const PairBiasTileChoice tile = pair_bias_forward_tile(choice.head_dim);
    route->head_dim = choice.head_dim;
    route->tile_rows = 16 * tile.tiles * tile.warps;
    route->tile_columns = kPairBiasKeys;
    route->blocks = planes_of(p) * work.groups * work.tiles * work.splits;
  }
  WorkspaceParts parts;
  const Part live = parts.take_bytes(choice.live_bytes());
  if (for_sm90 && choice.finds_live_tiles_forward()) route->live = live;
  if (work.splits > 1) route->partials = parts.take_bytes(partials_bytes(p, work.splits));
  route->workspace_bytes = parts.bytes;
}

int64_t pair_bias_forward_workspace(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment) {
  const PairBiasChoice choice(p, device, alignment);
  return choice.live_bytes() + partials_bytes(p, choice.room_for_splits());
}

void choose_pair_bias_backward(BackwardRoute *route, const fdm_problem &p, const DeviceFacts &device,
                               const Alignment &alignment, const RequestedGradients &wanted) {
  const PairBiasChoice choice(p, device, alignment);
  PairBiasBackwardRoute &pair_bias = route->pair_bias;
  pair_bias.facts = choice.facts;
  pair_bias.writes_dbias = wanted.dbias && choice.sources() == 1;
  pair_bias.fused = choice.may_fuse() && wanted.dq && (wanted.dk || wanted.dv);
  if (pair_bias.fused) {
    pair_bias.fused_launches = choice.fused_launches(device.sms);
    if (pair_bias.fused_launches.work.small_tiles || pair_bias.fused_launches.work.clusters)
      pair_bias.fused &= alignment.gradients;
    if (pair_bias.fused_launches.sums_in_gradients) pair_bias.fused &= alignment.gradients_hold_sums;
    pair_bias.fused_launches.may_split = !wanted.dbias || pair_bias.fused_launches.dbias_bytes > 0;
    if (pair_bias.fused && !wanted.dbias) pair_bias.fused_launches.dbias_bytes = 0;
  }
  // The layout: deltas, `non_finite`, live tiles, then parts or sums. If the fused kernel does not keep its deltas,
  // those of the fixed-order kernels come last.
  const bool keeps_deltas = !pair_bias.fused || pair_bias.fused_launches.keeps_deltas();
  WorkspaceParts parts;
  if (keeps_deltas) pair_bias.deltas = parts.take_bytes(choice.deltas_bytes());
  const Part non_finite = parts.take_bytes(kNonFiniteBytes), live = parts.take_bytes(choice.live_bytes());
  if (pair_bias.fused) pair_bias.non_finite = non_finite;
  if (pair_bias.fused && choice.finds_live_tiles()) pair_bias.live = live;
  pair_bias.wants_dbias = wanted.dbias && !pair_bias.writes_dbias;
  pair_bias.wants_dq = wanted.dq || pair_bias.writes_dbias;
  pair_bias.wants_dkdv = wanted.dk || wanted.dv;
  int64_t rest = pair_bias.fused ? pair_bias.fused_launches.bytes() : 0;
  if (pair_bias.wants_dbias) {
    pair_bias.dbias = choice.divide_dbias(device.sms);
    // The fixed-order kernels rarely run after the fused kernel, and their parts are not worth a launch.
    if (!pair_bias.fused && !choice.lends_dk()) {
      pair_bias.dbias_parts = DbiasParts::workspace;
      rest = pair_bias.dbias.parts_bytes();
    } else if (!pair_bias.fused && alignment.dk_scratch_bytes >= pair_bias.dbias.parts_bytes()) {
      pair_bias.dbias_parts = DbiasParts::in_dk;
    } else {
      pair_bias.dbias.undivided = true;
    }
  }
  if (pair_bias.wants_dbias && !pair_bias.dbias.undivided && pair_bias.dbias.blocks > 1)
    pair_bias.dbias_sum = {pair_bias.dbias.blocks - 1, device.table->dbias_sum_divisions};
  pair_bias.statistics_division = statistics_division(p, *device.table);
  if (!keeps_deltas) {
    rest = std::max(rest, choice.deltas_bytes());
    pair_bias.deltas = {parts.bytes, choice.deltas_bytes()};
  }
  pair_bias.rest = parts.take_bytes(rest);
  if (pair_bias.wants_dq) pair_bias.dq = choice.divide_rows(2);
  if (pair_bias.wants_dkdv) pair_bias.dkdv = choice.divide_keys();
  route->head_dim = choice.head_dim;
  route->workspace_bytes = parts.bytes;

  Launches &launches = route->launches;
  if (pair_bias.live.exists()) launches.add("live_tiles_kernel");
  launches.add("prepare_backward");
  if (pair_bias.fused) {
    launches.add("pair_bias_fused_kernel");
    if (pair_bias.fused_launches.bytes() > 0) launches.add("round_sums");
    if (!keeps_deltas) launches.add("prepare_backward");
  }
  if (pair_bias.wants_dbias) launches.add("dbias_kernel");
  if (pair_bias.dbias_sum.columns > 0) launches.add("sum_parts");
  if (pair_bias.wants_dq) launches.add("pair_bias_dq_kernel");
  if (pair_bias.wants_dkdv) launches.add("pair_bias_dkdv_kernel");
}

int64_t pair_bias_backward_workspace(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment) {
  const PairBiasChoice choice(p, device, alignment);
  const int64_t deltas = choice.deltas_bytes(), first = kNonFiniteBytes + choice.live_bytes();
  if (!choice.may_fuse()) {
    const bool none = choice.sources() == 1 || choice.lends_dk();
    return first + deltas + (none ? 0 : choice.divide_dbias(kSmLimit).parts_bytes());
  }
  // The number of SMs determines whether thread blocks share a tile of dbias.
  FusedLaunches launches = choice.fused_launches(kSmLimit);
  if (choice.sources() > 1 && launches.sums_dbias) launches.dbias_bytes = launches.work.dbias_bytes();
  return first + (launches.keeps_deltas() ? deltas + launches.bytes() : std::max(deltas, launches.bytes()));
}

} // namespace fdm::cuda
