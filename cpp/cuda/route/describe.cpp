// SPDX-License-Identifier: BSD-3-Clause
#include "describe.h"

#include <initializer_list>
#include <utility>

namespace fdm::cuda {
namespace {

constexpr const char *kForwardNames[] = {
    "none",  "general",     "usual",       "crowded",   "decode",         "direct",           "persistent",
    "boxes", "small_tiles", "small_boxes", "pair_bias", "pair_bias_sm90", "pair_bias_windows"};
constexpr const char *kQueryNames[] = {"none", "general", "usual", "wgmma"};
constexpr const char *kKeyNames[] = {"none",  "general",  "usual",    "wgmma",  "all",
                                     "fused", "row_bias", "row_mask", "shared", "chained"};
constexpr const char *kPlanNames[] = {"none", "rows", "blocks", "list", "tiles", "chunks", "runs"};
constexpr const char *kSelectionNames[] = {"none", "keep", "parts", "intervals", "list"};
constexpr const char *kInsideNames[] = {"none", "few", "all"};
constexpr const char *kPartsNames[] = {"none", "workspace", "in_dk"};

// A JSON object. It omits values that are 0, false or absent.
class Object {
public:
  void add(const char *name, const std::string &json) {
    text_ += (text_.empty() ? "\"" : ", \"") + std::string(name) + "\": " + json;
  }
  void word(const char *name, const char *value) { add(name, "\"" + std::string(value) + "\""); }
  void number(const char *name, int64_t value) {
    if (value != 0) add(name, std::to_string(value));
  }
  void flag(const char *name, bool value) {
    if (value) add(name, "true");
  }
  void object(const char *name, const Object &inner) {
    if (!inner.text_.empty()) add(name, inner.json());
  }
  // [offset, bytes] of each part of a workspace.
  void parts(std::initializer_list<std::pair<const char *, const Part *>> all) {
    Object inner;
    for (const auto &[name, part] : all)
      if (part->exists())
        inner.add(name, "[" + std::to_string(part->offset) + ", " + std::to_string(part->bytes) + "]");
    object("workspace", inner);
  }
  void launches(const Launches &launched) {
    std::string list;
    for (int n = 0; n < launched.count; ++n) list += (n ? ", \"" : "\"") + std::string(launched.kernel[n]) + "\"";
    add("launches", "[" + list + "]");
  }
  void order(const TileOrder &tile_order) {
    number("sequences_together", tile_order.sequences);
    number("heads_together", tile_order.heads);
  }
  void tiles(const PairBiasTiles &division) {
    number("slots", division.slots);
    number("tiles", division.tiles);
    number("groups", division.groups);
  }
  std::string json() const { return "{" + text_ + "}"; }

private:
  std::string text_;
};

Object of_fused(const FusedLaunches &fused) {
  Object fields;
  const FusedDivision &work = fused.work;
  fields.word("kernel", work.small_tiles ? "windows" : work.clusters ? "clusters" : "fused");
  fields.number("splits", work.splits);
  fields.number("batches", work.batches);
  fields.number("planes", work.planes);
  fields.number("sources", work.sources);
  fields.flag("shares_sums", fused.shares_bias);
  fields.flag("sums_in_gradients", fused.sums_in_gradients);
  fields.number("spare_sequences", fused.spare_sequences);
  fields.number("bytes", fused.bytes());
  int64_t launches = 0;
  for (int64_t first = 0, batches; first < fused.batch; first += batches, ++launches) fused.launch(first, &batches);
  fields.number("launches", launches);
  return fields;
}

void add_statistics(Object *fields, const StatisticsDivision &rows) {
  fields->number("statistics_lanes", rows.lanes);
  fields->number("statistics_units", rows.units(rows.batches));
  fields->number("statistics_blocks", rows.blocks(rows.batches));
}

void add_pair_bias_backward(Object *route, const PairBiasBackwardRoute &pair_bias) {
  add_statistics(route, pair_bias.statistics_division);
  if (pair_bias.fused) route->object("fused", of_fused(pair_bias.fused_launches));
  route->flag("dq_writes_dbias", pair_bias.writes_dbias);
  if (pair_bias.wants_dbias) {
    Object fields;
    fields.number("slots", pair_bias.dbias.slots);
    fields.number("tile_rows", pair_bias.dbias.tile_rows);
    fields.number("tile_keys", pair_bias.dbias.tile_keys);
    fields.number("stages", pair_bias.dbias.stages);
    fields.number("blocks", pair_bias.dbias.blocks);
    fields.flag("whole_tiles", pair_bias.dbias.undivided);
    fields.word("parts", kPartsNames[int(pair_bias.dbias_parts)]);
    fields.number("sum_divisions", pair_bias.dbias_sum.divisions);
    route->object("dbias", fields);
  }
  Object dq, dkdv;
  if (pair_bias.wants_dq) dq.tiles(pair_bias.dq);
  if (pair_bias.wants_dkdv) dkdv.tiles(pair_bias.dkdv);
  route->object("dq_tiles", dq);
  route->object("dkdv_tiles", dkdv);
  route->parts({{"deltas", &pair_bias.deltas},
                {"non_finite", &pair_bias.non_finite},
                {"live", &pair_bias.live},
                {"rest", &pair_bias.rest}});
}

void add_relative(Object *fields, const RelativeParts &relative) {
  fields->number("reference_blocks", relative.reference_blocks);
  fields->number("conversion_blocks", relative.conversion_blocks);
}

Object of_helpers(const BackwardRoute &route) {
  Object fields;
  fields.number("order_blocks", route.preparation.order);
  fields.number("clear_blocks", route.preparation.clearing);
  add_statistics(&fields, route.statistics_division);
  fields.number("sum_columns", route.key_sum.columns);
  fields.number("sum_divisions", route.key_sum.divisions);
  fields.number("query_sum_blocks", route.query_sum_blocks);
  fields.number("segment_sum_blocks", route.segment_sum_blocks);
  fields.number("reduce_blocks", route.bias_reduction.blocks);
  fields.number("row_bias_blocks", route.row_bias_blocks);
  add_relative(&fields, route.relative);
  return fields;
}

Object of_keys(const BackwardRoute &route) {
  Object fields;
  const KeyDivision &keys = route.division;
  fields.number("block_keys", keys.block_keys);
  fields.number("tile_rows", keys.tile_rows);
  fields.number("blocks", keys.blocks);
  fields.number("heads", keys.heads);
  fields.number("together", keys.heads_per_wave);
  fields.flag("listed", keys.takes_planned_keys);
  fields.word("heads_inside", kInsideNames[int(keys.heads_inside)]);
  fields.number("shares", keys.shares);
  fields.number("parts", keys.parts);
  fields.number("items", keys.max_items);
  fields.number("slots", keys.stored_parts);
  fields.number("schedule_sms", keys.sms);
  const SegmentWork &segments = route.segments;
  fields.number("segment_rows", segments.rows);
  fields.number("segments", segments.count);
  fields.number("segment_blocks", segments.blocks);
  fields.number("segment_leading", segments.leading);
  fields.number("segment_sums", segments.max_sums);
  fields.number("segment_row_sums", segments.row_sums);
  return fields;
}

// The names of the bits of a number.
struct Words {
  std::initializer_list<const char *> words;

  std::string of(int bits) const {
    std::string text;
    for (const char *word : words) {
      if (bits & 1) text += std::string(" + ") + word;
      bits >>= 1;
    }
    return text;
  }
};
int bits_of(std::initializer_list<bool> flags) {
  int bits = 0, bit = 1;
  for (bool flag : flags) {
    bits |= flag ? bit : 0;
    bit *= 2;
  }
  return bits;
}

} // namespace

std::string describe(const PlanRoute &route) {
  Object fields;
  fields.word("kernel", kPlanNames[int(route.kernel)]);
  fields.number("threads", route.threads);
  fields.number("parts", route.parts);
  fields.number("list_blocks", route.list_parts.blocks);
  fields.number("list_steps", route.list_parts.steps);
  fields.flag("aligned", route.aligned);
  fields.number("chunk_blocks", route.chunk_blocks);
  fields.number("blocks", route.blocks);
  // Of a plan of blocks the problem gives only a lower bound.
  if (route.kernel != PlanKernel::blocks) fields.number("plan_bytes", route.plan_bytes);
  fields.parts({{"counts", &route.counts}});
  fields.number("workspace_bytes", route.workspace_bytes);
  fields.launches(route.launches);
  return fields.json();
}

std::string describe(const SelectionRoute &route) {
  Object fields;
  fields.word("kernel", kSelectionNames[int(route.kernel)]);
  fields.number("threads", route.threads);
  fields.number("keys_of_thread", route.keys_of_thread);
  fields.number("parts", route.parts);
  fields.number("chunk_keys", route.chunks.keys);
  fields.number("chunks", route.chunks.count);
  fields.number("part_keys", route.keep.keys);
  fields.number("row_parts", route.keep.count);
  fields.number("listed", route.keep.list_capacity);
  fields.number("blocks", route.blocks);
  fields.parts({{"states", &route.states},
                {"digits", &route.digits},
                {"part_digits", &route.part_digits},
                {"seen", &route.seen},
                {"lists", &route.lists}});
  fields.number("workspace_bytes", route.workspace_bytes);
  fields.launches(route.launches);
  return fields.json();
}

std::string describe(const ForwardRoute &route) {
  Object fields;
  fields.word("kernel", kForwardNames[int(route.kernel)]);
  fields.flag("too_large", route.too_large);
  fields.number("head_dim", route.head_dim);
  if (route.value_dim < route.head_dim) fields.number("value_dim", route.value_dim);
  fields.number("tile_rows", route.tile_rows);
  fields.number("tile_columns", route.tile_columns);
  fields.number("heads_per_tile", route.heads_per_tile);
  fields.number("tiles", route.tiles);
  fields.number("splits", route.splits);
  fields.flag("merges_in_cluster", route.merges_in_cluster);
  fields.flag("small_blocks", route.small_blocks);
  fields.flag("finds_keys", route.finds_keys);
  fields.number("blocks", route.blocks);
  fields.order(route.order);
  if (route.kernel == ForwardKernel::direct) {
    fields.number("heads_of_block", route.direct.heads_per_block);
    fields.number("most_splits", route.direct.max_splits);
    fields.number("warps", route.direct.max_warps);
  }
  if (route.is_pair_bias()) {
    fields.number("slots", route.pair_bias.slots);
    fields.number("groups", route.pair_bias.groups);
    fields.number("steps", route.pair_bias.steps);
    fields.flag("pairs", route.pair_bias.splits_heads);
    fields.flag("halves", route.pair_bias.splits_keys);
  }
  fields.number("combine_splits", route.combine.max_splits);
  fields.number("combine_blocks", route.combine.blocks);
  fields.number("fill_blocks", route.unused_rows.blocks);
  add_relative(&fields, route.relative);
  fields.parts({{"partials", &route.partials},
                {"tickets", &route.tickets},
                {"live", &route.live},
                {"relative_biases", &route.relative.biases},
                {"relative_lse", &route.relative.lse}});
  fields.number("workspace_bytes", route.workspace_bytes);
  fields.launches(route.launches);
  return fields.json();
}

std::string describe(const BackwardRoute &route) {
  Object fields;
  fields.flag("nothing", route.nothing);
  fields.flag("pair_bias", route.is_pair_bias);
  fields.flag("too_large", route.too_large);
  fields.number("head_dim", route.head_dim);
  if (!route.is_pair_bias && route.value_dim < route.head_dim) fields.number("value_dim", route.value_dim);
  if (route.is_pair_bias) {
    add_pair_bias_backward(&fields, route.pair_bias);
  } else if (!route.nothing) {
    fields.word("dq", kQueryNames[int(route.query_kernel)]);
    fields.word("keys", kKeyNames[int(route.key_kernel)]);
    fields.flag("row_bias", route.row_bias_blocks > 0);
    fields.flag("scheduled", route.scheduled);
    fields.flag("reduces_bias", route.reduces_bias);
    fields.number("members", route.members);
    fields.number("bias_heads", route.bias_heads);
    fields.number("blocks", route.blocks);
    fields.order(route.order);
    fields.object("division", of_keys(route));
    fields.object("helpers", of_helpers(route));
    fields.parts({{"statistics", &route.statistics},
                  {"sink_shares", &route.sink_shares},
                  {"query_sums", &route.query_sum_data},
                  {"bias_sums", &route.bias_sums},
                  {"ordered", &route.ordered},
                  {"ranges", &route.ranges},
                  {"items", &route.items},
                  {"item_count", &route.item_count},
                  {"slots", &route.part_sums},
                  {"segment_order", &route.segment_order},
                  {"segment_live", &route.segment_kept},
                  {"segment_sums", &route.segment_sums},
                  {"segment_bias_sums", &route.segment_bias_sums},
                  {"segment_keys", &route.segment_keys},
                  {"segment_counts", &route.segment_counts},
                  {"member_plan", &route.member_plan},
                  {"member_plan_work", &route.member_plan_work},
                  {"member_keys", &route.member_keys},
                  {"member_values", &route.member_values},
                  {"relative_biases", &route.relative.biases},
                  {"relative_lse", &route.relative.lse},
                  {"relative_dlse", &route.relative.dlse}});
  }
  fields.number("workspace_bytes", route.workspace_bytes);
  fields.launches(route.launches);
  return fields.json();
}

int forward_route_kind(const ForwardRoute &route, const fdm_problem &p) {
  const bool grouped = route.order.heads != 0 && (route.order.heads != p.heads || route.order.sequences < p.batch);
  return int(route.kernel) | bits_of({route.splits > 1, route.merges_in_cluster, route.heads_per_tile > 1,
                                      route.tickets.exists() || route.live.exists() || route.small_blocks, grouped,
                                      route.pair_bias.splits_heads || route.finds_keys})
                                 << 4;
}
std::string name_of_forward(int kind) {
  const int kernel = kind & 15;
  const bool pair_bias = kernel >= int(ForwardKernel::pair_bias), decode = kernel == int(ForwardKernel::decode);
  const Words words{{"splits", "cluster", "heads of a group",
                     pair_bias ? "live tiles" : (decode ? "small blocks" : "tickets"), "groups of heads",
                     pair_bias ? "pairs of heads" : "no plan"}};
  return std::string("forward: ") + kForwardNames[kernel] + words.of(kind >> 4);
}

// The lowest bits are the key kernel or one of these values, then the dQ kernel or pair bias kind, then one bit per
// property of the call.
constexpr int kNoRows = 14, kPairBiasBlocks = 15;
constexpr const char *kPairBiasNames[] = {"", ", fused", ", windows", ", clusters"};

int backward_route_kind(const BackwardRoute &route) {
  if (route.nothing) return kNoRows;
  if (route.is_pair_bias) {
    const PairBiasBackwardRoute &pair_bias = route.pair_bias;
    const int fused = !pair_bias.fused                            ? 0
                      : pair_bias.fused_launches.work.small_tiles ? 2
                      : pair_bias.fused_launches.work.clusters    ? 3
                                                                  : 1;
    const bool in_gradients = pair_bias.fused && pair_bias.fused_launches.sums_in_gradients;
    return kPairBiasBlocks | fused << 4 |
           bits_of({in_gradients, pair_bias.live.exists(), pair_bias.wants_dbias, pair_bias.writes_dbias}) << 6;
  }
  const KeyDivision &keys = route.division;
  return int(route.key_kernel) | int(route.query_kernel) << 4 |
         bits_of({keys.heads_per_wave != keys.heads, keys.takes_planned_keys, route.segments.rows > 0, route.scheduled,
                  keys.parts > 1, keys.shares > 1, route.members > 0})
             << 6;
}
std::string name_of_backward(int kind) {
  const int kernel = kind & 15, other = kind >> 4 & 3, bits = kind >> 6;
  if (kernel == kNoRows) return "backward: no rows or keys";
  if (kernel == kPairBiasBlocks)
    return std::string("backward: pair bias") + kPairBiasNames[other] +
           Words{{"sums in gradients", "live tiles", "dbias", "dbias of dq"}}.of(bits);
  return std::string("backward: ") + kKeyNames[kernel] + (other ? std::string(", dq ") + kQueryNames[other] : "") +
         Words{{"groups of heads", "lists", "segments", "schedule", "parts", "shares", "members"}}.of(bits);
}

} // namespace fdm::cuda
