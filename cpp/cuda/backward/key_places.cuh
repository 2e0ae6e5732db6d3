// SPDX-License-Identifier: BSD-3-Clause
// The key blocks of the key-stationary kernels: their keys, and the rows that keep them.
#pragma once

#include "../tile/products.cuh"
#include "row_statistics.cuh"

namespace fdm::cuda {

// The position of a block's first key in the order of its list. Blocks are numbered across buckets: the first block
// of every bucket, then the second of every bucket. So the blocks with the most rows come first.
FDM_INLINE int64_t ordered_position(const KeyWork &keys, int32_t block) {
  return int64_t(block % keys.buckets) * kBucketKeys + int64_t(block / keys.buckets) * keys.block_keys;
}

// A key block of one KV head of a sequence.
struct KeyBlockPlace {
  Sequence s;
  int64_t sequence_index, kv_head;
  int32_t block;
  int64_t list_sequence; // takes_planned_keys: list * sequences of a list + sequence of the list
  int64_t
      first_key; // takes_planned_keys: the index of the first key in `ordered`; if in_key_order, among the kept keys
  int64_t
      key_count; // takes_planned_keys: the number of keys from there on, up to the end of the bucket if there are buckets
  bool in_key_order; // the list keeps more keys than its segments have room for
  SegmentBlock rows; // segments: the rows that keep any of the keys
};

// The group of KV heads whose blocks are processed together. The constructor makes `number` relative to the group.
struct HeadGroup {
  uint32_t first_head, head_count;

  __device__ HeadGroup(const KeyWork &keys, uint32_t &number)
      : first_head(0), head_count(static_cast<uint32_t>(keys.heads)) {
    if (keys.heads_per_wave == keys.heads) return;
    const auto heads_per_group = static_cast<uint32_t>(keys.heads_per_wave),
               blocks = static_cast<uint32_t>(keys.blocks) * heads_per_group;
    const uint32_t group = number / blocks;
    number -= group * blocks;
    first_head = group * heads_per_group;
    head_count = min(heads_per_group, head_count - first_head);
  }
};

// Finds the block and the head of a block number. Heads are counted over sequences. Not for segments.
struct BlockOfHead {
  uint32_t block, head;

  __device__ BlockOfHead(const KeyWork &keys, uint32_t number) {
    const HeadGroup group(keys, number);
    block = number / group.head_count;
    head = group.first_head + number - block * group.head_count;
  }
};

// The number of a packed sequence's first key sum.
FDM_DEVICE int32_t first_key_sum(const KeySegments &segments, const Sequence &s) {
  const int shift = __ffs(segments.rows) - 1; // a power of two
  return static_cast<int32_t>(segments.row_sums == 0 ? s.k_begin : (s.q_begin >> shift) * segments.row_sums);
}

// A band of kBandRows sums of keys that several segments keep.
struct KeySumBand {
  Sequence s;
  int64_t sequence_index, kv_head;
  int64_t first; // the band's first sum, counted from the sequence's; below 0: there is no such band

  __device__ KeySumBand(const BackwardParams &params, int64_t number) {
    const fdm_problem &p = params.p;
    const KeyWork &keys = params.keys;
    const int64_t bands = key_sum_bands(p, keys.segments.max_sums), head = quotient(number, bands);
    first = -1;
    if (head >= keys.heads) return;
    const NumberedPart part = numbered_part(p, number - head * bands, kBandRows, [&](const Sequence &candidate) {
      return int64_t{first_key_sum(keys.segments, candidate)};
    });
    sequence_index = is_varlen(p) ? part.sequence_index : quotient(head, p.kv_heads);
    kv_head = is_varlen(p) ? head : head - sequence_index * p.kv_heads;
    s = sequence(p, sequence_index);
    first = part.part * kBandRows;
  }
};

// The segments of a list and a sequence: their numbers, counted over all lists, and the sums of keys that several
// segments keep.
struct ListSegments {
  int64_t first;
  int32_t count, first_sum, past_sums;

  __device__ ListSegments(const BackwardParams &params, const Sequence &s, int64_t sequence_index, int64_t list) {
    const KeySegments &segments = params.keys.segments;
    first = list * segments.count;
    count = segments.count;
    first_sum = 0;
    past_sums = segments.max_sums;
    if (!is_varlen(params.p)) return;
    const int shift = __ffs(segments.rows) - 1; // a power of two
    first += (s.q_begin >> shift) + sequence_index;
    count = static_cast<int32_t>((s.q_count + segments.rows - 1) >> shift);
    first_sum = first_key_sum(segments, s);
    // A sequence has at most q_count / rows borders of segments; at most row_sums keys are kept across each.
    past_sums =
        first_sum + static_cast<int32_t>(segments.row_sums == 0 ? s.k_count : (s.q_count >> shift) * segments.row_sums);
  }

  // If cu_seqlens does not begin with 0, there are numbers before those of the first sequence.
  __device__ bool has_segment(int32_t segment) const { return segment >= 0 && segment < count; }

  // Whether a segment keeps more keys than its blocks have room for. All lanes of the warp call this.
  __device__ bool has_overflow(const KeyWork &keys) const {
    const int32_t room = keys.segments.blocks * keys.block_keys;
    bool overflows = false;
#pragma unroll 1 // usually one iteration
    for (int n = threadIdx.x % 32; n < count; n += 32) overflows |= keys.segments.kept_count[first + n] > room;
    return __any_sync(0xffffffffu, overflows);
  }
};

// Finds a segment by its number in a list. With packed sequences, some numbers have no segment.
struct SegmentPlace {
  Sequence s;
  int64_t sequence_index, kv_head;
  int64_t list;
  int32_t segment; // the index in the sequence

  // `head` is counted over sequences, except packed ones.
  __device__ SegmentPlace(const BackwardParams &params, uint32_t head, int32_t number) : segment(number) {
    const fdm_problem &p = params.p;
    if (is_varlen(p)) {
      const NumberedPart part = numbered_part(p, number, params.keys.segments.rows,
                                              [](const Sequence &candidate) { return candidate.q_begin; });
      sequence_index = part.sequence_index;
      segment = static_cast<int32_t>(part.part);
      kv_head = head;
    } else {
      sequence_index = head / static_cast<uint32_t>(p.kv_heads);
      kv_head = head - sequence_index * static_cast<uint32_t>(p.kv_heads);
    }
    s = sequence(p, sequence_index);
    const fdm_tensor &lists = mask_tensor(p); // one list for all heads, or one for each KV head
    list = batch_index(lists, s) * params.plan.lists_per_batch + (lists.shape[1] == 1 ? 0 : kv_head);
  }
};

// Finds a block of a list with segments. There are fewer than 2^31 such blocks. First come the `leading` longest
// blocks of each segment, segment by segment; then the others, the longest of every segment first. The last segment
// comes first. All lanes of a warp call this.
__device__ __forceinline__ KeyBlockPlace place_in_segment(const BackwardParams &params, uint32_t number) {
  const KeyWork &keys = params.keys;
  const KeySegments &segments = keys.segments;
  const auto count = static_cast<uint32_t>(segments.count);
  const HeadGroup group(keys, number);
  const uint32_t heads = group.head_count;
  uint32_t head, rank, from_last;
  if (number < segments.leading * count * heads) {
    const uint32_t segment_of_heads = number / segments.leading;
    rank = number - segment_of_heads * segments.leading;
    head = segment_of_heads / count;
    from_last = segment_of_heads - head * count;
  } else {
    const uint32_t block = number / heads;
    head = number - block * heads;
    rank = block / count;
    from_last = block - rank * count;
  }
  const SegmentPlace segment_place(params, group.first_head + head, static_cast<int32_t>(count - 1 - from_last));
  KeyBlockPlace place{};
  place.s = segment_place.s;
  place.sequence_index = segment_place.sequence_index;
  place.kv_head = segment_place.kv_head;
  place.rows = {0, -1, 0, 0};
  const ListSegments of_list(params, segment_place.s, segment_place.sequence_index, segment_place.list);
  if (!of_list.has_segment(segment_place.segment)) return place;
  place.block = static_cast<int32_t>(rank) * of_list.count + of_list.count - 1 - segment_place.segment;
  place.list_sequence = list_sequence(params.p, segment_place.list, segment_place.sequence_index);
  const int64_t segment = of_list.first + segment_place.segment;
  place.rows = segments.order[segment * segments.blocks + rank];
  place.in_key_order = of_list.has_overflow(keys);
  if (place.in_key_order) {
    const int64_t position = int64_t(place.block) * keys.block_keys;
    place.first_key = segment_place.list * params.plan.list_keys + segment_place.s.k_begin + position;
    place.key_count = params.plan.kept_count[place.list_sequence] - position;
    place.rows = {0, place.key_count > 0 ? static_cast<int32_t>(place.s.q_count) : -1};
    return place;
  }
  place.first_key = (segment * segments.blocks + place.rows.position) * keys.block_keys;
  place.key_count = place.rows.keys;
  return place;
}

// The sums of a key that several segments keep. `head` is counted over sequences, except packed ones.
FDM_INLINE float *key_segment_sums(const KeyWork &keys, int64_t head, int32_t sum) {
  return keys.segments.sums + (head * keys.segments.max_sums + sum) * 2 * keys.sum_dim;
}
FDM_INLINE float *bias_segment_sum(const KeyWork &keys, int64_t head, int32_t sum) {
  return keys.segments.bias_sums + head * keys.segments.max_sums + sum;
}

// With segments, all lanes of a warp call this.
__device__ __forceinline__ KeyBlockPlace key_block_place(const BackwardParams &params, int64_t number) {
  if (params.keys.segments.rows > 0) return place_in_segment(params, static_cast<uint32_t>(number));
  const fdm_problem &p = params.p;
  KeyBlockPlace place{};
  const BlockOfHead block_of_head(params.keys, static_cast<uint32_t>(number));
  place.block = static_cast<int32_t>(block_of_head.block);
  place.sequence_index = quotient(block_of_head.head, p.kv_heads);
  place.kv_head = block_of_head.head - place.sequence_index * p.kv_heads;
  place.s = sequence(p, place.sequence_index);
  if (!params.keys.takes_planned_keys) return place;
  const Plan &plan = params.plan;
  const int64_t list = list_number(p, plan, place.s, place.kv_head * params.group);
  place.list_sequence = list_sequence(p, list, place.sequence_index);
  const int64_t position = ordered_position(params.keys, place.block);
  place.first_key = list * plan.list_keys + place.s.k_begin + position;
  // The last block of a bucket may have fewer keys than the others.
  place.key_count = min64(plan.kept_count[place.list_sequence] - position, kBucketKeys - position % kBucketKeys);
  return place;
}

// The key in row r of a block of a list. key = -1: there is none.
__device__ __forceinline__ KeyRows listed_key(const BackwardParams &params, const KeyBlockPlace &place, int r) {
  if (r >= place.key_count) return {-1, 0, 0, -1};
  const int64_t n = place.first_key + r;
  const Plan &plan = params.plan;
  if (place.in_key_order) return {plan.kept_index[n], plan.kept_start[n], plan.kept_end[n], -1};
  return params.keys.ordered[n];
}

// Stores the bias gradient of a key, summed over all rows, for one query head of the group or for all of them.
__device__ __forceinline__ void store_bias_sum(const BackwardParams &params, const Sequence &s, int64_t kv_head,
                                               int64_t head_of_group, int32_t key, float sum) {
  const fdm_tensor &t = params.bias_sums;
  store_element(t,
                s.batch * t.stride[0] + (kv_head * params.bias_heads + head_of_group) * t.stride[1] +
                    (s.k_begin + key) * t.stride[3],
                sum);
}

// The rows that may keep a key of the block that begins with `key`, from a plan of runs.
__device__ __forceinline__ RowRange rows_of_run(const BackwardParams &params, const KeyBlockPlace &place, int64_t key) {
  const fdm_problem &p = params.p;
  const Plan &plan = params.plan;
  const KeySpan *spans = plan.spans + list_number(p, plan, place.s, place.kv_head * params.group) * plan.list_spans +
                         span_number(p, place.s, place.sequence_index, kSpanKeys);
  const int64_t past_key = min64(place.s.k_count, key + params.keys.block_keys);
  RowRange rows{INT32_MAX, 0};
#pragma unroll 1 // saves registers
  for (int64_t n = key / kSpanKeys; n * kSpanKeys < past_key; ++n) {
    const KeySpan span = spans[n];
    rows.first = min(rows.first, span.first);
    rows.past = max(rows.past, span.past);
  }
  return rows.first < rows.past ? rows : RowRange{0, 0};
}

// The rows that may keep a key of the block. past < first: the block does not exist.
__device__ __forceinline__ RowRange key_block_rows(const BackwardParams &params, const KeyBlockPlace &place) {
  if (params.keys.takes_planned_keys) {
    if (params.keys.segments.rows > 0) return {place.rows.first, place.rows.past};
    if (place.key_count <= 0) return {0, -1};
    return params.keys.ranges[place.list_sequence * params.keys.blocks + place.block];
  }
  const int64_t key = int64_t(place.block) * params.keys.block_keys;
  if (key >= place.s.k_count) return {0, -1};
  if (params.plan.spans && group_shares_interval_plan(params.p)) return rows_of_run(params, place, key);
  const int32_t past = static_cast<int32_t>(place.s.q_count);
  return {is_causal(params.p) ? static_cast<int32_t>(max64(0, min64(past, key - place.s.causal_off))) : 0, past};
}

// The place of a small block of consecutive keys. `head` is counted over sequences.
__device__ __forceinline__ KeyBlockPlace small_block_of_head(const BackwardParams &params, uint32_t head,
                                                             uint32_t block) {
  const auto kv_heads = static_cast<uint32_t>(params.p.kv_heads);
  KeyBlockPlace place{};
  place.block = static_cast<int32_t>(block);
  place.sequence_index = head / kv_heads;
  place.kv_head = head - static_cast<uint32_t>(place.sequence_index) * kv_heads;
  place.s = whole_sequence(params.p, place.sequence_index);
  return place;
}

// Finds the place of a small block, which has consecutive keys or the keys of a segment. Returns whether it exists.
__device__ __forceinline__ bool find_small_block(const BackwardParams &params, uint32_t number, KeyBlockPlace &place) {
  const KeyWork &keys = params.keys;
  if (keys.segments.rows > 0) {
    place = place_in_segment(params, number);
    return place.rows.past >= place.rows.first;
  }
  const BlockOfHead block_of_head(keys, number);
  place = small_block_of_head(params, block_of_head.head, block_of_head.block);
  return int64_t(place.block) * keys.block_keys < params.p.keys;
}

// The item of a thread block. Without a schedule, an item's number is block * parts + part, and blocks that do not
// exist have no items.
__device__ __forceinline__ bool has_key_item(const BackwardParams &params, int64_t number) {
  const KeyWork &keys = params.keys;
  if (keys.parts == 0) return number < *keys.item_count;
  const RowRange rows = key_block_rows(params, key_block_place(params, number / keys.parts));
  return rows.past >= rows.first;
}
__device__ __forceinline__ KeyItem key_item(const KeyWork &keys, int32_t number) {
  if (keys.parts == 0) return keys.items[number];
  if (keys.parts == 1) return {number, 0, 1, 0};
  const int32_t part = number % keys.parts;
  return {number / keys.parts, part, keys.parts, number - part};
}

// Both of these in one call. It also finds the place of the item's block.
__device__ __forceinline__ bool find_key_item(const BackwardParams &params, int32_t number, KeyItem &item,
                                              KeyBlockPlace &place) {
  const bool scheduled = params.keys.parts == 0;
  if (scheduled && number >= *params.keys.item_count) return false;
  item = key_item(params.keys, number);
  place = key_block_place(params, item.block);
  if (scheduled) return true;
  const RowRange rows = key_block_rows(params, place);
  return rows.past >= rows.first;
}

} // namespace fdm::cuda
