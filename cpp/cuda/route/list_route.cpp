// SPDX-License-Identifier: BSD-3-Clause
#include "list_route.h"

#include <algorithm>

#include "workspaces.h"

namespace fdm::cuda {
namespace {

// Heads of a tile have the same biases: a key that one head drops may hold NaN, and another head may keep it.
bool heads_share_keys(const fdm_problem &p) {
  const auto shared = [&](const fdm_tensor &bias) { return !present(bias) || bias.shape[1] <= p.kv_heads; };
  return p.heads == p.kv_heads || (shared(p.bias) && shared(p.index_bias));
}

void divide(ListRoute *route, const fdm_problem &p, int64_t heads_per_tile) {
  route->tiles.heads_per_tile = int32_t(heads_per_tile);
  route->tiles.head_tiles = int32_t(ceil_div(group_size(p), heads_per_tile));
  route->count = route->blocks = route->rows * p.kv_heads * route->tiles.head_tiles;
}

// Whether the kernels with wgmma, whose rows are heads, can serve a call.
bool may_use_wgmma(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment, int64_t fewest_heads) {
  return group_size(p) >= fewest_heads && heads_share_keys(p) && device.has_wgmma() && alignment.inputs &&
         alignment.out && alignment.row_places && has_head_places(p.q);
}

void take_wgmma(ListRoute *route, const fdm_problem &p) {
  route->kernel = ListKernel::wgmma;
  divide(route, p, std::min<int64_t>(group_size(p), kTileRows));
}

ListRoute route_of(const fdm_problem &p, const DeviceFacts &device,
                   ListTileChoice (*tile)(int head_dim, ListHeads heads)) {
  ListRoute route{};
  const int64_t group = group_size(p), together = heads_share_keys(p) ? group : 1;
  route.head_dim = device.built->all.serving(p.head_dim);
  route.heads = list_heads(together);
  route.tile = tile(route.head_dim, route.heads);
  route.rows = (is_varlen(p) ? 1 : p.batch) * total_rows(p);
  divide(&route, p, std::min<int64_t>(together, route.tile.rows()));
  return route;
}

int64_t elements(const fdm_tensor &t) { return present(t) ? t.shape[0] * t.shape[1] * t.shape[2] * t.shape[3] : 0; }

} // namespace

ListRoute list_forward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment) {
  ListRoute route = route_of(p, device, list_forward_tile);
  // Lookup warps read contiguous lists.
  const bool contiguous = p.indices.shape[3] == 1 || p.indices.stride[3] == 1;
  if (contiguous && has_list_forward_sm90(route.head_dim) &&
      may_use_wgmma(p, device, alignment, list_forward_wgmma_heads(route.head_dim))) {
    take_wgmma(&route, p);
    route.blocks = std::min<int64_t>(route.count, device.sms);
  }
  if (route.blocks > 0)
    route.launches.add(route.kernel == ListKernel::wgmma ? "forward_kernel_sm90" : "list_forward_kernel");
  return route;
}

ListRoute list_backward_route(const fdm_problem &p, const DeviceFacts &device, const Alignment &alignment) {
  ListRoute route = route_of(p, device, list_backward_tile);
  // Concurrent thread blocks add to the sums of one KV head.
  const int64_t sum_bytes = 2 * p.keys * route.head_dim * int64_t(sizeof(float));
  const int64_t wanted_parts = ceil_div(sum_bytes, kListSumBytes), length = p.indices.shape[3];
  const bool has_places = route.heads <= ListHeads::up_to_32 && length <= list_places(device.built->tile_arch);
  const int64_t parts = has_places && route.rows > 0 ? std::min(wanted_parts, length / kListPassEntries) : 1;
  const bool sums_in_l2 = wanted_parts <= 1 || parts > 1;
  const int64_t fewest = sums_in_l2 ? kListBackwardWgmmaHeads : kListWgmmaHeadsBeyondL2;
  const bool suits_wgmma = has_list_backward_sm90(route.head_dim) && may_use_wgmma(p, device, alignment, fewest);
  if (suits_wgmma && alignment.dout_places) take_wgmma(&route, p);
  // The workspace is sized before dout exists, so the number of parts must not depend on its strides.
  route.key_parts = suits_wgmma ? 1 : max64(1, parts);
  route.part_keys = ceil_div(p.keys, route.key_parts);
  route.pass_blocks = route.blocks;
  if (route.key_parts > 1) route.pass_blocks = total_rows(p) * route.tiles.head_tiles;
  const int64_t key_rows = p.k.shape[0] * p.k.shape[1] * p.kv_heads,
                biases = max64(elements(p.bias), elements(p.index_bias));
  WorkspaceParts workspace;
  route.key_sums = workspace.take<float>(key_rows * route.head_dim);
  route.value_sums = workspace.take<float>(key_rows * route.head_dim);
  route.bias_sums = workspace.take<float>(elements(p.bias));
  route.index_sums = workspace.take<float>(elements(p.index_bias));
  route.sink_sums = workspace.take<float>(elements(p.sink));
  route.cleared_bytes = workspace.bytes;
  if (route.key_parts > 1)
    route.query_sums = workspace.take<float>(route.pass_blocks * route.tiles.heads_per_tile * route.head_dim);
  route.workspace_bytes = workspace.bytes;
  route.key_rounding_blocks = rounding_blocks(ceil_div(key_rows, kBandRows));
  route.bias_rounding_blocks = ceil_div(max64(biases, elements(p.sink)), kFillThreads);
  if (route.blocks > 0)
    route.launches.add(route.kernel == ListKernel::wgmma ? "list_backward_kernel_sm90" : "list_backward_kernel");
  route.launches.add("round_sums");
  if (route.bias_rounding_blocks > 0) route.launches.add("round_list_sums");
  return route;
}

} // namespace fdm::cuda
