// SPDX-License-Identifier: BSD-3-Clause
// The tuned constants of the routes, one table for each architecture whose tiles a pack uses. `[name]` after a reason
// is the table of measurements of that name in benchmarks/profiles/README.md.
//
// tests/test_routes.py reads the fields and their reasons: for each field that a table uses, tests/routes has problems
// whose routes change if it is less, and if it is more.
#pragma once

#include <cstdint>

namespace fdm::cuda {

// A table of sm_80, which the others begin with. A field of 0 says that the architecture has nothing like it.
struct RouteTable {
  // What all passes go by.

  // Bytes that the tiles under way at a time may read: an H100 has 50 MB of L2, and keeps what all SMs read in both
  // halves [head-groups]
  int64_t l2_bytes = 20 << 20;
  // SMs of an H100 or H200, for choices that must not depend on the device
  int64_t usual_sms = 0;
  // Least tiles of a group of heads: several for each SM, so that short ones even out what long ones leave
  // [head-groups]
  int64_t group_least_tiles = 1024;

  // Forward: how columns are divided, and among which kernels.

  // Least blocks of columns of a split, to be worth a combine step [few-parts]
  int64_t split_blocks = 4;
  // Most splits: combine.cu has a lane for each
  int64_t most_splits = 32;
  // Splits whose results a thread of combine.cu loads at a time
  int64_t few_splits = 8;
  // Thread blocks that fill rows of no packed sequence: two for each SM of an H100. Most batches have none, and a block
  // reads two bounds
  int64_t fill_blocks = 264;
  // Least splits of a kernel with mma.sync
  int64_t least_splits = 2;
  // The same beside a kernel with wgmma, which has no splits: it computes a tile sooner than four parts [few-parts]
  int64_t least_wgmma_splits = 0;
  // Thread blocks that share an SM
  int64_t blocks_of_sm = 2;
  // The same with a bias for each query: twice as many parts end closer together
  int64_t row_bias_blocks_of_sm = 4;
  // Largest heads of those; an SM has room for one block with larger ones: 4096 queries took a fifth more
  int64_t row_bias_most_head_dim = 128;
  // Decode: blocks that an SM has registers for, with heads of at most 64
  int64_t decode_blocks_64 = 2;
  // Decode: the same with larger heads
  int64_t decode_blocks_256 = 1;
  // Most columns of small tiles, with heads of at most 64: 11 % less time with 639 [few-columns]
  int64_t few_columns_64 = 0;
  // The same with heads of at most 128: 8 % more time with 639 [few-columns]
  int64_t few_columns_128 = 0;
  // Most keys of small boxes: 10 to 13 % less time, with a bias 7 % less to 1 % more [small-boxes]
  int64_t short_keys = 0;
  // The same with many tiles and no bias: 4 to 7 % less [small-boxes]
  int64_t short_keys_of_many = 0;
  // Least tiles that are many: with 128 tiles of 1024 keys small boxes take 18 % more [small-boxes]
  int64_t short_many_tiles = 0;
  // Least columns of a tile for tickets: with a fixed order long tiles leave some thread blocks idle
  int64_t ticket_columns = 0;
  // Least tiles of each thread block, for tickets to be worth the memset of their counter
  int64_t ticket_tiles = 0;

  // Decode: splits that are a cluster, and the kernel of one query that reads keys directly.

  // Splits that are a cluster: every GPU with clusters has those of 8 blocks
  int64_t cluster_splits = 1;
  // Least keys of such a split [decode-clusters]
  int64_t cluster_split_keys = 0;
  // Most keys of such a call: beyond it more SMs than a cluster has are worth a combine kernel [decode-clusters]
  int64_t cluster_keys = 0;
  // The same with a mask, which may keep few [decode-clusters]
  int64_t cluster_masked_keys = 0;
  // Most blocks of a cluster that shares keys; the driver tells how many clusters run at a time
  int64_t direct_splits = 1;
  // Warps of a block that takes all keys at once: the instructions of each count
  int64_t direct_few_warps = 4;
  // Most turns of a warp with a mask: beyond it the other kernel is faster [decode-kernels]
  int64_t direct_turns = 6;
  // The same without a mask: then the other kernel reads all keys, too [decode-kernels]
  int64_t direct_turns_of_all = 8;
  // Quarters of the SMs that blocks must fill: with so many this kernel is always the faster [decode-times]
  int64_t direct_busy_quarters = 0;
  // Least turns of a cluster that shares the keys of a block: merging takes a few [decode-shared-keys]
  int64_t direct_part_turns = 0;
  // Least turns of a block whose keys are shared so [decode-shared-keys]
  int64_t direct_shared_turns = 0;
  // Most keys of a mask: with more the list of kept ones is faster [decode-shared-keys]
  int64_t direct_shared_masked_keys = 0;

  // Backward: the parts of key blocks.

  // Parts of all key blocks: a few for each SM of the largest GPUs, which end together
  int64_t items = 352;
  // Least steps of a part, to be worth its partial sums
  int64_t part_steps = 16;
  // Most keys that the host divides: waiting for a schedule takes longer than unequal parts
  int64_t unscheduled_keys = 4096;
  // Largest heads with a schedule: larger ones took 2 to 3 % less without, others 4 % more [backward-order]
  int64_t order_head_dim = 64;
  // Thirds of `items` blocks, with which short blocks even out what long ones leave, and no schedule is needed
  // [backward-order]
  int64_t order_thirds = 2;
  // Heads of at most so many columns, or of more than 128, go inside of row tiles [rows-together]
  int64_t rows_inside_head_dim = 0;

  // Backward: what is done before and behind the mainloops.

  // Thread blocks that make the statistics of rows: a few for each SM
  int64_t statistics_blocks = 768;
  // Units of rows that each of them goes through before there are more blocks
  int64_t statistics_units = 8;
  // Sums of the bias gradient that a thread clears
  int64_t clear_sums = 4;
  // Most columns of the grid that adds the parts of key blocks
  int64_t sum_columns = 256;
  // Least items that are many: few of them are divided
  int64_t sum_many_items = 1024;
  // Thread blocks that share each of many items
  int64_t sum_divisions = 16;
  // The same of few items, most of which are divided: with 8, 2 heads and 32,768 tokens took 0.27 ms in place of 0.23
  // (seen on an H100)
  int64_t sum_divisions_of_few = 32;
  // Thread blocks for each divided tile of a bias gradient
  int64_t dbias_sum_divisions = 8;

  // Backward: segments of rows.

  // Least rows of a segment: with fewer, key blocks have too few steps for their prologue [segment-rows]
  int64_t segment_least_rows = 256;
  // Most rows of a segment: key_segments.cuh has classes for so many
  int64_t segment_most_rows = 4096;
  // Rows of a segment at most wanted: as many as a query keeps keys are best, up to this [segment-rows]
  int64_t segment_window = 1024;
  // Steps of a key block of a segment that are wanted [segment-rows]
  int64_t segment_steps = 32;
  // Segments of a sequence: with more, their sums of keys take memory [long-segments]
  int64_t segments = 32;
  // Most blocks of a segment: key_segments.cuh has threads for so many
  int64_t segment_blocks = 512;
  // Places for each packed row: sequences of few rows leave most of their segments empty [packed-sequences]
  int64_t segment_room = 4;

  // Backward: members of groups.

  // Least pairs of rows and keys for each SM, of all sequences and KV heads, for a call for each member: with fewer,
  // kernels of so few heads take as long to start as to run [members]
  int64_t member_pairs = 1 << 20;

  // Backward: small key blocks.

  // Most keys of small blocks: with more, blocks of 192 are faster, which add to dQ a third as often [small-blocks]
  int64_t small_keys = 0;
  // Most steps of a thread block: the other kernel takes less time with more [small-blocks]
  int64_t small_steps = 0;
  // Thread blocks below which half of those steps are the most: the other kernel divides few better [small-blocks-few]
  int64_t small_many_blocks = 0;
  // Tenths of the time that twice the shares may take at most [shared-steps]
  int64_t small_share_gain = 0;
  // Thread blocks that share the SMs of an H100 at a time
  int64_t small_slots = 0;
  // Tenths of a microsecond that a step takes on an SM of its own [shared-steps]
  int64_t small_step_time = 0;
  // The same beside two other blocks on the SM [shared-steps]
  int64_t small_crowded_step_time = 0;
  // Steps in whose time a thread block begins and ends [shared-steps]
  int64_t small_other_steps = 0;
  // Most keys of a selection whose small blocks are not ordered: ordering would take as long as it spares
  int64_t consecutive_keys = 0;
  // Least share of keys that such a query keeps, as 1 / this: nearly every block then has one to the end
  int64_t consecutive_share = 0;
  // Most blocks of a head that sum dQ in a chain: with eight, SMs wait for more than is spared [shared-steps]
  int64_t chain_blocks = 0;
  // Heads must be larger for a chain, since small tiles of dQ take as long to hand on: 100 us in place of 87
  int64_t chain_head_dim = 0;
  // Quarters of L2 that sums of dQ must take, to be worth a chain [shared-steps]
  int64_t chain_quarters = 0;

  // Pair bias kernels: a bias for each query.

  // Most keys with one source or a row mask: with more, gathering columns is faster
  int64_t pair_bias_keys = 2048;
  // The same with several sources and few rows, where latency decides: other kernels took 1.1 ms
  int64_t pair_bias_few_rows_keys = 0;
  // Rows that are few; the forward kernel of sm_90 needs more
  int64_t pair_bias_few_rows = 0;
  // Most splits: combine.cu has a lane for each
  int64_t pair_bias_splits = 32;
  // Key blocks in whose time parts are merged, and as many for each 1024 rows
  int64_t pair_bias_mask_merge = 1;
  // The same without a mask, where a key block takes less time
  int64_t pair_bias_merge = 2;
  // Least sources of 64 rows and keys: with fewer most SMs would be idle [triangle-kernels]
  int64_t window_sources = 0;
  // Least steps of a thread block that has an equal share of all steps
  int64_t share_steps = 0;
  // Steps in whose time partial results are merged
  int64_t share_merge_steps = 0;
  // Bytes of partial results that take the time of a step more
  int64_t share_step_bytes = 0;
  // Most steps of a tile of half as many rows: with more, kernels that divide keys are faster
  int64_t half_steps = 0;
  // Tenths of a step that a task of half as many rows takes beside its key blocks
  int64_t half_task_tenths = 0;
  // Tenths of a step that such a key block takes, with heads of at most 64
  int64_t half_block_tenths_64 = 0;
  // The same with heads of 128
  int64_t half_block_tenths_128 = 0;
  // Least tiles of scores in forward, to look for those that a mask leaves: that takes a launch
  int64_t live_tiles = 0;
  // Bytes of sums of a launch: about what L2 holds [sums-tried]
  int64_t fused_bytes = 0;
  // Steps in whose time a thread block begins and ends a task
  int64_t fused_task_steps = 0;

  // Selections and plans.

  // Most keys that one thread block selects: it has four in each thread's registers
  int64_t list_keys = 4096;
  // Most rows of such a list: with more, the warps of one block have too many tiles each [plans-tried]
  int64_t list_rows = 16384;
  // Most keys of its plan: plans of more are made sooner by blocks for each tile [plans-tried]
  int64_t list_plan_keys = 1024;
  // Thread blocks wanted for all lists, each of which several may make
  int64_t list_blocks = 128;
  // Least tiles of each of those blocks
  int64_t list_part_tiles = 4;
  // Chunks of intervals: as many make enough blocks for a GPU even with few lists
  int64_t select_chunks = 64;
  // Least keys of a chunk: with fewer, more time goes into finding windows than into their changes
  int64_t select_chunk_keys = 256;
  // Least keys of a row of booleans that several thread blocks select: with fewer, one has done before so many launches
  int64_t keep_keys = 16384;
  // Most such rows: with more, one block for each is enough for a GPU, and their counts take much memory
  int64_t keep_rows = 512;
  // Thread blocks wanted for all of them: two turns of those that an H100 has room for
  int64_t keep_blocks = 528;
  // Most keys of a plan that one launch makes: it reads the keys before each part again [plans]
  int64_t plan_keys = 16384;
  // Most tiles that blocks of 512 threads list: enough for the GPU, but no more [plans]
  int64_t plan_tiles_512 = 264;
  // The same of blocks of 256 threads [plans]
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
  t.pair_bias_few_rows_keys = 4096;
  t.pair_bias_few_rows = 16384;
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
