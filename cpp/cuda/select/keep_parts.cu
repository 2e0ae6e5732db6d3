// SPDX-License-Identifier: BSD-3-Clause
// Selection of few long rows into booleans: several thread blocks share a row.
//
// A row is divided into parts. Radix selection takes a launch for each digit: each block counts the keys of its part,
// and the next launch finds the digit of the last selected key in the sums. Of equal keys the lower ones are
// selected, so each part also stores its own counts of the last digit.
//
// Most of the work is to read the biases, so later launches read few of them again. A sample of the row gives a
// threshold that about a window of keys and some more reach. The first counting launch counts only those; each warp
// lists its own, and writes the booleans of all others. If no list is too short and the listed keys fit one block
// (kMaxListedKeys), the first block of the next launch selects the row from the lists, and other launches have nothing
// to do. Otherwise a warp whose list is too short goes through all of its keys in each launch. If fewer keys than the
// window reach the threshold, which the sample makes all but impossible, one block selects the row.
#include "../host/launch.cuh"
#include "keep_row.cuh"
#include "ptx/copy.cuh"
#include "ptx/dependent.cuh"
#include "radix_select.cuh"
#include "seen_keys.cuh"
#include "select.h"

namespace fdm::cuda {
namespace {

constexpr int kThreads = kKeepThreads, kWarps = kThreads / 32;
using Select = RadixSelect<kThreads>;
static_assert(Select::kDigits == kKeepDigits);

// The state of the search for the last selected key: its decided upper bits, and how many of the keys with these bits
// are selected. settled: the window is final. selects_from_lists: the first block selects the row from the lists.
struct Step {
  uint32_t decided, remaining;
  Window window;
  bool settled, ignores_threshold, selects_from_lists;
};

struct RowState {
  uint32_t threshold; // least value that is counted
  int32_t first_ranked;
  uint32_t ranked_count;
  uint32_t too_short; // nonzero: a list is too short
  Step steps[2];      // after each digit but the last
};
static_assert(sizeof(RowState) <= kRowStateBytes);

struct KeepWork {
  fdm_selection s;
  KeepParts parts;
  char *states;          // RowState of each row
  uint32_t *digits;      // of each row and pass: key counts by digit, the largest first
  uint32_t *part_digits; // of each part: key counts by the last digit
  uint32_t *seen;        // of each part: its seen keys; null: not counted
  int32_t *lists;        // of each warp of a part: how many keys it would list, and the first ones
};

// The digits of a value, from the upper bits down, without bits that are 0 in all values.
template <int kBits> struct Digits {
  static constexpr int kPasses = keep_passes(kBits), kLastPass = kPasses - 1;
  FDM_MEMBER static constexpr int above(int pass) { return 32 - pass * Select::kDigitBits; }
  FDM_MEMBER static constexpr int shift(int pass) {
    return above(pass) - Select::kDigitBits < 32 - kBits ? 32 - kBits : above(pass) - Select::kDigitBits;
  }
};

struct Shared {
  typename Select::Shared select;
  int32_t part;
  uint32_t before;
};

// The part of a row with the wanted-th of the counted keys, the count before that part, and the count of all parts.
struct PartPlace {
  int32_t part;
  uint32_t before, total;

  template <class CountOf>
  __device__ PartPlace(Shared &shared, int32_t parts, int64_t wanted, const CountOf &count_of)
      : part(parts), before(0), total(0) {
    for (int32_t first = 0; first < parts; first += kThreads) {
      const int32_t candidate = first + static_cast<int32_t>(threadIdx.x);
      uint32_t sum, count = candidate < parts ? count_of(candidate) : 0;
      const int64_t own_before = total + shared.select.sum.exclusive(count, &sum);
      if (own_before < wanted && own_before + count >= wanted) {
        shared.part = candidate;
        shared.before = static_cast<uint32_t>(own_before);
      }
      total += sum;
    }
    __syncthreads();
    if (wanted <= 0 || wanted > total) return;
    part = shared.part;
    before = shared.before;
    __syncthreads(); // shared.part may be overwritten from here on
  }
};

template <int kBits> struct RowPart {
  using RowDigits = Digits<kBits>;
  using Values = NeighbourValues<kBits>;
  static constexpr int kNeighbours = Values::kNeighbours;
  static constexpr int kTurn = 32 * kNeighbours;           // keys that the lanes load at once
  static constexpr int kLoadsInFlight = kWarpKeys / kTurn; // under way together
  static_assert(kWarpKeys % kTurn == 0);

  const KeepWork &work;
  uint32_t number;     // of the row
  int32_t part;        // of the row
  int32_t begin, past; // this warp's keys
  KeepRow row;
  Candidates<kBits> candidates;
  uint32_t threshold = 1;
  int32_t list_length = -1; // length of this warp's list; -1: none, or an incomplete one

  __device__ explicit RowPart(const KeepWork &w)
      : work(w), number(blockIdx.x / static_cast<uint32_t>(w.parts.count)),
        part(static_cast<int32_t>(blockIdx.x % static_cast<uint32_t>(w.parts.count))),
        row(w.s, static_cast<uint32_t>(w.parts.rows), number), candidates(w.s, row, row.query) {
    const int64_t keys = w.parts.keys / kWarps, first = part * w.parts.keys + warp_id() * keys;
    begin = static_cast<int32_t>(min64(first, row.columns));
    past = static_cast<int32_t>(min64(first + keys, row.columns));
  }

  // The number of a part of this row among the parts of all rows.
  __device__ int64_t part_number(int32_t other) const { return number * work.parts.count + other; }
  __device__ RowState &state() const {
    return *reinterpret_cast<RowState *>(work.states + number * int64_t{kRowStateBytes});
  }
  __device__ uint32_t *digits(int pass) const {
    return work.digits + (number * int64_t{RowDigits::kPasses} + pass) * Select::kDigits;
  }
  __device__ uint32_t *part_digits(int32_t other) const {
    return work.part_digits + part_number(other) * keep_last_digits(kBits);
  }
  __device__ int32_t *list() const {
    return work.lists + (part_number(part) * kWarps + warp_id()) * (work.parts.list_capacity + 1);
  }
  __device__ bool is_first_thread() const { return part == 0 && threadIdx.x == 0; }

  // Reads what earlier launches found.
  __device__ void read_state() {
    const RowState &known = state();
    threshold = known.threshold;
    candidates.first_ranked = known.first_ranked;
    candidates.ranked_count = known.ranked_count;
    if (work.parts.list_capacity == 0) return;
    const int32_t count = list()[0];
    if (count <= work.parts.list_capacity) list_length = count;
  }

  __device__ bool counts(uint32_t value, int32_t key) const { return value >= threshold && candidates.ranks(key); }

  // Calls visit(key, values) for the keys of this warp before `end`, in key order, or for all that it listed. Each
  // lane has adjacent keys, or one listed key and zeros. Keys that the row does not see have the value 0.
  template <class Visit> __device__ void visit_keys(int32_t end, const Visit &visit) const {
    if (list_length >= 0) {
      for (int32_t first = 0; first < list_length; first += 32) {
        const bool exists = first + lane_id() < list_length;
        const int32_t key = exists ? list()[1 + first + lane_id()] : 0;
        visit(key, Values{{exists ? candidates.value(key) : 0}});
      }
      return;
    }
    for (int32_t first = begin; first < min(end, past); first += kLoadsInFlight * kTurn) {
      typename Candidates<kBits>::Loaded loaded[kLoadsInFlight];
#pragma unroll
      for (int n = 0; n < kLoadsInFlight; ++n)
        loaded[n] = candidates.load_neighbours(first + n * kTurn + kNeighbours * lane_id(), row.visible);
#pragma unroll
      for (int n = 0; n < kLoadsInFlight; ++n)
        visit(first + n * kTurn + kNeighbours * lane_id(), candidates.values(loaded[n]));
    }
  }

  // Writes the booleans of adjacent keys. Each has a bit in `kept`.
  __device__ void write(int32_t key, uint32_t kept) const {
    if (row.stride == 1 && key + kNeighbours <= row.columns &&
        reinterpret_cast<uintptr_t>(row.keep) % kNeighbours == 0) {
      if constexpr (kNeighbours == 8)
        *reinterpret_cast<uint2 *>(row.keep + key) = {bytes_of(kept), bytes_of(kept >> 4)};
      else
        *reinterpret_cast<uint32_t *>(row.keep + key) = bytes_of(kept);
      return;
    }
#pragma unroll
    for (int i = 0; i < kNeighbours; ++i)
      if (key + i < row.columns) row.keep[(key + i) * row.stride] = static_cast<uint8_t>(kept >> i & 1);
  }

  // Prefetches the first of this warp's biases to L2, while the kernel ahead samples rows.
  __device__ void prefetch() const {
    const int32_t key = begin + lane_id() * (128 * 8 / kBits); // the first of a cache line
    if (!row.absent && candidates.bias.stride == 1 && key < min(past, row.visible))
      ptx::prefetch_l2(candidates.bias.base + key);
  }

  // Counts the seen keys of this part.
  __device__ uint32_t count_seen(Shared &shared) const {
    return Select::count_seen(shared.select, mask_of(part), keys_of(part));
  }

  // Finds the keys that are ranked, for all threads and for the later launches.
  __device__ void find_ranked(Shared &shared) {
    const fdm_selection &s = work.s;
    int64_t seen = row.visible;
    if (work.seen) seen = place_of_seen(shared, 0).total;
    const int32_t first = past_seen(shared, s.keep_first, seen);
    const int32_t last = s.keep_last > 0 ? past_seen(shared, seen - s.keep_last, seen) : row.visible;
    candidates.first_ranked = first;
    candidates.ranked_count = static_cast<uint32_t>(max(0, last - first));
    if (!is_first_thread()) return;
    state().first_ranked = candidates.first_ranked;
    state().ranked_count = candidates.ranked_count;
  }

private:
  // Spreads the lower four bits to four bytes.
  __device__ static uint32_t bytes_of(uint32_t bits) { return (bits & 0xf) * 0x00204081u & 0x01010101u; }

  // The number of a part's keys that the row sees, and their part of the mask.
  __device__ int32_t keys_of(int32_t other) const {
    return static_cast<int32_t>(clamp64(row.visible - other * work.parts.keys, 0, work.parts.keys));
  }
  __device__ KeyRow<uint8_t> mask_of(int32_t other) const {
    KeyRow<uint8_t> mask = candidates.mask;
    mask.base += other * work.parts.keys * mask.stride;
    return mask;
  }
  __device__ PartPlace place_of_seen(Shared &shared, int64_t wanted) const {
    const uint32_t *seen = work.seen + part_number(0);
    return PartPlace(shared, static_cast<int32_t>(work.parts.count), wanted,
                     [&](int32_t other) { return seen[other]; });
  }
  // The key after the first `wanted` of `all` seen keys.
  __device__ int32_t past_seen(Shared &shared, int64_t wanted, int64_t all) const {
    if (!work.seen || wanted <= 0 || wanted >= all)
      return wanted >= all ? row.visible : static_cast<int32_t>(max64(0, wanted));
    const PartPlace place = place_of_seen(shared, wanted);
    const int32_t last =
        Select::last_seen(shared.select, mask_of(place.part), keys_of(place.part), wanted - place.before);
    return static_cast<int32_t>(place.part * work.parts.keys) + last + 1;
  }
};

// The key that is sampled in one of kSampledKeys equal shares of a row. A hash places it, so no pattern of biases
// matters.
__device__ int32_t sampled_key(int32_t sample, int32_t keys) {
  uint32_t chance = (static_cast<uint32_t>(sample) + 1) * 0x9e3779b1u;
  chance = (chance ^ chance >> 15) * 0x85ebca6bu;
  chance ^= chance >> 13;
  const auto offset = static_cast<int64_t>(uint64_t{chance} * static_cast<uint64_t>(keys) >> 32);
  return static_cast<int32_t>((sample * int64_t{keys} + offset) / kSampledKeys);
}

template <int kSourceBits> struct SampledValues {
  static constexpr int kBits = kSourceBits;
  const uint32_t *values;
  __device__ uint32_t operator()(int32_t n) const { return values[n]; }
};

// Finds the threshold of each row and clears its counts. If seen keys are counted, each part counts its own.
template <int kBits> __global__ void __launch_bounds__(kThreads, 2) sample_keys(const __grid_constant__ KeepWork work) {
  __shared__ Shared shared;
  __shared__ uint32_t values[kSampledKeys];
  ptx::start_dependents();
  const RowPart<kBits> row_part(work);
  if (row_part.row.absent) return;
  if (work.seen) {
    const uint32_t seen = row_part.count_seen(shared);
    if (threadIdx.x == 0) work.seen[row_part.part_number(row_part.part)] = seen;
  }
  if (row_part.part != 0) return;
  for (int d = threadIdx.x; d < Digits<kBits>::kPasses * Select::kDigits; d += kThreads) row_part.digits(0)[d] = 0;
  const fdm_selection &s = work.s;
  const int32_t keys = row_part.row.visible;
  // A key that may be selected has a value of at least 1.
  uint32_t threshold = s.window > 0 ? 1 : ~0u;
  const float rank = keys == 0 ? 0 : sampled_rank(s, keys);
  if (s.window > 0 && work.parts.list_capacity > 0 && keys > 0 && rank < kSampledKeys) {
#pragma unroll
    for (int n = 0; n < kSampledKeys / kThreads; ++n) {
      const int sample = n * kThreads + static_cast<int>(threadIdx.x);
      values[sample] = row_part.candidates.value(sampled_key(sample, keys));
    }
    const SampledValues<kBits> sampled{values};
    const Window window = Select::select(shared.select, sampled, kSampledKeys, static_cast<int64_t>(rank));
    threshold = max(1u, window.value);
  }
  if (threadIdx.x != 0) return;
  row_part.state().threshold = threshold;
  row_part.state().too_short = 0;
}

__device__ void load_digits(Shared &shared, const uint32_t *digits) {
  __syncthreads(); // readers of other digits are done
  for (int d = threadIdx.x; d < Select::kDigits; d += kThreads) shared.select.digits[d] = digits[d];
  __syncthreads();
}

// The step after the digit of a pass, whose counts have been loaded.
template <int kBits> __device__ Step next_step(Shared &shared, const Step &before, int pass) {
  Select::find_digit(shared.select, before.remaining);
  Step step = before;
  step.decided |= shared.select.digit << Digits<kBits>::shift(pass);
  step.remaining = shared.select.remaining;
  // All keys with these bits are selected, so their other bits do not matter.
  step.settled = shared.select.equal == shared.select.remaining;
  step.window = {step.decided, INT32_MAX, before.window.size};
  __syncthreads(); // the results in `shared` may be overwritten from here on
  return step;
}

// Maximum listed keys of a row that a block selects from at once.
constexpr int kMaxListedKeys = 4096;

// The step before a launch that counts the digits of a pass.
template <int kBits> __device__ Step step_before(Shared &shared, const RowPart<kBits> &row_part, int pass) {
  if (pass > 1) {
    const Step &step = row_part.state().steps[pass - 2];
    if (step.settled) return step;
    load_digits(shared, row_part.digits(pass - 1));
    return next_step<kBits>(shared, step, pass - 1);
  }
  load_digits(shared, row_part.digits(0));
  const int64_t count = row_part.work.s.window;
  const uint32_t total = Select::total(shared.select);
  const auto size = static_cast<int32_t>(min64(count, total));
  Step step{0, 0, open_window(size), true, false, false};
  step.selects_from_lists =
      row_part.work.parts.list_capacity > 0 && !row_part.state().too_short && total >= count && total <= kMaxListedKeys;
  if (step.selects_from_lists) return step;
  if (total > count)
    return next_step<kBits>(shared, {0, static_cast<uint32_t>(count), open_window(size), false, false, false}, 0);
  if (total == count || row_part.threshold == 1) return step;
  step.ignores_threshold = true;
  if (row_part.part == 0) step.window = Select::select(shared.select, row_part.candidates, row_part.row.visible, count);
  return step;
}

// Keeps the selected keys among all that the warps of a row have listed. Lists, and keys in them, are in key order.
template <int kBits> __device__ void keep_listed(Shared &shared, const RowPart<kBits> &row_part) {
  __shared__ int32_t keys[kMaxListedKeys];
  __shared__ uint32_t values[kMaxListedKeys];
  const KeepParts &parts = row_part.work.parts;
  const int32_t *const first_list = row_part.work.lists + row_part.part_number(0) * kWarps * (parts.list_capacity + 1);
  const auto lists = static_cast<int32_t>(parts.count * kWarps);
  int32_t total = 0;
  for (int32_t first = 0; first < lists; first += kThreads) {
    const int32_t number = first + static_cast<int32_t>(threadIdx.x);
    const int32_t *const list = first_list + number * (parts.list_capacity + 1);
    const int32_t count = number < lists ? list[0] : 0;
    uint32_t sum;
    const int32_t before =
        total + static_cast<int32_t>(shared.select.sum.exclusive(static_cast<uint32_t>(count), &sum));
    for (int32_t n = 0; n < count; ++n) keys[before + n] = list[1 + n];
    total += static_cast<int32_t>(sum);
  }
  __syncthreads();
  for (int32_t n = threadIdx.x; n < total; n += kThreads) values[n] = row_part.candidates.value(keys[n]);
  const SampledValues<kBits> listed{values};
  const Window window = Select::select(shared.select, listed, total, row_part.work.s.window);
  for (int32_t n = threadIdx.x; n < total; n += kThreads)
    if (window.holds(values[n], n)) row_part.row.keep[keys[n] * row_part.row.stride] = 1;
}

// Counts the keys of each part by the digit of a pass. In the first pass, warps list those that reach the threshold.
template <int kBits, int kPass>
__global__ void __launch_bounds__(kThreads, 2) count_keys(const __grid_constant__ KeepWork work) {
  using RowDigits = Digits<kBits>;
  __shared__ Shared shared;
  ptx::start_dependents();
  RowPart<kBits> row_part(work);
  if constexpr (kPass == 0) row_part.prefetch();
  ptx::wait_for_kernel_ahead();
  if (row_part.row.absent) return;
  uint32_t decided = 0;
  if constexpr (kPass == 0) {
    row_part.find_ranked(shared);
    row_part.threshold = row_part.state().threshold;
  } else {
    row_part.read_state();
    const Step step = step_before(shared, row_part, kPass);
    if (row_part.is_first_thread()) row_part.state().steps[kPass - 1] = step;
    if constexpr (kPass == 1)
      if (step.selects_from_lists && row_part.part == 0) keep_listed(shared, row_part);
    if (step.settled) return;
    decided = step.decided;
  }
  uint32_t *digits = shared.select.digits;
  __syncthreads(); // readers of other digits are done
  for (int d = threadIdx.x; d < Select::kDigits; d += kThreads) digits[d] = 0;
  __syncthreads();
  constexpr int kShift = RowDigits::shift(kPass), kAbove = RowDigits::above(kPass);
  constexpr uint32_t kDecided = kAbove == 32 ? 0 : ~0u << (kAbove % 32), kDigit = ~kDecided >> kShift;
  const auto count = [&](uint32_t value) {
    if ((value & kDecided) == decided) atomicAdd(&digits[Select::kDigits - 1 - (value >> kShift & kDigit)], 1u);
  };
  if (kPass == 0 && work.parts.list_capacity > 0) {
    int32_t *list = row_part.list() + 1, found = 0;
    row_part.visit_keys(row_part.past, [&](int32_t key, const auto &values) {
      uint32_t counted = 0, kept = 0;
#pragma unroll
      for (int i = 0; i < row_part.kNeighbours; ++i) {
        const uint32_t value = values.value[i];
        if (row_part.counts(value, key + i)) {
          counted |= 1u << i;
          count(value);
        } else if (value != 0 && !row_part.candidates.ranks(key + i)) {
          kept |= 1u << i;
        }
      }
      row_part.write(key, kept);
      if (!__any_sync(kAllLanes, counted != 0)) return;
      const uint32_t up_to_own = warp_inclusive_sum(__popc(counted));
      int32_t place = found + static_cast<int32_t>(up_to_own) - __popc(counted);
#pragma unroll
      for (int i = 0; i < row_part.kNeighbours; ++i) {
        if (!(counted >> i & 1)) continue;
        if (place < work.parts.list_capacity) list[place] = key + i;
        ++place;
      }
      found += static_cast<int32_t>(__shfl_sync(kAllLanes, up_to_own, 31));
    });
    if (lane_id() == 0) {
      row_part.list()[0] = found;
      if (found > work.parts.list_capacity) row_part.state().too_short = 1;
    }
  } else {
    row_part.visit_keys(row_part.row.visible, [&](int32_t key, const auto &values) {
#pragma unroll
      for (int i = 0; i < row_part.kNeighbours; ++i)
        if (row_part.counts(values.value[i], key + i)) count(values.value[i]);
    });
  }
  __syncthreads();
  for (int d = threadIdx.x; d < Select::kDigits; d += kThreads)
    if (digits[d] != 0) atomicAdd(&row_part.digits(kPass)[d], digits[d]);
  if (kPass == RowDigits::kLastPass)
    for (int d = threadIdx.x; d < keep_last_digits(kBits); d += kThreads)
      row_part.part_digits(row_part.part)[d] = digits[Select::kDigits - 1 - d];
}

// The last selected key of the decided value, as far as it matters to this part: INT32_MAX if a later part has it, -1
// if an earlier part has it.
template <int kBits> __device__ int32_t last_equal(Shared &shared, const RowPart<kBits> &row_part, const Step &step) {
  const uint32_t digit = step.decided >> Digits<kBits>::shift(Digits<kBits>::kLastPass) & (keep_last_digits(kBits) - 1);
  const PartPlace place(shared, static_cast<int32_t>(row_part.work.parts.count), step.remaining,
                        [&](int32_t other) { return row_part.part_digits(other)[digit]; });
  if (row_part.part != place.part) return row_part.part < place.part ? INT32_MAX : -1;
  const uint32_t wanted = step.remaining - place.before;
  const auto equal_of = [&](int32_t key, const auto &values) {
    uint32_t equal = 0;
#pragma unroll
    for (int i = 0; i < row_part.kNeighbours; ++i)
      equal |= uint32_t{values.value[i] == step.decided && row_part.counts(values.value[i], key + i)} << i;
    return equal;
  };
  uint32_t own_equal = 0;
  row_part.visit_keys(row_part.row.visible,
                      [&](int32_t key, const auto &values) { own_equal += __popc(equal_of(key, values)); });
  own_equal = __reduce_add_sync(kAllLanes, own_equal);
  if (lane_id() == 0) shared.select.warp_equal[warp_id()] = own_equal;
  __syncthreads();
  uint32_t before = 0;
  for (int w = 0; w < warp_id(); ++w) before += shared.select.warp_equal[w];
  if (before < wanted && before + own_equal >= wanted)
    row_part.visit_keys(row_part.row.visible, [&](int32_t key, const auto &values) {
      const uint32_t equal = equal_of(key, values), up_to_own = warp_inclusive_sum(__popc(equal));
      uint32_t place_of_own = before + up_to_own - __popc(equal);
#pragma unroll
      for (int i = 0; i < row_part.kNeighbours; ++i)
        if (equal >> i & 1 && ++place_of_own == wanted) shared.select.last = key + i;
      before += __shfl_sync(kAllLanes, up_to_own, 31);
    });
  __syncthreads();
  return shared.select.last;
}

template <int kBits>
__global__ void __launch_bounds__(kThreads, 2) write_kept_keys(const __grid_constant__ KeepWork work) {
  constexpr int kLastPass = Digits<kBits>::kLastPass;
  __shared__ Shared shared;
  RowPart<kBits> row_part(work);
  ptx::wait_for_kernel_ahead();
  if (row_part.row.absent) return;
  row_part.read_state();
  Step step = row_part.state().steps[kLastPass - 1];
  if (step.selects_from_lists) return;
  if (step.ignores_threshold) {
    row_part.threshold = 1;
    row_part.list_length = -1;
  }
  if (!step.settled) {
    load_digits(shared, row_part.digits(kLastPass));
    step = next_step<kBits>(shared, step, kLastPass);
    if (!step.settled) step.window.last = last_equal(shared, row_part, step);
  }
  row_part.visit_keys(row_part.past, [&](int32_t key, const auto &values) {
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < row_part.kNeighbours; ++i) {
      const uint32_t value = values.value[i];
      const bool holds =
          row_part.counts(value, key + i) ? step.window.holds(value, key + i) : !row_part.candidates.ranks(key + i);
      kept |= uint32_t{value != 0 && holds} << i;
    }
    if (row_part.list_length < 0)
      row_part.write(key, kept);
    else if (kept != 0)
      row_part.row.keep[key * row_part.row.stride] = 1;
  });
}

} // namespace

cudaError_t select_keep_parts(const fdm_selection &s, const SelectionRoute &route, void *workspace,
                              cudaStream_t stream) {
  const KeepWork work{s,
                      route.keep,
                      at<char>(workspace, route.states),
                      at<uint32_t>(workspace, route.digits),
                      at<uint32_t>(workspace, route.part_digits),
                      at<uint32_t>(workspace, route.seen),
                      at<int32_t>(workspace, route.lists)};
  const auto run = [&](auto kernel) {
    return launch<Overlap::kernel_ahead>(kernel, route.blocks, kThreads, 0, stream, work);
  };
  return with_bias_bits(s, [&](auto bits) {
    constexpr int kBits = decltype(bits)::value;
    cudaError_t error = launch(sample_keys<kBits>, route.blocks, kThreads, 0, stream, work);
    if (!error) error = run(count_keys<kBits, 0>);
    if (!error) error = run(count_keys<kBits, 1>);
    if constexpr (kBits == 32)
      if (!error) error = run(count_keys<kBits, 2>);
    if (!error) error = run(write_kept_keys<kBits>);
    return error;
  });
}

} // namespace fdm::cuda
