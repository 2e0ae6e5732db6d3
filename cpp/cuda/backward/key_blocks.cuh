// SPDX-License-Identifier: BSD-3-Clause
// The key block of a key-stationary kernel: the order of its steps through query heads and row tiles, and the facts
// about its keys in shared memory.
#pragma once

#include "key_places.cuh"

namespace fdm::cuda {

// A block maps the first kMappedTiles tiles of kTileRows rows: which keep any of its keys, and which keep all. Later
// tiles, from row 262,144 on, are computed and tested.
constexpr int kMappedTiles = 2048;

struct KeySteps {
  int32_t first_tile, tiles; // counted in tiles of the dkdv kernel
  int64_t count;             // tiles * query heads of the group
};

__device__ __forceinline__ KeySteps key_steps(const BackwardParams &params, const RowRange &rows) {
  const int32_t shift = __ffs(params.keys.tile_rows) - 1, first = rows.first >> shift; // a power of two
  const int32_t tiles = rows.past > rows.first ? ((rows.past - 1) >> shift) + 1 - first : 0;
  return {first, tiles, tiles * params.group};
}

struct KeyTask {
  Sequence s;
  int64_t sequence_index, kv_head;
  int64_t first_head; // the first query head of the group
  KeySteps steps;
  int64_t begin, end; // steps of this part
  bool heads_inside;  // the order of HeadsInside::all
  bool same_rows;     // the rows of a key are the same for all query heads of the group
  bool test_all;      // every step tests its pairs
  bool has_words;     // there is a row plan
  float *part_sums;   // sums of this part; null: the block has one part
  int64_t key_head;   // of segments: counted over sequences unless these are packed
};

struct KeyStep {
  int64_t number;     // counted over the whole block
  int32_t head, tile; // the query head of the group, and the tile of the dkdv kernel's rows
  int32_t buffer;     // the buffer of per-head facts about keys
  bool valid;
  bool tests; // pairs may be dropped inside of the keys' ranges of rows, too
};

// The team of a key block: all threads of the thread block.
template <int kThreadCount> struct WholeBlock {
  static constexpr int kThreads = kThreadCount;
  __device__ static __forceinline__ int thread() { return threadIdx.x; }
  __device__ static __forceinline__ void sync() { __syncthreads(); }
};

// kBuffers is one more than the heads whose steps may be in flight. With kHasRowPlans there may be a row plan.
template <int kKeys, int kBufferCount, bool kHasRowPlans, int kGroupKeys> struct KeyBlockShared {
  static constexpr int kBuffers = kBufferCount;
  KeyTask task;
  int32_t key[kKeys];             // -1: none
  int32_t sum[kKeys];             // as KeyRows has it
  bool readable[kKeys];           // some query head keeps it
  RowRange rows[kBuffers][kKeys]; // the rows that keep a key for the head of a step
  float bias[kBuffers][kKeys];    // the bias to base 2; -inf: the key is not kept
  // Row plans: bit maps of the tiles that keep any key, and of those whose rows all keep all keys.
  uint32_t active[kHasRowPlans ? kMappedTiles / 32 : 1], full[kHasRowPlans ? kMappedTiles / 32 : 1];
  int32_t dropping_head[kBuffers];            // a query head whose bias of -inf drops a key that another head keeps
  alignas(16) RowRange full_rows[kKeys / 16]; // the rows that keep all of 16 keys
  // Rows that may keep any of kGroupKeys keys, for all query heads of the group.
  RowRange group_rows[(kKeys + kGroupKeys - 1) / kGroupKeys];
};

// What a key block supports: row plans, KeySegments to whose sums it adds gradients, or both. few_steps supports
// segments only, one part, and query heads that keep the same keys, since other cases cost latency in kernels of few
// steps.
enum class KeyBlockUse { row_plans, segments, segments_and_row_plans, few_steps };

template <int kKeys, class Team, int kBuffers, KeyBlockUse kUse, int kGroupKeyCount = 64> struct KeyBlock {
  static constexpr bool kSegments = kUse != KeyBlockUse::row_plans, kSameKeys = kUse == KeyBlockUse::few_steps;
  static constexpr bool kRowPlans = kUse == KeyBlockUse::row_plans || kUse == KeyBlockUse::segments_and_row_plans;
  static constexpr int kGroupKeys = kGroupKeyCount;
  using Shared = KeyBlockShared<kKeys, kBuffers, kRowPlans, kGroupKeys>;
  static constexpr int kOwnKeys = (kKeys + Team::kThreads - 1) / Team::kThreads; // of a thread

  const BackwardParams &params;
  Shared &shared;
  int64_t mapped_head = -1, mapped_list = -1; // whose tiles the maps describe
  const KeyTask *held_task;

  __device__ KeyBlock(const BackwardParams &parameters, Shared &memory)
      : params(parameters), shared(memory), held_task(&memory.task) {}

  __device__ const KeyTask &task() const { return *held_task; }
  // Makes steps read the task from a copy in registers: each read from shared memory waits for its latency. The copy is
  // made after start(), and must live until the last step is found.
  __device__ void hold(const KeyTask &copy) { held_task = &copy; }
  __device__ int64_t head(const KeyStep &step) const { return task().first_head + step.head; }
  // The offset of the key in row r of the block, in k, v or their gradients.
  __device__ int64_t row_offset(const fdm_tensor &t, int r) const {
    const KeyTask &own_task = shared.task;
    return own_task.s.batch * t.stride[0] + (own_task.s.k_begin + shared.key[r]) * t.stride[1] +
           own_task.kv_head * t.stride[2];
  }

  // With `clears_bias`, clears the bias sums of a part.
  __device__ void start(const KeyItem &item, bool clears_bias) {
    start(item, key_block_place(params, item.block), clears_bias);
  }
  __device__ void start(const KeyItem &item, const KeyBlockPlace &place, bool clears_bias) {
    KeyRows key_rows[kOwnKeys];
    bool readable[kOwnKeys] = {};
    for_each_key([&](int n, int r) {
      key_rows[n] = {-1, 0, 0, -1};
      if (params.keys.takes_planned_keys) key_rows[n] = listed_key(params, place, r);
    });
    // Two warps do this while the loads are in flight.
    static_assert(Team::kThreads > 32);
    if (Team::thread() == 0) make_task(item, place);
    if (Team::thread() == 32) clear_ranges();
    for_each_key([&](int n, int r) { readable[n] = set_key(place, key_rows[n], r); });
    Team::sync();
    for_each_key([&](int n, int r) {
      if (readable[n]) add_to_ranges(key_rows[n], r);
    });
    if (!kSameKeys && shared.task.part_sums && clears_bias && params.wants_bias_sums)
      for (int i = Team::thread(); i < params.bias_heads * kKeys; i += Team::kThreads) part_bias_sums()[i] = 0.0f;
    Team::sync();
  }

  // Whether the query head of a step drops a key whose rows of K and V are not cleared.
  __device__ bool drops_keys(int head_of_group, int buffer) const {
    return shared.dropping_head[buffer] == head_of_group;
  }
  // Whether all keys of these groups of 16, except cleared ones, keep the rows from `first` on.
  __device__ bool keep_all(int first_group, int groups, int first, int rows) const {
    bool all = true;
    for (int n = first_group; n < first_group + groups; ++n) {
      const RowRange full = shared.full_rows[n];
      all &= (first >= full.first) & (first + rows <= full.past);
    }
    return all;
  }

  // Whether a row of a step may keep a key of a group of kGroupKeys keys.
  __device__ bool concerns(int group, const KeyStep &step, int tile_rows) const {
    const RowRange &rows = shared.group_rows[group];
    const int first = step.tile * tile_rows;
    return first < rows.past && first + tile_rows > rows.first;
  }

  __device__ TileWords words(const KeyStep &step, int tile_rows) const {
    return tile_words(params.p, params.plan, shared.task.s, shared.task.sequence_index, head(step),
                      plan_tile(step, tile_rows));
  }

  // Return the first step of this part that may keep a pair, and the first such step after `before`. All threads of the
  // team call them. Their stores are visible after the next barrier.
  __device__ KeyStep first_step(int tile_rows) {
    const KeyTask &own_task = task();
    KeyStep step{};
    step.number = own_task.begin;
    step.tile = own_task.steps.first_tile;
    if (own_task.heads_inside) {
      const auto done = static_cast<int32_t>(own_task.begin / params.group); // tiles, counted from the last one
      step.head = static_cast<int32_t>(own_task.begin - int64_t(done) * params.group);
      step.tile += own_task.steps.tiles - 1 - done;
    } else if (own_task.begin > 0 && own_task.begin < own_task.end) {
      step.head = int32_t(own_task.begin / own_task.steps.tiles);
      step.tile = own_task.steps.first_tile + int32_t(own_task.begin - int64_t(step.head) * own_task.steps.tiles);
    }
    return find_step(step, 0, -1, tile_rows);
  }
  __device__ KeyStep next_step(const KeyStep &before, int tile_rows) {
    KeyStep step = before;
    advance(step);
    return find_step(step, before.head, plan_tile(before, tile_rows), tile_rows);
  }

  __device__ float *partial_sums(int which, int r) const {
    if (kSameKeys || !shared.task.part_sums) return nullptr;
    return shared.task.part_sums + (int64_t(which) * kKeys + r) * params.keys.sum_dim;
  }
  // The sums of a key that belongs to several segments.
  __device__ float *segment_sums(int r) const {
    return key_segment_sums(params.keys, shared.task.key_head, shared.sum[r]);
  }
  __device__ void write_bias_sum(int64_t head_of_group, int r, float sum) const {
    if (kSegments && shared.sum[r] >= 0)
      atomicAdd(bias_segment_sum(params.keys, shared.task.key_head, shared.sum[r]), sum);
    else if (!kSameKeys && shared.task.part_sums)
      part_bias_sums()[head_of_group * kKeys + r] = sum;
    else
      store_bias_sum(params, shared.task.s, shared.task.kv_head, head_of_group, shared.key[r], sum);
  }

private:
  // Calls function(n, r) for the n-th key of this thread, which is row r of the block.
  template <class Function> __device__ static void for_each_key(const Function &function) {
#pragma unroll
    for (int n = 0; n < kOwnKeys; ++n) {
      const int r = Team::thread() + n * Team::kThreads;
      if (r < kKeys) function(n, r);
    }
  }

  // Sets the facts about a key, and completes its rows. Returns whether any query head keeps it.
  __device__ bool set_key(const KeyBlockPlace &place, KeyRows &key_rows, int r) const {
    const int64_t first_head = place.kv_head * params.group;
    const bool consecutive = !params.keys.takes_planned_keys && int64_t(place.block) * kKeys + r < place.s.k_count;
    if (consecutive) key_rows.key = place.block * kKeys + r;
    // The bias is loaded before the rows, so the latencies overlap.
    ScoreView view{};
    uint32_t bits = 0;
    if (bias_is_of_keys() && key_rows.key >= 0) {
      view = bias_view(params.p, place.s, place.sequence_index, first_head, 0);
      bits = view.load_bits(key_rows.key);
    }
    if (consecutive) {
      const RowRange rows = rows_of_key(params.p, place.s, first_head, key_rows.key);
      key_rows.start = rows.first;
      key_rows.end = rows.past;
    }
    const float bias = key_rows.key < 0 ? -INFINITY : (view.data ? to_base_2(view.convert(bits)) : 0.0f);
    const bool readable = is_readable(place, first_head, key_rows, bias);
    shared.key[r] = key_rows.key;
    shared.sum[r] = key_rows.sum;
    shared.readable[r] = readable;
    shared.bias[0][r] = readable ? bias : -INFINITY;
    for (int buffer = 0; buffer < kBuffers; ++buffer) shared.rows[buffer][r] = {key_rows.start, key_rows.end};
    return readable;
  }
  __device__ void add_to_ranges(const KeyRows &key_rows, int r) const {
    RowRange &full = shared.full_rows[r / 16], &group = shared.group_rows[r / kGroupKeys];
    atomicMax(&full.first, key_rows.start);
    atomicMin(&full.past, key_rows.end);
    atomicMin(&group.first, shared.task.same_rows ? key_rows.start : 0);
    atomicMax(&group.past, shared.task.same_rows ? key_rows.end : INT32_MAX);
    if (shared.bias[0][r] == -INFINITY) shared.dropping_head[0] = 0;
  }

  __device__ float *part_bias_sums() const { return shared.task.part_sums + int64_t(2) * kKeys * params.keys.sum_dim; }

  __device__ void make_task(const KeyItem &item, const KeyBlockPlace &place) const {
    const fdm_problem &p = params.p;
    KeyTask &own_task = shared.task;
    const fdm_mask_kind kind = mask_kind(p);
    own_task.s = place.s;
    own_task.sequence_index = place.sequence_index;
    own_task.kv_head = place.kv_head;
    own_task.first_head = place.kv_head * params.group;
    own_task.key_head = place.s.batch * p.kv_heads + place.kv_head;
    own_task.steps = key_steps(params, key_block_rows(params, place));
    own_task.heads_inside = goes_through_heads_inside(place);
    own_task.begin = 0;
    own_task.end = own_task.steps.count;
    if (!kSameKeys && item.parts > 1) { // divisions of 64 bits
      // With heads inside, all heads of a row tile are in the same part.
      const int64_t together = own_task.heads_inside ? params.group : 1, count = own_task.steps.count / together;
      own_task.begin = count * item.part / item.parts * together;
      own_task.end = count * (item.part + 1) / item.parts * together;
    }
    own_task.same_rows = has_same_rows();
    own_task.has_words = params.plan.words != nullptr;
    const bool has_unmapped_rows = kind == FDM_MASK_ROWS && !(kRowPlans && own_task.has_words);
    own_task.test_all = !kSameKeys && (has_unmapped_rows || !own_task.same_rows || has_query_rows(p.bias));
    own_task.part_sums = item.parts > 1
                             ? params.keys.part_sums + int64_t(item.stored_part + item.part) * params.keys.part_floats
                             : nullptr;
  }
  __device__ bool goes_through_heads_inside(const KeyBlockPlace &place) const {
    const HeadsInside choice = params.keys.heads_inside;
    if (choice != HeadsInside::few) return choice == HeadsInside::all;
    return 2 * int64_t(params.plan.kept_count[place.list_sequence]) <= place.s.k_count;
  }
  __device__ void clear_ranges() const {
    for (int32_t &head : shared.dropping_head) head = -1;
    for (RowRange &full : shared.full_rows) full = {0, INT32_MAX};
    for (RowRange &group : shared.group_rows) group = {INT32_MAX, 0};
  }

  __device__ bool bias_is_of_keys() const { return present(params.p.bias) && !is_per_query(params.p.bias); }
  __device__ bool bias_is_of_heads() const { return bias_is_of_keys() && params.p.bias.shape[1] == params.p.heads; }
  __device__ bool has_same_rows() const { return kSameKeys || group_shares_interval_plan(params.p); }

  // The base-2 bias of a key for a head and a tile of the plan; -inf without a key.
  __device__ float bias_of(const Sequence &s, int64_t sequence_index, int64_t head, int32_t tile, int32_t key) const {
    if (key < 0) return -INFINITY;
    return bias_is_of_keys() ? to_base_2(bias_view(params.p, s, sequence_index, head, tile).load(0, key)) : 0.0f;
  }

  // Whether a query head may keep a key, judged without the rows of the mask. `bias` and the key's rows are those of
  // the first head.
  __device__ bool is_readable(const KeyBlockPlace &place, int64_t first_head, const KeyRows &key_rows,
                              float bias) const {
    const fdm_problem &p = params.p;
    const Sequence &s = place.s;
    const int32_t key = key_rows.key;
    if (key < 0) return false;
    const bool same_rows = has_same_rows();
    if (same_rows && key_rows.start >= key_rows.end) return false;
    if constexpr (kSameKeys) return bias != -INFINITY;
    if (same_rows && bias != -INFINITY) return true;
    if (same_rows && p.bias.shape[1] != p.heads) return false;
    for (int64_t head = first_head; head < first_head + params.group; ++head) {
      const RowRange rows = same_rows ? RowRange{0, 1} : rows_of_key(p, s, head, key);
      if (rows.first < rows.past && bias_of(s, place.sequence_index, head, 0, key) != -INFINITY) return true;
    }
    return false;
  }

  // Loads the bias and the rows of a key for a query head of the group and a tile of the plan.
  __device__ void load_head(int32_t head_of_group, int32_t tile, int buffer, int r) {
    const int32_t key = shared.key[r];
    const int64_t head = shared.task.first_head + head_of_group;
    const float bias =
        shared.readable[r] ? bias_of(shared.task.s, shared.task.sequence_index, head, tile, key) : -INFINITY;
    shared.bias[buffer][r] = bias;
    if (bias == -INFINITY && shared.readable[r]) shared.dropping_head[buffer] = head_of_group;
    if (!kSameKeys && key >= 0 && !shared.task.same_rows)
      shared.rows[buffer][r] = rows_of_key(params.p, shared.task.s, head, key);
  }

  __device__ void advance(KeyStep &step) const {
    const KeySteps &steps = task().steps;
    ++step.number;
    if (task().heads_inside) {
      if (++step.head < params.group) return;
      step.head = 0;
      --step.tile;
    } else if (++step.tile == steps.first_tile + steps.tiles) {
      step.tile = steps.first_tile;
      ++step.head;
    }
  }

  // The tile of the plan that has the rows of a step.
  __device__ static int32_t plan_tile(const KeyStep &step, int tile_rows) {
    return int32_t(uint32_t(step.tile) * tile_rows / kTileRows);
  }

  // Returns the first step from this one on that may keep a pair. The step's buffer holds the facts of `loaded_head`;
  // if biases depend on the rows, they are those of `loaded_tile`.
  __device__ KeyStep find_step(KeyStep step, int32_t loaded_head, int32_t loaded_tile, int tile_rows) {
    const KeyTask &own_task = task();
    if constexpr (kRowPlans)
      if (own_task.has_words) skip_inactive(step, tile_rows);
    step.valid = step.number < own_task.end;
    step.tests = own_task.test_all;
    if constexpr (kRowPlans)
      if (step.valid && own_task.has_words) step.tests |= !is_full(step, tile_rows);
    const bool other_head = step.head != loaded_head && params.group > 1 && (bias_is_of_heads() || !own_task.same_rows);
    const int32_t tile = plan_tile(step, tile_rows);
    const bool other_bias =
        params.p.bias.dtype == FDM_FLOAT64 && (step.head != loaded_head || tile != loaded_tile); // RelativeBias
    if (step.valid && (other_head || other_bias)) {
      step.buffer = step.buffer + 1 == kBuffers ? 0 : step.buffer + 1;
      for_each_key([&](int, int r) { load_head(step.head, tile, step.buffer, r); });
    }
    return step;
  }

  // Advances to the first step of this part in a tile of the plan that keeps any key.
  __device__ void skip_inactive(KeyStep &step, int tile_rows) {
    const KeyTask &own_task = task();
    const int32_t past_tiles = own_task.steps.first_tile + own_task.steps.tiles;
    while (step.number < own_task.end) {
      const int32_t tile = plan_tile(step, tile_rows);
      if (tile >= kMappedTiles) return;
      map_tiles(head(step));
      const uint32_t active = shared.active[tile / 32] >> (tile % 32);
      if (active & 1) return;
      if (own_task.heads_inside) {
        advance(step);
        continue;
      }
      // The first step of the next active tile, or else of the next word of the map.
      const int32_t next_tile = active ? tile + __ffs(active) - 1 : (tile / 32 + 1) * 32;
      const int32_t next = min(past_tiles, next_tile * kTileRows / tile_rows);
      step.number += next - step.tile;
      step.tile = next;
      if (next == past_tiles) {
        step.tile = own_task.steps.first_tile;
        ++step.head;
      }
    }
  }
  // skip_inactive() has mapped the tile.
  __device__ bool is_full(const KeyStep &step, int tile_rows) const {
    const int32_t tile = plan_tile(step, tile_rows);
    return tile < kMappedTiles && (shared.full[tile / 32] >> (tile % 32) & 1);
  }

  __device__ void map_tiles(int64_t query_head) {
    if (query_head == mapped_head) return;
    mapped_head = query_head;
    const Plan &plan = params.plan;
    const Sequence &s = shared.task.s;
    const int64_t list = list_number(params.p, plan, s, query_head);
    if (list == mapped_list) return;
    mapped_list = list;
    static_assert(kKeys % kGranuleKeys == 0, "keys of a block are consecutive, and begin with those of a granule");
    const int32_t first_key = max(0, shared.key[0]),
                  tiles = int32_t(min64(kMappedTiles, ceil_div(s.q_count, kTileRows)));
    const int64_t granules = ceil_div(s.k_count - first_key, kGranuleKeys);
    const int32_t *numbers =
        plan.granules + first_key / kGranuleKeys +
        (list * plan.tiles + tile_number(params.p, s, shared.task.sequence_index, 0)) * plan.tile_granules;
    Team::sync(); // all threads have read the maps of the previous list
    for (int first = Team::thread() / 32 * 32; first < tiles; first += Team::kThreads) {
      const int tile = first + int(threadIdx.x) % 32;
      bool any = false, all = tile < tiles;
#pragma unroll
      for (int n = 0; n < kKeys / kGranuleKeys; ++n) {
        if (tile >= tiles || n >= granules) continue;
        const int32_t number = numbers[int64_t(tile) * plan.tile_granules + n];
        any |= number != kEmptyGranule;
        all &= number == kFullGranule;
      }
      const uint32_t active = __ballot_sync(0xffffffffu, any), full = __ballot_sync(0xffffffffu, all);
      if (threadIdx.x % 32 != 0) continue;
      shared.active[first / 32] = active;
      shared.full[first / 32] = full;
    }
    Team::sync();
  }
};

} // namespace fdm::cuda
