// SPDX-License-Identifier: BSD-3-Clause
// The route of the forward pass over gathered columns and of decode: the row tile of a thread block, the kernel, and
// the number of split-KV parts.
#include <algorithm>
#include <initializer_list>

#include "../tile/sm90/tile_sizes.cuh"
#include "../tile/tile_sizes.cuh"
#include "orders.h"
#include "route.h"
#include "workspaces.h"

namespace fdm::cuda {
namespace {

// Whether the heads of a group share their columns and bias. A tile of several heads must not read a key that one of
// them drops: its values, if non-finite, would reach that head.
bool heads_share_columns(const fdm_problem &p) {
  const auto own_heads = [&](const fdm_tensor &t) { return t.shape[1] == p.heads; };
  if (group_size(p) == 1) return false;
  return !own_heads(p.mask) && !own_heads(p.start) && !own_heads(p.bias);
}

// The maximum columns of a tile.
int64_t max_columns(const fdm_problem &p) {
  return p.max_kept > 0 ? std::min(p.keys, kept_bound(p) + kTileRows - 1) : p.keys;
}

// Whether kernels that copy consecutive keys as TMA boxes serve the problem.
bool has_boxes(const fdm_problem &p) { return mask_kind(p) == FDM_MASK_NONE && !present(p.block_table); }

struct ForwardChoice {
  const fdm_problem &p;
  const DeviceFacts &device;
  const RouteTable &table;
  RowTileChoice tile; // of the usual kernel
  bool narrow;        // values are narrower than keys; kernels without a separate value dimension do not serve them
  bool decode;
  int heads_per_tile;             // 1, or the group size
  int64_t tiles;                  // of the longest sequence
  int64_t blocks;                 // without splits
  int64_t min_splits, max_splits; // if the columns are split
  int64_t wanted_blocks;          // wanted per SM

  ForwardChoice(const fdm_problem &problem, const DeviceFacts &facts)
      : p(problem), device(facts), table(*facts.table),
        tile(forward_tile(facts.built->tile_arch, facts.instantiation(problem, false))) {
    const int64_t group = group_size(p), group_rows = p.queries * group;
    const bool share = heads_share_columns(p), shared_decode = share && group_rows <= kDecodeRows;
    // The general kernel supports a per-query bias only for rows of one head.
    const bool shared_forward = share && !has_query_rows(p.bias) && tile.rows % group == 0 && group_rows <= tile.rows;
    narrow = has_narrow_values(p);
    decode = !narrow && (shared_decode || (!shared_forward && p.queries <= kDecodeRows));
    heads_per_tile = !narrow && (shared_decode || (!decode && shared_forward)) ? int(group) : 1;
    tiles = ceil_div(p.queries * heads_per_tile, decode ? kDecodeRows : tile.rows);
    blocks = p.batch * (p.heads / heads_per_tile) * tiles;
    max_splits = std::clamp<int64_t>(p.keys / (tile.columns * table.split_blocks), 1, table.max_splits);
    // A wgmma kernel computes a tile of few columns sooner than other kernels compute and merge its parts.
    const bool undivided = may_use_wgmma() && p.head_dim % 8 == 0;
    min_splits = undivided ? table.min_wgmma_splits : table.min_splits;
    if ((undivided && has_few_columns()) || narrow) max_splits = 1;
    // Twice as many blocks as are resident finish closer together where their work is unequal, as with a causal mask.
    // The merge costs little where a block has as much work as with a per-query bias.
    const bool has_much_work = has_query_rows(p.bias) && p.head_dim <= table.per_query_max_head_dim;
    wanted_blocks = has_much_work ? table.per_query_blocks_per_sm : table.split_blocks_per_sm;
    if (decode) wanted_blocks = p.head_dim <= 64 ? table.decode_blocks_64 : table.decode_blocks_256;
  }

  bool may_use_wgmma() const { return device.has_wgmma() && !decode && heads_per_tile == 1 && !has_query_rows(p.bias); }

  // Whether small_tiles.cuh serves the problem rather than the persistent kernel: its tiles have few columns.
  bool has_few_columns() const {
    return p.head_dim <= 128 && max_columns(p) <= (p.head_dim <= 64 ? table.few_columns_64 : table.few_columns_128);
  }

  // Whether small_boxes.cuh serves the problem rather than forward_boxes.cuh: its sequences are short.
  bool has_short_columns() const {
    if (!has_boxes(p) || p.head_dim > 64) return false;
    if (p.keys <= table.short_keys) return true;
    return p.keys <= table.short_keys_of_many && !present(p.bias) && blocks >= table.short_many_tiles;
  }

  // With few rows (decode) most SMs are idle unless the columns are split. Only the device knows the number of
  // columns that a mask keeps; splits that find none end at once.
  int64_t splits_for(int64_t sms) const {
    if (blocks == 0) return 1;
    const int64_t splits = std::min(wanted_blocks * sms / blocks, max_splits);
    return splits >= min_splits ? splits : 1;
  }
  // The number of splits that the workspace has room for on every device.
  int64_t room_for_splits() const { return splits_for(kSmLimit); }

  // The splits of a decode call that form a cluster, which merges their results without another kernel; 1 without a
  // cluster. The blocks of a cluster must be resident at the same time and share SMs badly: with twice as many blocks
  // as SMs they took twice as long as other kernels (measured on an H200).
  int64_t cluster_splits() const {
    const int64_t max_keys = mask_kind(p) == FDM_MASK_NONE ? table.cluster_keys : table.cluster_masked_keys;
    if (table.cluster_split_keys == 0 || !decode || blocks == 0 || p.keys > max_keys) return 1;
    return std::clamp<int64_t>(std::min(p.keys / table.cluster_split_keys, device.sms / blocks), 1,
                               table.cluster_splits);
  }

  // Whether a decode call has more thread blocks of usual size than run at the same time. Small ones then take less
  // time, since the first loads of one overlap the work of another. Clusters of four and more blocks leave SMs idle.
  bool takes_small_decode_blocks(const ForwardRoute &route) const {
    const int64_t slots = route.merges_in_cluster && route.splits > 2 ? device.sms * 7 / 8 : device.sms;
    return has_small_decode_blocks(table, route.head_dim) && blocks * route.splits > slots;
  }

  // Whether the persistent kernel assigns tiles dynamically, by tickets. With a fixed order some thread blocks finish
  // much earlier than others if tiles are long or unequal. The ticket counter must be cleared first, so tickets
  // require several tiles per block and many columns.
  //
  // The counter is in the workspace, which belongs to this call alone. A memset on the stream clears it before the
  // kernel. Therefore calls that share a plan may run concurrently, and a CUDA graph clears the counter on each
  // launch.
  bool gives_out_tiles() const {
    return may_use_wgmma() && room_for_splits() == 1 && max_columns(p) >= table.ticket_columns &&
           blocks >= table.ticket_tiles * table.usual_sms && !has_short_columns();
  }

  // The heads of a block of the direct decode kernel: equal shares of a group if its heads share their columns.
  int64_t direct_heads_per_block() const {
    const int64_t group = group_size(p);
    return heads_share_columns(p) ? ceil_div(group, ceil_div(group, kDirectRows)) : 1;
  }
  int64_t direct_blocks_per_kv_head() const { return ceil_div(group_size(p), direct_heads_per_block()); }
  int64_t direct_blocks() const { return p.batch * p.kv_heads * direct_blocks_per_kv_head(); }

  // The number of clusters that share the keys of a block. More than one requires enough keys to keep each of the
  // largest clusters busy, and idle SMs.
  int64_t direct_clusters_per_block() const {
    if (table.direct_part_turns == 0 || is_varlen(p)) return 1;
    const int64_t turn = kDirectKeys * kDirectWarps * table.direct_splits;
    const bool masked = mask_kind(p) != FDM_MASK_NONE;
    if (p.keys < table.direct_shared_turns * turn + masked) return 1;
    if (masked && p.keys > table.direct_shared_masked_keys) return 1;
    const int64_t idle = device.sms / (direct_blocks() * table.direct_splits);
    return std::clamp<int64_t>(std::min(idle, p.keys / (table.direct_part_turns * turn)), 1, room_for_splits());
  }

  // Whether the direct decode kernel serves the problem. Without a mask the other decode kernel also reads all keys,
  // and with enough thread blocks it is never faster (measured on an H100).
  bool decodes_directly(const Alignment &alignment, int64_t splits) const {
    if (p.queries != 1 || p.keys > INT32_MAX / 2 || splits > 0 || p.head_dim > device.built->direct.max()) return false;
    if (has_query_rows(p.bias) || narrow) return false; // a bias with rows: packed sequences of one query each
    if (has_relative_bias(p)) return false;
    const fdm_mask_kind kind = mask_kind(p);
    if (present(p.block_table)) return false;
    if (!(kind == FDM_MASK_NONE || (kind == FDM_MASK_KEYS && needs_no_plan(p, device)))) return false;
    const int64_t own_blocks = direct_blocks();
    if (!alignment.inputs || !alignment.out || !alignment.strides_fit_32_bits || own_blocks == 0) return false;
    if (kind == FDM_MASK_NONE && 4 * own_blocks >= device.sms * table.direct_busy_quarters && device.has_wgmma())
      return true;
    const int64_t sharing =
        std::clamp<int64_t>(device.sms / own_blocks, 1, table.direct_splits) * direct_clusters_per_block();
    const int64_t turns = ceil_div(p.keys, kDirectKeys * kDirectWarps * sharing) * ceil_div(own_blocks, device.sms);
    return turns <= (kind == FDM_MASK_NONE ? table.direct_turns_of_all : table.direct_turns);
  }

  DirectWork direct_work() const {
    DirectWork work{};
    work.heads_per_block = int32_t(direct_heads_per_block());
    work.blocks_per_kv_head = int32_t(direct_blocks_per_kv_head());
    work.clusters_per_block = int32_t(direct_clusters_per_block());
    const int64_t all = direct_blocks() * work.clusters_per_block;
    const int64_t warps = std::max<int64_t>(1, ceil_div(p.keys, kDirectKeys * work.clusters_per_block));
    work.max_splits = int32_t(std::clamp<int64_t>(std::min(ceil_div(warps, table.direct_few_warps), device.sms / all),
                                                  1, table.direct_splits));
    work.max_warps = work.warps(table, p.keys, all, work.max_splits, device.sms);
    return work;
  }

  // The kernel for problems that are not decode.
  ForwardKernel kernel(const Alignment &alignment, int64_t splits) const {
    if (!alignment.inputs || !alignment.out || !alignment.row_places || has_query_rows(p.bias))
      return ForwardKernel::general;
    const int head_dim = device.instantiation(p, false);
    if (device.has_wgmma()) {
      if (heads_per_tile > 1 || splits > 1) return ForwardKernel::usual;
      if (has_boxes(p) && alignment.row_maps)
        return small_box(head_dim).blocks > 0 && has_short_columns() ? ForwardKernel::small_boxes
                                                                     : ForwardKernel::boxes;
      return small_tile(head_dim).columns > 0 && has_few_columns() ? ForwardKernel::small_tiles
                                                                   : ForwardKernel::persistent;
    }
    const bool is_crowded = blocks * splits > int64_t(tile.blocks) * device.sms &&
                            many_blocks_forward_tile(device.built->tile_arch, head_dim).blocks > tile.blocks;
    return is_crowded ? ForwardKernel::crowded : ForwardKernel::usual;
  }
};

// Sets the rows and columns of a tile and the number of thread blocks.
void size_tiles(ForwardRoute *route, const ForwardChoice &choice) {
  const fdm_problem &p = choice.p;
  const int arch = choice.device.built->tile_arch, head_dim = route->head_dim;
  const int64_t all_tiles = choice.blocks * route->splits;
  const int64_t head_tiles = sequence_tiles(p) * p.heads;
  route->too_large = head_tiles > INT32_MAX;
  const auto sized = [&](int rows, int columns, int64_t blocks) {
    route->tile_rows = rows;
    route->tile_columns = columns;
    route->blocks = blocks;
  };
  const auto of = [&](const RowTileChoice &tile) { sized(tile.rows, tile.columns, all_tiles); };
  switch (route->kernel) {
  case ForwardKernel::general:
    return of(general_forward_tile(arch, head_dim));
  case ForwardKernel::usual:
    return of(forward_tile(arch, head_dim));
  case ForwardKernel::crowded:
    return of(many_blocks_forward_tile(arch, head_dim));
  case ForwardKernel::persistent:
    return sized(kTileRows, forward_tile_sm90(head_dim, route->value_dim).columns,
                 std::min<int64_t>(p.batch * route->tiles * p.heads, choice.device.sms));
  case ForwardKernel::boxes:
    return sized(kTileRows, box_tile_sm90(head_dim, route->value_dim).columns,
                 std::min<int64_t>(head_tiles, choice.device.sms));
  case ForwardKernel::small_tiles:
    return sized(kTileRows, small_tile(head_dim).columns, head_tiles);
  case ForwardKernel::small_boxes:
    return sized(kSmallBoxRows, kSmallBoxColumns, head_tiles * (kTileRows / kSmallBoxRows));
  case ForwardKernel::decode:
    return sized(kDecodeRows, 16, p.batch * (p.heads / route->heads_per_tile));
  case ForwardKernel::direct:
    return sized(route->direct.heads_per_block, kDirectKeys, choice.direct_blocks() * route->direct.clusters_per_block);
  default:
    return;
  }
}

const char *name_of(ForwardKernel kernel) {
  switch (kernel) {
  case ForwardKernel::decode:
    return "decode_kernel";
  case ForwardKernel::direct:
    return "direct_decode_kernel";
  case ForwardKernel::persistent:
  case ForwardKernel::boxes:
    return "forward_kernel_sm90";
  case ForwardKernel::small_tiles:
  case ForwardKernel::small_boxes:
    return "small_forward_kernel";
  case ForwardKernel::pair_bias:
    return "pair_bias_forward_kernel";
  case ForwardKernel::pair_bias_sm90:
  case ForwardKernel::pair_bias_small_tiles:
    return "pair_bias_forward_kernel_sm90";
  default:
    return "forward_kernel";
  }
}

} // namespace

int32_t DirectWork::warps(const RouteTable &table, int64_t keys, int64_t blocks, int64_t splits, int64_t sms) const {
  const int64_t all = std::max<int64_t>(1, ceil_div(keys, kDirectKeys * clusters_per_block));
  return int32_t(ceil_div(all, splits) <= table.direct_few_warps || blocks > sms ? table.direct_few_warps
                                                                                 : kDirectWarps);
}

// The warps of the decode kernel scan keys beyond the last one, whose numbers must fit 32 bits.
constexpr int64_t kMaxScannedKeys = INT32_MAX - (int64_t{1} << 20);

bool needs_no_plan(const fdm_problem &p, const DeviceFacts &device) {
  return p.flags & FDM_FORWARD_ONLY && mask_kind(p) == FDM_MASK_KEYS && p.queries == 1 && !has_relative_bias(p) &&
         p.keys <= kMaxScannedKeys && ForwardChoice(p, device).decode;
}

ForwardRoute forward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment,
                           int64_t splits) {
  ForwardRoute route{};
  if (is_varlen(p)) {
    route.unused_rows = fill_work(p.q, alignment.out); // `out` has the shape of Q
    route.unused_rows.blocks = std::min(route.unused_rows.blocks, device.table->fill_blocks);
    route.launches.add("fill");
  }
  if (p.batch == 0 || p.queries == 0) return route;
  if (is_pair_bias(p, device)) {
    choose_pair_bias_forward(&route, p, device, alignment, splits);
  } else {
    const ForwardChoice choice(p, device);
    route.heads_per_tile = choice.heads_per_tile;
    route.tiles = int32_t(choice.tiles);
    route.splits = 1;
    WorkspaceParts parts;
    route.relative = take_relative_parts(&parts, p, false);
    if (choice.decodes_directly(alignment, splits)) {
      route.kernel = ForwardKernel::direct;
      route.head_dim = device.built->direct.serving(p.head_dim);
      route.direct = choice.direct_work();
      route.splits = route.direct.clusters_per_block;
    } else {
      route.order = tile_order(p, *device.table);
      route.finds_keys = needs_no_plan(p, device);
      const int64_t wanted = splits > 0 ? splits : choice.splits_for(device.sms);
      route.splits = int32_t(std::clamp<int64_t>(wanted, 1, choice.room_for_splits()));
      if (const int64_t in_cluster = choice.cluster_splits(); splits == 0 && in_cluster > 1) {
        route.splits = int32_t(in_cluster);
        route.merges_in_cluster = true;
      }
      route.kernel = choice.decode ? ForwardKernel::decode : choice.kernel(alignment, route.splits);
      const bool is_rare =
          route.kernel == ForwardKernel::general || (device.has_wgmma() && route.kernel == ForwardKernel::usual);
      route.head_dim = device.instantiation(p, is_rare);
      route.small_blocks = route.kernel == ForwardKernel::decode && choice.takes_small_decode_blocks(route);
      // Only wgmma kernels use the counter. Unaligned tensors take other kernels.
      if (choice.gives_out_tiles() && alignment.inputs && alignment.out && alignment.row_places)
        route.tickets = parts.take_bytes(sizeof(uint32_t));
    }
    route.value_dim = device.value_instantiation(p, route.head_dim);
    size_tiles(&route, choice);
    if (route.splits > 1 && !route.merges_in_cluster)
      route.partials = parts.take_bytes(partials_bytes(p, route.splits));
    route.workspace_bytes = parts.bytes;
  }
  if (route.live.exists()) route.launches.add("live_tiles_kernel");
  if (route.relative.biases.exists()) route.launches.add("find_relative_biases");
  route.launches.add(name_of(route.kernel));
  if (route.splits > 1 && !route.merges_in_cluster) {
    route.combine = combine_work(p, *device.table, alignment, route.splits);
    route.launches.add("combine_kernel");
  }
  if (route.relative.biases.exists()) route.launches.add("convert_rows");
  return route;
}

int64_t forward_workspace(const fdm_problem &p, const DeviceFacts &device) {
  if (is_pair_bias(p, device)) return pair_bias_forward_workspace(p, device, input_alignment(p));
  const ForwardChoice choice(p, device);
  WorkspaceParts parts;
  take_relative_parts(&parts, p, false);
  return parts.bytes +
         (choice.gives_out_tiles() ? int64_t(sizeof(uint32_t)) : partials_bytes(p, choice.room_for_splits()));
}

} // namespace fdm::cuda
