// SPDX-License-Identifier: BSD-3-Clause
// The producer warpgroup of the forward kernel of pair biases for sm_90. It copies Q of a task, and for each key
// block the bias, and K and V of each source.
#pragma once

#include "../score_tile.cuh"
#include "forward_tasks.cuh"

namespace fdm::cuda {

template <class Config> struct PairBiasForwardProducerSm90 {
  using Pair = typename Config::Pair;

  using Rows = TileRowCopy<Pair>;

  const PairBiasForward &work;
  PairBiasForwardSharedSm90<Config> &shared;
  const PairBiasForwardTaskSm90<Config> &task;
  const SourceWalk first_source;
  const Rows k, v;
  // Per source: this thread's first row of K and V, and its first byte of a key mask, if there is one.
  const uint16_t *k_row[Config::kSources], *v_row[Config::kSources];
  const uint8_t *kept[Config::kSources];
  int sources; // from the task's first one on
  PairBiasForwardStatesSm90<Config> &states;

  __device__ PairBiasForwardProducerSm90(const PairBiasForward &own_work, PairBiasForwardSharedSm90<Config> &memory,
                                         const PairBiasForwardTaskSm90<Config> &own_task,
                                         PairBiasForwardStatesSm90<Config> &own_states)
      : work(own_work), shared(memory), task(own_task),
        first_source(own_work.call, own_task.plane, own_task.first_source),
        k(own_work.call.p.k, own_work.call.p.head_dim, 0), v(own_work.call.p.v, own_work.call.p.head_dim, 0),
        sources(own_work.call.batches * own_work.call.heads - own_task.first_source), states(own_states) {
    const fdm_problem &p = work.call.p;
    SourceWalk source = first_source;
#pragma unroll
    for (int n = 0; n < Config::kSources; ++n, ++source) {
      const int64_t head = kv_head_of(p, source.head);
      k_row[n] = k.row_of(source.batch, head);
      v_row[n] = v.row_of(source.batch, head);
      kept[n] = kept_key(p, source.batch, source.head, thread());
    }
  }

  __device__ static int thread() { return Roles::producer_thread(); }

  __device__ void load_queries() const {
    const fdm_problem &p = work.call.p;
    // The rows of the second head of a pair lie below those of the first.
    const int head = thread() / Config::kRows, first_row = task.first_row - head * Config::kRows;
    const Rows q(p.q, p.head_dim, first_row);
    SourceWalk source = first_source;
    auto &state = states.queries;
    Roles::producer_acquire(shared.q_empty[state.index], state.phase);
#pragma unroll 1
    for (int n = 0; n < Config::kSources; ++n, ++source)
      q.copy(shared.sQ[state.index], n, q.row_of(source.batch, source.head + head),
             __ballot_sync(0xffffffffu,
                           n < sources && (!Config::kSplitsKeys || head == 0) && first_row + thread() < p.queries));
    Roles::producer_commit(shared.q_full[state.index]);
    ++state;
  }

  // This thread's 16-byte chunks of the bias or of a row mask: the address of its first chunk at the first key, and
  // the distance to its next row in bytes.
  template <int kElementBytes> struct Chunks {
    static constexpr int kThreadsPerRow = Config::kTile * kElementBytes / 16,
                         kRowsAtOnce = Roles::kProducerThreads / kThreadsPerRow;
    static constexpr int kRowSteps = Config::kRows / kRowsAtOnce;
    const char *first;
    int64_t step;
  };
  template <int kElementBytes> __device__ Chunks<kElementBytes> chunks_of(const fdm_tensor &t) const {
    using Own = Chunks<kElementBytes>;
    const fdm_problem &p = work.call.p;
    const Matrix m = score_matrix(p, t, pair_bias_sequence(p, first_source.batch), first_source.head, kElementBytes);
    const int64_t row = task.first_row + thread() / Own::kThreadsPerRow;
    return {static_cast<const char *>(m.base) + row * m.row * kElementBytes + thread() % Own::kThreadsPerRow * 16,
            Own::kRowsAtOnce * m.row * kElementBytes};
  }
  // Copies the chunks of a key block. Absent rows and keys become zeros.
  template <int kElementBytes, class Address>
  __device__ void copy_chunks(const Chunks<kElementBytes> &chunks, int block, const Address &address) const {
    using Own = Chunks<kElementBytes>;
    const fdm_problem &p = work.call.p;
    const int chunk = thread() % Own::kThreadsPerRow, row = thread() / Own::kThreadsPerRow, key = block * Config::kTile;
    const int rows = int(p.queries) - task.first_row - row;
    const int bytes = max(0, min(16, (int(p.keys) - key) * kElementBytes - chunk * 16));
    const char *source = chunks.first + int64_t(key) * kElementBytes;
#pragma unroll(Config::kSharesWork ? 8 : 4)
    for (int n = 0; n < Own::kRowSteps; ++n) {
      ptx::cp_async_up_to_16(address(row + n * Own::kRowsAtOnce, chunk), source,
                             n * Own::kRowsAtOnce < rows ? bytes : 0);
      source += chunks.step;
    }
  }

  using BiasChunks = Chunks<Config::kBiasSize>;
  using MaskChunks = Chunks<1>;

  __device__ void load_bias(int block, const BiasChunks &chunks) {
    const int stage = states.bias.index;
    Roles::producer_acquire(shared.bias_empty[stage], states.bias.phase);
    const uint32_t base = ptx::shared_address(shared.bias[stage]);
    copy_chunks(chunks, block, [&](int row, int chunk) { return Config::bias_chunk(base, row, chunk); });
  }
  __device__ void load_mask(int block, const MaskChunks &chunks) const {
    const uint32_t base = ptx::shared_address(shared.masks.bytes[states.bias.index]);
    copy_chunks(chunks, block, [&](int row, int chunk) { return base + row * Config::kTile + chunk * 16; });
  }
  __device__ void load_bias_alone(int block, const BiasChunks &chunks) {
    load_bias(block, chunks);
    Roles::producer_commit(shared.bias_full[states.bias.index]);
    ++states.bias;
  }

  // Sets the bias of pairs that a row mask drops to -inf. All producer threads call this once all of their copies
  // have arrived.
  __device__ void fold_mask(int stage) const {
    constexpr int kKeys = 16 / Config::kBiasSize, kThreadsPerRow = Config::kTile / kKeys; // of a chunk; chunks of a row
    constexpr int kRowsAtOnce = Roles::kProducerThreads / kThreadsPerRow, kAtATime = 4;
    const int chunk = thread() % kThreadsPerRow, own_row = thread() / kThreadsPerRow;
    const uint32_t base = ptx::shared_address(shared.bias[stage]);
    const char *const own_mask = shared.masks.bytes[stage] + thread() * kKeys;
#pragma unroll 1
    for (int first = 0; first < Config::kRows; first += kAtATime * kRowsAtOnce) {
      uint32_t address[kAtATime];
      uint4 words[kAtATime];
      uint2 kept[kAtATime]{};
#pragma unroll
      for (int n = 0; n < kAtATime; ++n) {
        const int row = first + n * kRowsAtOnce;
        const char *const booleans = own_mask + row * Config::kTile;
        address[n] = Config::bias_chunk(base, own_row + row, chunk);
        words[n] = ptx::load_shared_16_bytes(address[n]);
        if constexpr (Config::kFloat32Bias)
          kept[n].x = *reinterpret_cast<const uint32_t *>(booleans);
        else
          kept[n] = *reinterpret_cast<const uint2 *>(booleans);
      }
#pragma unroll
      for (int n = 0; n < kAtATime; ++n) {
        if constexpr (Config::kFloat32Bias)
          drop_32_bit(words[n], mask_of_booleans(kept[n].x));
        else
          drop_16_bit<typename Config::Element>(words[n], {mask_of_booleans(kept[n].x), mask_of_booleans(kept[n].y)});
        ptx::store_shared(address[n], words[n]);
      }
    }
  }

  // Returns the mask byte as stored: nonzero if the source keeps this thread's key of a block.
  __device__ uint8_t fetch_kept(int n, int block) const {
    const fdm_problem &p = work.call.p;
    const int key = block * Config::kTile;
    if (n >= sources || key + thread() >= p.keys) return 0;
    return kept[n] ? kept[n][p.mask.shape[3] == 1 ? 0 : key * p.mask.stride[3]] : 1;
  }

  __device__ void load_keys(int n, int block, bool keeps) {
    const fdm_problem &p = work.call.p;
    const int stage = states.keys.index;
    Roles::producer_acquire(shared.empty[stage], states.keys.phase);
    const uint32_t there = shared.dropped[stage].set(keeps);
    if constexpr (Config::kDropsByProduct) shared.drops.drop(stage, thread(), !keeps);
    k.copy(shared.sKV[stage], 0, k_row[n] + block * Config::kTile * p.k.stride[1], there);
    v.copy(shared.sKV[stage], 1, v_row[n] + block * Config::kTile * p.v.stride[1], there);
    Roles::producer_commit(shared.full[stage]);
    ++states.keys;
  }

  __device__ void run() {
    load_queries();
    if constexpr (Config::kMasks)
      if (Config::folds_mask(work.call.p)) return run_masked();
    run_unmasked();
  }

private:
  // Folds a row mask into a tile of the bias once both have arrived, while copies of the next tiles are under way.
  // The wait for the stage of later tiles comes afterwards: consumers may still be at the tile before, and must find
  // this one ready.
  __device__ void run_masked() {
    constexpr int kAhead = Config::kBiasStages == 1 ? 1 : Config::kBiasStages - 1;
    const auto bias_chunks = chunks_of<Config::kBiasSize>(work.call.p.bias);
    const auto mask_chunks = chunks_of<1>(work.call.p.mask);
    PipelineState<Config::kBiasStages> folded = states.bias;
    LiveBlocks<Config> live(task), live_ahead(task);
    int block = live.next(task.begin), ahead = live_ahead.next(task.begin);
    const auto load_next = [&] {
      if (ahead < task.end) {
        load_keys(0, ahead, ahead * Config::kTile + thread() < work.call.p.keys);
        load_bias(ahead, bias_chunks);
        load_mask(ahead, mask_chunks);
        ++states.bias;
        ahead = live_ahead.next(ahead + 1);
      }
      ptx::cp_async_fence();
    };
#pragma unroll 1
    for (int turn = -kAhead; block < task.end; ++turn) {
      if (turn >= 0) {
        ptx::cp_async_wait<kAhead - 1>();
        Roles::sync_producers();
        fold_mask(folded.index);
        ptx::arrive(shared.bias_full[folded.index]);
        ++folded;
        block = live.next(block + 1);
      }
      load_next();
    }
  }

  __device__ void run_unmasked() {
    const auto bias_chunks = chunks_of<Config::kBiasSize>(work.call.p.bias);
    uint8_t fetched = fetch_kept(0, task.begin);
#pragma unroll 1
    for (int block = task.begin; block < task.end; ++block) {
      if constexpr (Config::kHoldsBias) load_bias_alone(block, bias_chunks);
#pragma unroll
      for (int n = 0; n < Config::kSources; ++n) {
        const bool last = n + 1 == Config::kSources;
        const uint8_t next = fetch_kept(last ? 0 : n + 1, last ? block + 1 : block);
        load_keys(n, block, fetched != 0);
        fetched = next;
      }
      // Consumers release the bias of the block before late. K and V need not wait for that.
      if constexpr (!Config::kHoldsBias) load_bias_alone(block, bias_chunks);
    }
  }
};

// Makes a producer for each task.
template <class Config> struct PairBiasForwardProducersSm90 {
  const PairBiasForward &work;
  PairBiasForwardSharedSm90<Config> &shared;
  PairBiasForwardStatesSm90<Config> &states;

  __device__ void run(const PairBiasForwardTaskSm90<Config> &task) {
    PairBiasForwardProducerSm90<Config>(work, shared, task, states).run();
  }
};

} // namespace fdm::cuda
