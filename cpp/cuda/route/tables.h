// SPDX-License-Identifier: BSD-3-Clause
// The tuned constants of the routes, one table for each architecture whose tiles a pack uses. `[name]` after a reason is the table of
// measurements of that name in benchmarks/profiles/README.md.
//
// tests/test_routes.py reads the fields and their reasons: for each field that a table uses, tests/routes has problems whose routes
// change if it is less, and if it is more.
#pragma once

#include <cstdint>

namespace fdm::cuda {

// A table of sm_80, which the others begin with. A field of 0 says that the architecture has nothing like it.
struct RouteTable {
  // What all passes go by.

  // An H100 has 50 MB of L2, and keeps what all SMs read in both halves [head-groups]
  int64_t l2_bytes = 20 << 20;
  // Of an H100 or H200, for what must not depend on the device
  int64_t usual_sms = 0;
  // Several for each SM, whose short ones even out what long ones leave [head-groups]
  int64_t group_least_tiles = 1024;

  // Forward: how columns are divided, and among which kernels.

  // Blocks of columns that a split must have to be worth a combine step [few-parts]
  int64_t split_blocks = 4;
  // combine.cu has a lane for each
  int64_t most_splits = 32;
  // Whose results a thread of combine.cu has under way at a time
  int64_t few_splits = 8;
  // Of rows that no packed sequence has: two for each SM of an H100. Most batches have none, and each block reads two bounds
  int64_t fill_blocks = 264;
  // Of a kernel with mma.sync
  int64_t least_splits = 2;
  // Kernels with wgmma, which have none, compute a tile sooner than four parts [few-parts]
  int64_t least_wgmma_splits = 0;
  // Two blocks of threads share an SM
  int64_t blocks_of_sm = 2;
  // With a bias for each query twice as many end closer together
  int64_t row_bias_blocks_of_sm = 4;
  // Of those; an SM has room for one block with more: 4096 queries took a fifth more
  int64_t row_bias_most_head_dim = 128;
  // Decode: blocks that an SM has registers for, with heads of 64 and less
  int64_t decode_blocks_64 = 2;
  // And with larger heads
  int64_t decode_blocks_256 = 1;
  // Small tiles, heads of 64 and less: 11 % less time with 639 columns [few-columns]
  int64_t few_columns_64 = 0;
  // Heads of 128 and less: 8 % more time with 639 columns [few-columns]
  int64_t few_columns_128 = 0;
  // Small boxes: 10 to 13 % less time, with a bias 7 % less to 1 % more [small-boxes]
  int64_t short_keys = 0;
  // The same with many tiles and no bias: 4 to 7 % less [small-boxes]
  int64_t short_keys_of_many = 0;
  // With 128 tiles of 1024 keys it takes 18 % more [small-boxes]
  int64_t short_many_tiles = 0;
  // Tickets: with a fixed order long tiles leave some blocks of threads idle
  int64_t ticket_columns = 0;
  // Tiles of each block of threads, to be worth the memset of the counter
  int64_t ticket_tiles = 0;

  // Decode: splits that are a cluster, and the kernel of one query that reads keys directly.

  // Every GPU with clusters has those of 8 blocks
  int64_t cluster_splits = 1;
  // Fewer keys of a split are not worth it [decode-clusters]
  int64_t cluster_split_keys = 0;
  // With more, more SMs than a cluster has are worth a combine kernel [decode-clusters]
  int64_t cluster_keys = 0;
  // The same with a mask, which may keep few [decode-clusters]
  int64_t cluster_masked_keys = 0;
  // Blocks of a cluster that shares keys; the driver tells how many run at a time
  int64_t direct_splits = 1;
  // Of a block, where they take all keys at once: the instructions of each count
  int64_t direct_few_warps = 4;
  // Up to which the kernel is faster with a mask [decode-kernels]
  int64_t direct_turns = 6;
  // Without a mask the other kernel reads all keys, too [decode-kernels]
  int64_t direct_turns_of_all = 8;
  // Enough blocks for so many quarters of the SMs are always the faster [decode-times]
  int64_t direct_busy_quarters = 0;
  // Of a cluster that shares the keys of a block: merging takes a few [decode-shared-keys]
  int64_t direct_part_turns = 0;
  // That a block must have for that [decode-shared-keys]
  int64_t direct_shared_turns = 0;
  // With a mask of more keys the list of kept ones is faster [decode-shared-keys]
  int64_t direct_shared_masked_keys = 0;

  // Backward: the parts of blocks of keys.

  // Parts of all blocks: a few for each SM of the largest GPUs, which end together
  int64_t items = 352;
  // A part with fewer is not worth its partial sums
  int64_t part_steps = 16;
  // The host divides fewer keys: waiting for a schedule takes longer than unequal parts
  int64_t unscheduled_keys = 4096;
  // Larger heads took 2 to 3 % less without a schedule, others 4 % more [backward-order]
  int64_t order_head_dim = 64;
  // Thirds of `items` blocks, of which the short ones even out what long ones leave [backward-order]
  int64_t order_thirds = 2;
  // Up to it, and above 128, heads of a group go inside of tiles of rows [rows-together]
  int64_t rows_inside_head_dim = 0;

  // Backward: what is done before and behind the mainloops.

  // Of rows whose statistics are made: a few for each SM
  int64_t statistics_blocks = 768;
  // Of rows, that a block of threads goes through with that many blocks
  int64_t statistics_units = 8;
  // Of the bias gradient, that a thread clears
  int64_t clear_sums = 4;
  // Of the grid that adds the parts of blocks of keys
  int64_t sum_columns = 256;
  // Items that are many: few of them are divided
  int64_t sum_many_items = 1024;
  // Blocks of threads that share each of many
  int64_t sum_divisions = 16;
  // And of few, most of which are divided: with 8, 2 heads and 32,768 tokens took 0.27 ms in place of 0.23 (seen on an H100)
  int64_t sum_divisions_of_few = 32;
  // Blocks of threads for each divided tile of a dense bias gradient
  int64_t dbias_sum_divisions = 8;

  // Backward: segments of rows.

  // With fewer, blocks of keys have too few steps for their prologue [segment-rows]
  int64_t segment_least_rows = 256;
  // key_segments.cuh has classes for so many
  int64_t segment_most_rows = 4096;
  // As many rows as a query keeps keys are best, up to this [segment-rows]
  int64_t segment_window = 1024;
  // That a block of keys of a segment has [segment-rows]
  int64_t segment_steps = 32;
  // Of a sequence: with more, their sums of keys take memory [long-segments]
  int64_t segments = 32;
  // key_segments.cuh has threads for so many
  int64_t segment_blocks = 512;
  // Places of a packed row: sequences of few rows leave most of their segments empty [packed-sequences]
  int64_t segment_room = 4;

  // Backward: small blocks of keys.

  // With more keys blocks of 192 are faster: they add to dQ a third as often [small-blocks]
  int64_t small_keys = 0;
  // Of a block of threads; the other kernel takes less time with more [small-blocks]
  int64_t small_steps = 0;
  // With fewer blocks of threads half of those steps: the other divides them better [small-blocks-few]
  int64_t small_many_blocks = 0;
  // Tenths of the time that twice the shares may take at most [shared-steps]
  int64_t small_share_gain = 0;
  // Blocks of threads that share the SMs of an H100 at a time
  int64_t small_slots = 0;
  // Tenths of a microsecond that a step takes by itself [shared-steps]
  int64_t small_step_time = 0;
  // Beside two others on an SM [shared-steps]
  int64_t small_crowded_step_time = 0;
  // In whose time a block of threads begins and ends [shared-steps]
  int64_t small_other_steps = 0;
  // Of a selection whose small blocks are not ordered: that would take as long as it spares
  int64_t consecutive_keys = 0;
  // Where a query keeps so large a share of them, nearly every block has one to the end
  int64_t consecutive_share = 0;
  // Of a head that sum dQ in a chain: of eight, SMs wait for more than is spared [shared-steps]
  int64_t chain_blocks = 0;
  // Smaller tiles of dQ take as long to be handed on: 87 us without a chain, 100 us with one
  int64_t chain_head_dim = 0;
  // Of L2 that sums of dQ take, to be worth a chain [shared-steps]
  int64_t chain_quarters = 0;

  // Dense blocks: a bias for each query.

  // With more keys and one source, or a mask of rows, gathering columns is faster
  int64_t dense_keys = 2048;
  // With several sources and few rows, latency decides: 1.1 ms of other kernels
  int64_t dense_few_rows_keys = 0;
  // That are few; the forward kernel of sm_90 needs more
  int64_t dense_few_rows = 0;
  // combine.cu has a lane for each
  int64_t dense_splits = 32;
  // Merging parts takes as many blocks of keys, and as many for each 1024 rows
  int64_t dense_mask_merge = 1;
  // Without a mask, blocks of keys take less
  int64_t dense_merge = 2;
  // Of 64 rows and keys: with fewer most SMs would be idle [triangle-kernels]
  int64_t window_sources = 0;
  // Of a block of threads that has an equal share of all steps
  int64_t share_steps = 0;
  // That merging partial results takes
  int64_t share_merge_steps = 0;
  // Of partial results, each of which takes a step more
  int64_t share_step_bytes = 0;
  // Of a tile of half as many rows: with more, kernels that divide keys are faster
  int64_t half_steps = 0;
  // Tenths of a step that a task of half as many rows takes beside its blocks of keys
  int64_t half_task_tenths = 0;
  // That a block of keys takes, with heads of 64 and less
  int64_t half_block_tenths_64 = 0;
  // And with heads of 128
  int64_t half_block_tenths_128 = 0;
  // Of scores in forward: finding which of them a mask leaves takes a launch
  int64_t live_tiles = 0;
  // Of sums at a time: about what L2 holds [sums-tried]
  int64_t fused_bytes = 0;
  // In whose time a block of threads begins and ends a task
  int64_t fused_task_steps = 0;

  // Selections and plans.

  // Selected by one block of threads, which has four in each thread's registers
  int64_t list_keys = 4096;
  // Beyond this the warps of one block would have too many tiles each [plans-tried]
  int64_t list_rows = 16384;
  // Plans of more selected keys are made sooner by blocks for each tile [plans-tried]
  int64_t list_plan_keys = 1024;
  // Wanted of all lists, each of which several blocks may make
  int64_t list_blocks = 128;
  // Of each of those
  int64_t list_part_tiles = 4;
  // Of intervals: as many make enough blocks for a GPU even with few lists
  int64_t select_chunks = 64;
  // With fewer keys of a chunk, more time goes into finding windows than into their changes
  int64_t select_chunk_keys = 256;
  // Of a plan that one launch makes: it reads the keys before each part again [plans]
  int64_t plan_keys = 16384;
  // That blocks of 512 threads list: enough for the GPU, but no more [plans]
  int64_t plan_tiles_512 = 264;
  // And blocks of 256 [plans]
  int64_t plan_tiles_256 = 1056;
};

constexpr RouteTable table_of_sm90() {
  RouteTable t;
  t.usual_sms = 132;
  t.least_wgmma_splits = 5;
  t.few_columns_64 = 640;
  t.few_columns_128 = 512;
  t.short_keys = 512;
  t.short_keys_of_many = 1024;
  t.short_many_tiles = 512;
  t.ticket_columns = 1024;
  t.ticket_tiles = 3;
  t.cluster_splits = 8;
  t.cluster_split_keys = 128;
  t.cluster_keys = 2048;
  t.cluster_masked_keys = 8192;
  t.direct_splits = 16;
  t.direct_busy_quarters = 1;
  t.direct_part_turns = 2;
  t.direct_shared_turns = 4;
  t.direct_shared_masked_keys = 32768;
  t.rows_inside_head_dim = 64;
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
  t.dense_few_rows_keys = 4096;
  t.dense_few_rows = 16384;
  t.window_sources = 1024;
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

// The table of the architecture whose tiles a pack uses.
inline constexpr RouteTable kSm80Table{}, kSm90Table = table_of_sm90();
constexpr const RouteTable &route_table(int tile_arch) { return tile_arch == 90 ? kSm90Table : kSm80Table; }
#ifdef FDM_TILE_ARCH
// For what kernels take from it.
constexpr RouteTable kRouteTable = route_table(FDM_TILE_ARCH);
#endif

} // namespace fdm::cuda
