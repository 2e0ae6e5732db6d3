// SPDX-License-Identifier: BSD-3-Clause
// The backward pass.
//
// A unit is one KV head of one sequence. If there are too few of those for the threads, a unit is an interleaved part
// of its row tiles. A unit adds the gradients of its keys into separate rows. Then the parts of a head are summed in
// order and written once. No two threads add to the same number, so equal inputs and thread counts give equal bits.
//
// If several KV heads share the rows of a bias, they form a bias group, and a unit is a chunk of one.
#include <cstring>

#include "kernels.h"
#include "key_rows.h"
#include "passes.h"
#include "scalar.h"
#include "scratch.h"
#include "thread_pool.h"

namespace fdm::cpu {
namespace {

// Five matrix products in place of two.
double backward_work(const fdm_problem &p, int64_t tile_rows) { return 2.5 * forward_work(p, tile_rows); }

bool has_per_key_bias(const fdm_problem &p) { return present(p.bias) && !is_per_query(p.bias); }

// The gradient of per_query_bias().
const fdm_tensor &per_query_dbias(const fdm_problem &p, const fdm_backward_args &args) {
  static const fdm_tensor absent{};
  if (has_key_lists(p)) return args.dindex_bias;
  return has_per_key_bias(p) ? absent : args.dbias;
}

// Elements of a row of that gradient.
int64_t per_query_bias_width(const fdm_problem &p) { return max_columns(p); }

// The summation of the gradient of a per-query bias, or of a bias with an element for each listed key.
enum class PerQueryDbiasMode {
  none,
  per_head,  // a KV head of a sequence has separate rows, summed tile by tile with its other gradients
  shared,    // a unit sums the rows of a chunk of a bias group in its own matrix
  recomputed // a task owns a row tile, and recomputes the score gradients of all heads and batch elements that share it
};

// The maximum floats of the matrices of all chunks of all bias groups, except that each has at least one chunk.
constexpr int64_t kMatrixFloats = int64_t(1) << 26;

struct BackwardLayout {
  int64_t heads, parts, units;  // sequences x KV heads; parts of each; their product
  int64_t slots, slot_bytes;    // accumulators: one for each unit, or one for each thread if a unit is a whole head
  int64_t bias_heads;           // per-key bias rows of a KV head
  int64_t per_query_bias_heads; // rows of per_query_bias() of a query for a KV head
  int64_t bias_sums;            // float64 sums of the bias gradient, before the sums over the batch and heads
  int64_t sink_sums;            // float64 sums of the sink gradients: for each unit, those of its query heads
  PerQueryDbiasMode dbias_mode;
  int64_t bias_groups, members, chunks; // members of a bias group: the (sequence, KV head) pairs that share its rows
  int64_t member_stride;                // distance between members, in KV heads over all sequences
  int64_t matrix;                       // floats of the bias rows of a bias group
  int64_t scratch;                      // bytes per thread
  bool copies_by_head;                  // units copy the rows of K and V that they read

  explicit BackwardLayout(const fdm_problem &p) {
    const int64_t task_rows = has_key_lists(p) ? kKeyListRows : kMaxTileRows;
    const int64_t threads = p.context.threads, tiles = ceil_div(p.queries, task_rows);
    heads = p.batch * p.kv_heads;
    parts = heads == 0 || threads == 1 ? 1 : max64(1, min64(tiles, ceil_div(2 * threads, heads)));
    bias_heads = cpu::bias_heads(p, group_size(p));
    per_query_bias_heads = cpu::per_query_bias_heads(p, group_size(p));
    divide_per_query_dbias(p);
    if (dbias_mode == PerQueryDbiasMode::shared) parts = 1;
    copies_by_head = parts == 1 && dbias_mode != PerQueryDbiasMode::recomputed && cpu::copies_by_head(p);
    units = heads * parts;
    slots = parts == 1 ? threads : units;
    const int64_t key_floats = 2 * p.keys * padded_head_dim(p),
                  key_sums = has_per_key_bias(p) ? bias_heads * p.keys : 0;
    slot_bytes = round_up(key_floats * int64_t(sizeof(float)) + key_sums * int64_t(sizeof(double)), 64);
    bias_sums = has_per_key_bias(p) ? (is_varlen(p) ? 1 : p.batch) * p.kv_heads * bias_heads * total_keys(p) : 0;
    sink_sums = present(p.sink) ? units * group_size(p) : 0;
    scratch = tile_scratch_bytes(p, true);
    const int64_t tile_floats = task_rows * per_query_bias_width(p);
    if (dbias_mode == PerQueryDbiasMode::per_head)
      scratch += per_query_bias_heads * tile_floats * int64_t(sizeof(float));
    if (dbias_mode == PerQueryDbiasMode::recomputed) scratch += tile_floats * int64_t(sizeof(float));
    scratch = round_up(scratch, 64);
  }

  int64_t bytes(const fdm_problem &p) const {
    return p.context.threads * scratch + slots * slot_bytes + (bias_sums + sink_sums) * int64_t(sizeof(double)) +
           matrices() * int64_t(sizeof(float));
  }

  int64_t matrices() const { return dbias_mode == PerQueryDbiasMode::shared ? bias_groups * chunks * matrix : 0; }

private:
  void divide_per_query_dbias(const fdm_problem &p) {
    dbias_mode = PerQueryDbiasMode::none;
    bias_groups = members = chunks = member_stride = 1;
    matrix = 0;
    const fdm_tensor &bias = cpu::per_query_bias(p);
    if (!present(bias)) return;
    dbias_mode = PerQueryDbiasMode::recomputed;
    if (heads == 0) return; // its rows are zeros
    const int64_t sequences = bias.shape[0] == 1 && !is_varlen(p) ? p.batch : 1;
    members = sequences * (bias.shape[1] == 1 ? p.kv_heads : 1);
    if (members == 1) {
      dbias_mode = PerQueryDbiasMode::per_head;
      return;
    }
    bias_groups = heads / members;
    if (bias.shape[1] > 1) member_stride = p.kv_heads;
    matrix = per_query_bias_heads * p.queries * per_query_bias_width(p);
    const int64_t threads = useful_threads(p.context.threads, backward_work(p, kMaxTileRows));
    const int64_t max_chunks = kMatrixFloats / max64(1, bias_groups * matrix);
    chunks = threads == 1 ? 1 : clamp64(min64(ceil_div(2 * threads, bias_groups), max_chunks), 1, members);
    // With fewer units than threads, row tiles give more tasks.
    const bool is_divided = bias_groups * chunks >= threads, has_keys = bias.shape[3] == per_query_bias_width(p);
    if (is_divided && has_keys && !is_varlen(p)) dbias_mode = PerQueryDbiasMode::shared;
  }
};

class BackwardPass {
public:
  BackwardPass(const fdm_problem &p, const fdm_backward_args &args, const void *plan, void *key_rows, void *workspace)
      : p_(p), args_(args), plan_(plan), key_rows_(key_rows), layout_(p), kernels_(best_kernels()),
        dim_(padded_head_dim(p)), rows_(tile_rows(p, plan)),
        threads_(useful_threads(p.context.threads, backward_work(p, rows_))) {
    scratch_ = static_cast<char *>(workspace);
    slots_ = scratch_ + p.context.threads * layout_.scratch;
    bias_sums_ = reinterpret_cast<double *>(slots_ + layout_.slots * layout_.slot_bytes);
    sink_sums_ = bias_sums_ + layout_.bias_sums;
    matrices_ = reinterpret_cast<float *>(sink_sums_ + layout_.sink_sums);
    needs_per_key_dbias_ = present(args.dbias) && has_per_key_bias(p);
    dbias_mode_ = present(per_query_dbias()) ? layout_.dbias_mode : PerQueryDbiasMode::none;
  }

  void run() {
    const bool needs_keys = present(args_.dk) || present(args_.dv) || needs_per_key_dbias_;
    if (dbias_mode_ == PerQueryDbiasMode::shared) {
      parallel([&](int64_t chunk, int worker) { run_chunk(chunk, worker); }, layout_.bias_groups * layout_.chunks);
      parallel([&](int64_t tile, int) { write_matrix_rows(tile); },
               layout_.bias_groups * layout_.per_query_bias_heads * tiles());
    } else if (needs_keys || present(args_.dq) || present(args_.dsink) || dbias_mode_ == PerQueryDbiasMode::per_head) {
      parallel([&](int64_t unit, int worker) { run_unit(unit, worker, nullptr); }, layout_.units);
    }
    if (layout_.parts > 1 && needs_keys) sum_parts();
    if (present(args_.dsink)) write_sinks();
    if (needs_per_key_dbias_)
      parallel([&](int64_t row, int) { write_per_key_dbias(row); }, args_.dbias.shape[0] * args_.dbias.shape[1]);
    if (dbias_mode_ == PerQueryDbiasMode::recomputed) run_per_query_bias();
  }

private:
  template <class Body> void parallel(const Body &body, int64_t tasks) { parallel_for(threads_, tasks, body); }

  void *scratch(int worker) const { return scratch_ + worker * layout_.scratch; }
  // Rows of per_query_bias_width() floats for a tile, after the scratch of its kernels.
  float *row_scratch(int worker) const {
    return reinterpret_cast<float *>(static_cast<char *>(scratch(worker)) + tile_scratch_bytes(p_, true));
  }
  int64_t tiles() const { return ceil_div(p_.queries, rows_); }
  const fdm_tensor &per_query_dbias() const { return cpu::per_query_dbias(p_, args_); }
  // The head of that gradient to which query head g of a KV head adds.
  int64_t bias_head(int64_t kv_head, int64_t g) const {
    return head_index(p_, per_query_dbias(), kv_head * group_size(p_) + g);
  }

  KeyGradients slot(int64_t number) const {
    auto *base = reinterpret_cast<float *>(slots_ + number * layout_.slot_bytes);
    const int64_t size = p_.keys * dim_;
    return {present(args_.dk) ? base : nullptr, present(args_.dv) ? base + size : nullptr,
            needs_per_key_dbias_ ? reinterpret_cast<double *>(base + 2 * size) : nullptr};
  }

  void clear(const KeyGradients &g, int64_t keys) const {
    if (g.dk) std::memset(g.dk, 0, size_t(keys * dim_) * sizeof(float));
    if (g.dv) std::memset(g.dv, 0, size_t(keys * dim_) * sizeof(float));
    if (g.dbias) std::memset(g.dbias, 0, size_t(layout_.bias_heads * p_.keys) * sizeof(double));
  }

  // `matrix` receives the sums of a shared bias: a row for each query, for each bias head.
  void run_unit(int64_t unit, int worker, float *matrix) {
    const int64_t part = unit % layout_.parts, head = unit / layout_.parts;
    const int64_t kv_head = head % p_.kv_heads;
    KeyGradients sums = slot(layout_.parts == 1 ? worker : unit);
    TileTask task;
    task.sequence_index = head / p_.kv_heads;
    task.sequence = sequence(p_, task.sequence_index);
    task.heads = heads_per_task(p_);
    const fdm_problem p = layout_.copies_by_head ? with_key_rows(p_, task.sequence, kv_head, key_rows_, worker) : p_;
    clear(sums, task.sequence.k_count);
    double *const dsink = present(args_.dsink) ? sink_sums_ + unit * group_size(p_) : nullptr;
    if (dsink) std::memset(dsink, 0, size_t(group_size(p_)) * sizeof(double));
    const int64_t width = per_query_bias_width(p_);
    sums.dbias_row_stride = width;
    for (int64_t tile = part; tile * rows_ < task.sequence.q_count; tile += layout_.parts) {
      task.first_row = tile * rows_;
      task.rows = min64(rows_, task.sequence.q_count - task.first_row);
      if (matrix) {
        sums.per_query_dbias = matrix + task.first_row * width;
        sums.dbias_head_stride = p_.queries * width;
      } else if (dbias_mode_ == PerQueryDbiasMode::per_head) {
        sums.per_query_dbias = row_scratch(worker);
        sums.dbias_head_stride = task.rows * width;
        std::memset(sums.per_query_dbias, 0,
                    size_t(layout_.per_query_bias_heads * sums.dbias_head_stride) * sizeof(float));
      }
      for (int64_t g = 0; g < group_size(p_); g += task.heads) {
        task.head = kv_head * group_size(p_) + g;
        KeyGradients head_sums = sums;
        if (layout_.bias_heads > 1 && head_sums.dbias) head_sums.dbias += g * p_.keys;
        if (layout_.per_query_bias_heads > 1 && head_sums.per_query_dbias)
          head_sums.per_query_dbias += g * head_sums.dbias_head_stride;
        if (dsink) head_sums.dsink = dsink + g;
        kernels_.backward_tile(p, args_, plan_, task, head_sums, scratch(worker));
      }
      if (dbias_mode_ == PerQueryDbiasMode::per_head)
        for (int64_t g = 0; g < layout_.per_query_bias_heads; ++g)
          write_per_query_dbias(task.sequence, bias_head(kv_head, g), task.first_row, task.rows,
                                sums.per_query_dbias + g * sums.dbias_head_stride);
    }
    if (layout_.parts == 1) write_keys(task.sequence, head, sums, 0, task.sequence.k_count);
  }

  // The KV head, counted over all sequences, that is member n of a bias group. Members are consecutive unless only the
  // batch shares rows.
  int64_t member(int64_t bias_group, int64_t n) const {
    return layout_.member_stride == 1 ? bias_group * layout_.members + n : bias_group + n * layout_.member_stride;
  }

  void run_chunk(int64_t chunk, int worker) {
    const int64_t bias_group = chunk / layout_.chunks, number = chunk % layout_.chunks;
    float *const matrix = matrices_ + chunk * layout_.matrix;
    std::memset(matrix, 0, size_t(layout_.matrix) * sizeof(float));
    const int64_t past = layout_.members * (number + 1) / layout_.chunks;
    for (int64_t n = layout_.members * number / layout_.chunks; n < past; ++n)
      run_unit(member(bias_group, n), worker, matrix);
  }

  // Sums the chunks of a row tile in order, and writes the rows.
  void write_matrix_rows(int64_t number) {
    const int64_t tile = number % tiles(), head = number / tiles() % layout_.per_query_bias_heads;
    const int64_t bias_group = number / tiles() / layout_.per_query_bias_heads, width = per_query_bias_width(p_);
    const int64_t first = tile * rows_, rows = min64(rows_, p_.queries - first);
    float *const sums = matrices_ + bias_group * layout_.chunks * layout_.matrix + (head * p_.queries + first) * width;
    for (int64_t chunk = 1; chunk < layout_.chunks; ++chunk) add(sums, sums + chunk * layout_.matrix, 0, rows * width);
    const int64_t member = this->member(bias_group, 0);
    write_per_query_dbias(sequence(p_, member / p_.kv_heads), bias_head(member % p_.kv_heads, head), first, rows, sums);
  }

  // Sums the parts of each head in order into its first part, a range of keys at a time, and writes the result.
  void sum_parts() {
    constexpr int64_t kKeys = 256;
    const int64_t ranges = ceil_div(p_.keys, kKeys);
    parallel(
        [&](int64_t number, int) {
          const int64_t head = number / ranges, begin = number % ranges * kKeys;
          const Sequence s = sequence(p_, head / p_.kv_heads);
          const int64_t end = min64(s.k_count, begin + kKeys);
          if (begin >= end) return;
          const KeyGradients sums = slot(head * layout_.parts);
          for (int64_t part = 1; part < layout_.parts; ++part) {
            const KeyGradients more = slot(head * layout_.parts + part);
            add(sums.dk, more.dk, begin * dim_, end * dim_);
            add(sums.dv, more.dv, begin * dim_, end * dim_);
            for (int64_t g = 0; g < layout_.bias_heads; ++g)
              add(sums.dbias, more.dbias, g * p_.keys + begin, g * p_.keys + end);
          }
          write_keys(s, head, sums, begin, end);
        },
        layout_.heads * ranges);
  }

  template <class Number> static void add(Number *sums, const Number *more, int64_t begin, int64_t end) {
    if (sums)
      for (int64_t i = begin; i < end; ++i) sums[i] += more[i];
  }

  // Writes the sums of keys [begin, end) of a head to dk, dv and the bias sums.
  void write_keys(const Sequence &s, int64_t head, const KeyGradients &sums, int64_t begin, int64_t end) {
    write_key_rows(args_.dk, s, head % p_.kv_heads, sums.dk, begin, end, p_.scale);
    write_key_rows(args_.dv, s, head % p_.kv_heads, sums.dv, begin, end, 1.0f);
    if (!sums.dbias) return;
    for (int64_t g = 0; g < layout_.bias_heads; ++g) {
      double *row =
          bias_sums_ + ((is_varlen(p_) ? head % p_.kv_heads : head) * layout_.bias_heads + g) * total_keys(p_);
      std::memcpy(row + s.k_begin + begin, sums.dbias + g * p_.keys + begin, size_t(end - begin) * sizeof(double));
    }
  }

  void write_key_rows(const fdm_tensor &t, const Sequence &s, int64_t kv_head, const float *rows, int64_t begin,
                      int64_t end, float factor) const {
    if (!present(t)) return;
    for (int64_t j = begin; j < end; ++j) {
      const int64_t offset = s.batch * t.stride[0] + (s.k_begin + j) * t.stride[1] + kv_head * t.stride[2];
      for (int64_t d = 0; d < p_.head_dim; ++d)
        store_scalar(t.data, t.dtype, offset + d * t.stride[3], rows[j * dim_ + d] * factor);
    }
  }

  // One (batch, head) row of a per-key dbias: the sum over the batch, heads and keys that share it.
  void write_per_key_dbias(int64_t row) {
    const fdm_tensor &t = args_.dbias;
    const int64_t batch = row / t.shape[1], head = row % t.shape[1], keys = total_keys(p_);
    const int64_t sources = p_.kv_heads * layout_.bias_heads; // rows of bias sums per batch element
    const int64_t batches = is_varlen(p_) ? 1 : p_.batch;
    const int64_t first_batch = t.shape[0] == 1 ? 0 : batch, past_batch = t.shape[0] == 1 ? batches : batch + 1;
    const int64_t first = t.shape[1] == 1 ? 0 : head, past = t.shape[1] == 1 ? sources : head + 1;
    const auto sum_of_key = [&](int64_t j) {
      double sum = 0.0;
      for (int64_t b = first_batch; b < past_batch; ++b)
        for (int64_t h = first; h < past; ++h) sum += bias_sums_[(b * sources + h) * keys + j];
      return sum;
    };
    const int64_t offset = batch * t.stride[0] + head * t.stride[1];
    if (t.shape[3] == 1) {
      double sum = 0.0;
      for (int64_t j = 0; j < keys; ++j) sum += sum_of_key(j);
      store_scalar(t.data, t.dtype, offset, sum);
    } else {
      for (int64_t j = 0; j < keys; ++j) store_scalar(t.data, t.dtype, offset + j * t.stride[3], sum_of_key(j));
    }
  }

  // Sums the gradient of each sink over the sequences and the parts of its KV head.
  void write_sinks() const {
    for (int64_t h = 0; h < p_.heads; ++h) {
      double sum = 0.0;
      for (int64_t b = 0; b < p_.batch; ++b)
        for (int64_t part = 0; part < layout_.parts; ++part) {
          const int64_t unit = (b * p_.kv_heads + kv_head_of(p_, h)) * layout_.parts + part;
          sum += sink_sums_[unit * group_size(p_) + h % group_size(p_)];
        }
      store_scalar(args_.dsink.data, args_.dsink.dtype, h * args_.dsink.stride[0], sum);
    }
  }

  // A per-query gradient: each task owns a row tile of one (batch, head) of it, and recomputes the score gradients of
  // all heads and batch elements that share it.
  void run_per_query_bias() {
    const fdm_tensor &t = per_query_dbias();
    const int64_t sequences = is_varlen(p_) ? p_.batch : t.shape[0], tiles = ceil_div(p_.queries, rows_);
    parallel(
        [&](int64_t number, int worker) {
          const int64_t tile = number % tiles, head = number / tiles % t.shape[1], b = number / tiles / t.shape[1];
          recompute_dbias_tile(b, head, tile, worker);
        },
        sequences * t.shape[1] * tiles);
  }

  void recompute_dbias_tile(int64_t b, int64_t bias_head, int64_t tile, int worker) {
    const fdm_tensor &t = per_query_dbias();
    const bool shared = !is_varlen(p_) && t.shape[0] == 1;
    TileTask task;
    task.heads = 1;
    task.first_row = tile * rows_;
    task.rows = min64(rows_, sequence(p_, b).q_count - task.first_row);
    if (task.rows <= 0) return;
    KeyGradients sums{};
    sums.per_query_dbias = row_scratch(worker);
    sums.dbias_row_stride = per_query_bias_width(p_);
    std::memset(sums.per_query_dbias, 0, size_t(task.rows * sums.dbias_row_stride) * sizeof(float));
    for (int64_t batch = shared ? 0 : b; batch < (shared ? p_.batch : b + 1); ++batch)
      for (int64_t h = 0; h < p_.heads; ++h) {
        if (head_index(p_, t, h) != bias_head) continue;
        task.sequence_index = batch;
        task.sequence = sequence(p_, batch);
        task.head = h;
        kernels_.per_query_dbias_tile(p_, args_, plan_, task, sums, scratch(worker));
      }
    write_per_query_dbias(sequence(p_, b), bias_head, task.first_row, task.rows, sums.per_query_dbias);
  }

  // Writes rows of the gradient of a head of per_query_bias(), from sums of per_query_bias_width() floats each.
  void write_per_query_dbias(const Sequence &s, int64_t head, int64_t first, int64_t rows, const float *sums) const {
    const fdm_tensor &t = per_query_dbias();
    for (int64_t i = 0; i < rows; ++i) {
      const float *row = sums + i * per_query_bias_width(p_);
      const int64_t offset =
          batch_index(t, s) * t.stride[0] + head * t.stride[1] + (s.q_begin + first + i) * t.stride[2];
      if (t.shape[3] == 1 && !has_key_lists(p_)) {
        double sum = 0.0;
        for (int64_t j = 0; j < s.k_count; ++j) sum += row[j];
        store_scalar(t.data, t.dtype, offset, sum);
      } else {
        for (int64_t j = 0; j < t.shape[3]; ++j) store_scalar(t.data, t.dtype, offset + j * t.stride[3], row[j]);
      }
    }
  }

  const fdm_problem &p_;
  const fdm_backward_args &args_;
  const void *plan_;
  void *key_rows_;
  const BackwardLayout layout_;
  const Kernels &kernels_;
  const int64_t dim_, rows_;
  const int threads_;
  char *scratch_, *slots_;
  double *bias_sums_, *sink_sums_;
  float *matrices_;
  bool needs_per_key_dbias_;
  PerQueryDbiasMode dbias_mode_;
};

} // namespace

int64_t CpuPack::backward_workspace_bytes(const fdm_problem &p) {
  const BackwardLayout layout(p);
  return key_row_bytes(p, layout.copies_by_head) + layout.bytes(p);
}

void CpuPack::backward(const fdm_problem &p, const fdm_backward_args &args, const void *plan, void *workspace) {
  const bool by_head = BackwardLayout(p).copies_by_head;
  const fdm_problem gathered = by_head ? p : with_key_rows(p, workspace);
  BackwardPass(gathered, args, plan, workspace, static_cast<char *>(workspace) + key_row_bytes(p, by_head)).run();
}

} // namespace fdm::cpu
