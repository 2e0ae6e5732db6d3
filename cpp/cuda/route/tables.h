// SPDX-License-Identifier: BSD-3-Clause
// The tuned constants of the routes: one table for each tile architecture of a pack. `[name]` after a reason refers
// to the table of measurements of that name in benchmarks/profiles/README.md.
//
// tests/test_routes.py reads the fields and their reasons. For each field that a table uses, tests/routes has
// problems whose routes change if the value is smaller, and if it is larger.
#pragma once

#include <cstdint>

namespace fdm::cuda {

// The table of sm_80; other tables start from it. A field of 0 means that the architecture has no such feature.
struct RouteTable {
  // All passes.

  // Bytes of K and V that concurrent tiles may read. An H100 has 50 MB of L2, and each L2 half keeps a copy of data
  // that all SMs read [head-groups]
  int64_t l2_bytes = 20 << 20;
  // SMs of an H100 or H200, for choices that must not depend on the device
  int64_t usual_sms = 0;
  // Minimum tiles of a group of heads: several tiles per SM let short tiles balance long ones [head-groups]
  int64_t group_min_tiles = 1024;

  // Forward: division of columns, and choice of the kernel.

  // Minimum column blocks of a split; fewer are not worth a combine step [few-parts]
  int64_t split_blocks = 4;
  // Maximum splits: combine.cu has a lane for each
  int64_t max_splits = 32;
  // Splits whose results a thread of combine.cu loads at a time
  int64_t few_splits = 8;
  // Thread blocks that fill rows outside all packed sequences: two for each SM of an H100. Most batches have no such
  // rows, and a block then reads only two bounds
  int64_t fill_blocks = 264;
  // Minimum splits of a kernel with mma.sync
  int64_t min_splits = 2;
  // The same where a wgmma kernel is the alternative. It has no splits, but computes a tile sooner than four parts
  // take [few-parts]
  int64_t min_wgmma_splits = 0;
  // Thread blocks wanted per SM with splits: as many as share an SM
  int64_t split_blocks_per_sm = 2;
  // The same with a per-query bias: twice as many parts finish closer together
  int64_t per_query_blocks_per_sm = 4;
  // Maximum head dimension for per_query_blocks_per_sm: an SM has room for one block with larger heads, where 4096
  // queries took a fifth longer
  int64_t per_query_max_head_dim = 128;
  // Decode: thread blocks that an SM has registers for, with head dimensions of at most 64
  int64_t decode_blocks_64 = 2;
  // Decode: the same with larger head dimensions
  int64_t decode_blocks_256 = 1;
  // Decode: maximum head dimension with small thread blocks, of which an SM has room for two. With heads up to 64 it has
  // room for two usual ones [decode-blocks]
  int64_t decode_small_max_head_dim = 0;
  // Maximum columns for small tiles, with head dimensions of at most 64: 11 % less time with 639 [few-columns]
  int64_t few_columns_64 = 0;
  // The same with head dimensions of at most 128: 8 % more time with 639 [few-columns]
  int64_t few_columns_128 = 0;
  // Maximum keys for small boxes: 10 to 13 % less time, with a bias 7 % less to 1 % more [small-boxes]
  int64_t short_keys = 0;
  // The same with many tiles and no bias: 4 to 7 % less time [small-boxes]
  int64_t short_keys_of_many = 0;
  // Minimum number of tiles for short_keys_of_many: with 128 tiles of 1024 keys small boxes take 18 % more time
  // [small-boxes]
  int64_t short_many_tiles = 0;
  // Minimum columns of a tile for a tile scheduler with tickets: a fixed order of long tiles leaves some thread
  // blocks idle
  int64_t ticket_columns = 0;
  // Minimum tiles per thread block for tickets: fewer are not worth the memset of the ticket counter
  int64_t ticket_tiles = 0;

  // Decode: splits in a cluster, and the direct decode kernel, in which one query reads the keys without a list.

  // Maximum splits in a cluster: every GPU with clusters supports a cluster of 8 blocks
  int64_t cluster_splits = 1;
  // Minimum keys of such a split [decode-clusters]
  int64_t cluster_split_keys = 0;
  // Maximum keys of such a call: beyond it more SMs than a cluster has are worth a combine kernel [decode-clusters]
  int64_t cluster_keys = 0;
  // The same with a mask, which may keep few keys [decode-clusters]
  int64_t cluster_masked_keys = 0;
  // Maximum thread blocks of a cluster that shares keys; the driver reports how many clusters run at a time
  int64_t direct_splits = 1;
  // Warps of a block that processes all its keys in one turn: the instructions of each warp add time
  int64_t direct_few_warps = 4;
  // Maximum turns of a warp with a mask: beyond it the decode kernel with a key list is faster [decode-kernels]
  int64_t direct_turns = 6;
  // The same without a mask, where the other decode kernel also reads all keys [decode-kernels]
  int64_t direct_turns_of_all = 8;
  // Quarters of the SMs that blocks must fill without a mask: beyond it the direct kernel is always faster
  // [decode-times]
  int64_t direct_busy_quarters = 0;
  // Minimum turns of each cluster that shares the keys of a block: a merge takes the time of a few
  // [decode-shared-keys]
  int64_t direct_part_turns = 0;
  // Minimum turns of a block whose keys several clusters share [decode-shared-keys]
  int64_t direct_shared_turns = 0;
  // Maximum keys of a mask for shared keys: with more keys the list of kept keys is faster [decode-shared-keys]
  int64_t direct_shared_masked_keys = 0;

  // Backward: the parts of key blocks.

  // Target number of parts over all key blocks: a few for each SM of the largest GPUs, so that SMs finish together
  int64_t target_parts = 352;
  // Minimum steps of a part; fewer are not worth its partial sums
  int64_t part_steps = 16;
  // Maximum keys that the host divides: waiting for a schedule takes longer than unequal parts cost
  int64_t unscheduled_keys = 4096;
  // Maximum head dimension with a schedule: larger ones took 2 to 3 % less time without one, smaller ones 4 % more
  // [backward-order]
  int64_t max_scheduled_head_dim = 64;
  // Minimum number of blocks without a schedule, in thirds of `target_parts`: short blocks then balance long ones
  // [backward-order]
  int64_t min_unscheduled_thirds = 2;
  // Maximum head dimension for heads inside of row tiles (HeadsInside). Kernels with key blocks of fewer than 128
  // keys, as for most head dimensions above 128, always use this order [rows-together]
  int64_t heads_inside_max_head_dim = 0;

  // Backward: kernels before and after the mainloops.

  // Thread blocks that compute the row statistics: a few for each SM
  int64_t statistics_blocks = 768;
  // Units of rows per thread block; beyond it the number of blocks grows
  int64_t statistics_units = 8;
  // Sums of the bias gradient that a thread clears
  int64_t clear_sums = 4;
  // Maximum columns of the grid that adds the parts of key blocks
  int64_t sum_columns = 256;
  // Minimum number of items for sum_divisions: few of so many items are divided
  int64_t sum_many_items = 1024;
  // Thread blocks per item with many items
  int64_t sum_divisions = 16;
  // The same with few items, most of which are divided: with 8, 2 heads and 32,768 tokens took 0.27 ms in place of
  // 0.23 (measured on an H100)
  int64_t sum_divisions_of_few = 32;
  // Thread blocks for each divided tile of a bias gradient
  int64_t dbias_sum_divisions = 8;

  // Backward: segments of rows.

  // Minimum rows of a segment: with fewer, key blocks have too few steps for their prologue [segment-rows]
  int64_t segment_min_rows = 256;
  // Maximum rows of a segment: the classes of key_segments.cuh cover this many
  int64_t segment_max_rows = 4096;
  // Maximum wanted rows of a segment. Up to this bound, the number of keys that a query keeps is the best number of
  // rows [segment-rows]
  int64_t segment_window = 1024;
  // Wanted steps of a key block of a segment [segment-rows]
  int64_t segment_steps = 32;
  // Wanted maximum of segments of a sequence: the key sums of more segments take much memory [long-segments]
  int64_t segments = 32;
  // Maximum key blocks of a segment: key_segments.cuh has a thread for each
  int64_t segment_blocks = 512;
  // Maximum key slots per packed row: sequences of few rows leave most of their segments empty [packed-sequences]
  int64_t segment_room = 4;

  // Backward: members of GQA groups.

  // Minimum (row, key) pairs per SM, over all sequences and KV heads, for one call per member: with fewer pairs,
  // kernels of so few heads take as long to start as to run [members]
  int64_t member_pairs = 1 << 20;

  // Backward: small key blocks.

  // Maximum keys for small blocks: with more keys, blocks of 128 keys are faster, which add to dQ half as often
  // [small-blocks]
  int64_t small_keys = 0;
  // Maximum steps of a thread block: with more steps the other kernel takes less time [small-blocks]
  int64_t small_steps = 0;
  // Thread block count below which the step limit is half of small_steps: the other kernel divides few blocks better
  // [small-blocks-few]
  int64_t small_many_blocks = 0;
  // Maximum time with twice the shares, in tenths of the time without [shared-steps]
  int64_t small_share_gain = 0;
  // Concurrent thread blocks on an H100
  int64_t small_slots = 0;
  // Time of a step of a thread block alone on its SM, in tenths of a microsecond [shared-steps]
  int64_t small_step_time = 0;
  // The same with two other thread blocks on the SM [shared-steps]
  int64_t small_crowded_step_time = 0;
  // Time of the prologue and epilogue of a thread block, in steps [shared-steps]
  int64_t small_other_steps = 0;
  // Maximum keys for small blocks of consecutive keys under a selection: ordering the keys would take as long as it
  // saves
  int64_t consecutive_keys = 0;
  // Minimum share of keys that a query of such a selection keeps, as 1 / this: nearly every block then has a key that
  // is kept to the end
  int64_t consecutive_share = 0;
  // Maximum key blocks of a head that sum dQ in a chain: with eight, the waits of SMs cost more than the chain saves
  // [shared-steps]
  int64_t chain_blocks = 0;
  // Chains need head dimensions above this: smaller dQ tiles take as long to hand on, 100 us in place of 87
  int64_t chain_head_dim = 0;
  // Minimum size of the dQ sums for a chain, in quarters of l2_bytes [shared-steps]
  int64_t chain_quarters = 0;

  // Pair bias kernels: a per-query bias.

  // Maximum keys with one source or a per-query mask: with more, gathering columns is faster
  int64_t pair_bias_keys = 2048;
  // The same with several sources and few rows, where latency decides: other kernels took 1.1 ms
  int64_t pair_bias_few_rows_keys = 0;
  // Maximum rows that count as few; the forward kernel of sm_90 needs more
  int64_t pair_bias_few_rows = 0;
  // Maximum splits: combine.cu has a lane for each
  int64_t pair_bias_splits = 32;
  // Time of a merge of parts, in key blocks; also the additional time per 1024 rows
  int64_t pair_bias_mask_merge = 1;
  // The same without a mask, where a key block takes less time
  int64_t pair_bias_merge = 2;
  // Minimum sources for the small-tile kernels (64 rows and keys): with fewer, most SMs would be idle
  // [triangle-kernels]
  int64_t small_tile_sources = 0;
  // Minimum steps of a thread block when blocks have equal shares of all steps
  int64_t share_steps = 0;
  // Time of a merge of partial results, in steps
  int64_t share_merge_steps = 0;
  // Bytes of partial results that add the time of one step
  int64_t share_step_bytes = 0;
  // Maximum time of a task with half the rows, in steps: beyond it, kernels that divide keys are faster
  int64_t half_steps = 0;
  // Time of a task with half the rows besides its key blocks, in tenths of a step
  int64_t half_task_tenths = 0;
  // Time of a key block of such a task, in tenths of a step, with head dimensions of at most 64
  int64_t half_block_tenths_64 = 0;
  // The same with a head dimension of 128
  int64_t half_block_tenths_128 = 0;
  // Minimum score tiles in forward for a search of live tiles, which takes a launch
  int64_t live_tiles = 0;
  // Bytes of the gradient sums of a launch: about the size of L2 [sums-tried]
  int64_t fused_bytes = 0;
  // Time of the prologue and epilogue of a task, in steps
  int64_t fused_task_steps = 0;

  // Selections and plans.

  // Maximum keys that one thread block selects: each thread holds four in registers
  int64_t list_keys = 4096;
  // Maximum rows of such a list: with more, the warps of one block have too many tiles each [plans-tried]
  int64_t list_rows = 16384;
  // Maximum keys of a plan that such a block makes: with more keys, one block per tile is faster [plans-tried]
  int64_t list_plan_keys = 1024;
  // Wanted thread blocks over all lists; several blocks may make one list
  int64_t list_blocks = 128;
  // Minimum tiles of each of those blocks
  int64_t list_part_tiles = 4;
  // Chunks of an interval selection: enough thread blocks for a GPU even with few lists
  int64_t select_chunks = 64;
  // Minimum keys of a chunk: with fewer, finding windows takes more time than the changes within them
  int64_t select_chunk_keys = 256;
  // Minimum keys of a boolean row that several thread blocks select: with fewer, one block finishes before so many
  // launches
  int64_t keep_keys = 16384;
  // Maximum number of such rows: with more, one block per row fills a GPU, and the counts of parts take much memory
  int64_t keep_rows = 512;
  // Wanted thread blocks for all of them: two waves on an H100
  int64_t keep_blocks = 528;
  // Maximum keys of a plan that one launch makes: it reads the keys before each part again [plans]
  int64_t plan_keys = 16384;
  // Wanted thread blocks that list kept keys: with more, each goes through several parts of a list [key-mask-steps]
  int64_t plan_part_blocks = 528;
  // Maximum tiles for blocks of 512 threads: enough threads for the GPU, but no more [plans]
  int64_t plan_tiles_512 = 264;
  // The same for blocks of 256 threads [plans]
  int64_t plan_tiles_256 = 1056;
};

constexpr RouteTable table_of_sm90() {
  RouteTable t;
  t.usual_sms = 132;
  t.min_wgmma_splits = 5;
  t.few_columns_64 = 640;
  t.few_columns_128 = 512;
  t.short_keys = 512;
  t.short_keys_of_many = 1024;
  t.short_many_tiles = 512;
  t.ticket_columns = 1024;
  t.ticket_tiles = 3;
  t.decode_small_max_head_dim = 128;
  t.cluster_splits = 8;
  t.cluster_split_keys = 128;
  t.cluster_keys = 2048;
  t.cluster_masked_keys = 8192;
  t.direct_splits = 16;
  t.direct_busy_quarters = 1;
  t.direct_part_turns = 2;
  t.direct_shared_turns = 4;
  t.direct_shared_masked_keys = 32768;
  t.heads_inside_max_head_dim = 64;
  t.small_keys = 2048;
  t.small_steps = 32;
  t.small_many_blocks = 256;
  t.small_share_gain = 9;
  t.small_slots = 3 * 132;
  t.small_step_time = 30;
  t.small_crowded_step_time = 42;
  t.small_other_steps = 3;
  t.consecutive_keys = 512;
  t.consecutive_share = 8;
  t.chain_blocks = 4;
  t.chain_head_dim = 32;
  t.chain_quarters = 3;
  t.pair_bias_few_rows_keys = 4096;
  t.pair_bias_few_rows = 16384;
  t.small_tile_sources = 1024;
  t.share_steps = 2;
  t.share_merge_steps = 3;
  t.share_step_bytes = 2 << 20;
  t.half_steps = 17;
  t.half_task_tenths = 16;
  t.half_block_tenths_64 = 7;
  t.half_block_tenths_128 = 8;
  t.live_tiles = 2048;
  t.fused_bytes = 64 << 20;
  t.fused_task_steps = 3;
  return t;
}

// The table of the tile architecture of a pack.
inline constexpr RouteTable kSm80Table{}, kSm90Table = table_of_sm90();
constexpr const RouteTable &route_table(int tile_arch) { return tile_arch == 90 ? kSm90Table : kSm80Table; }
// Whether the decode kernel has small thread blocks for a head dimension of its instantiations.
constexpr bool has_small_decode_blocks(const RouteTable &table, int64_t head_dim) {
  return head_dim > 64 && head_dim <= table.decode_small_max_head_dim;
}
#ifdef FDM_TILE_ARCH
// For constants that kernels use.
constexpr RouteTable kRouteTable = route_table(FDM_TILE_ARCH);
#endif

} // namespace fdm::cuda
