// SPDX-License-Identifier: BSD-3-Clause
// Bias and intervals of forget gates: fdm_pack.forget and forget_backward.
#include <cmath>

#include "../indexing.h"
#include "passes.h"
#include "scalar.h"
#include "thread_pool.h"

namespace fdm::cpu {
namespace {

// The cost of a gate in multiply-adds, the unit of useful_threads(): a few loads, stores and additions.
constexpr double kWorkPerGate = 200.0;
// Numbers that are summed separately before they are added to the running sum, so that a long row has fewer
// roundings.
constexpr int64_t kTermsPerPartialSum = 128;

int64_t rows_of(const fdm_forgetting &f) { return f.log_forget.shape[0] * f.log_forget.shape[1]; }

int threads_of(const fdm_forgetting &f) {
  const auto gates = double(rows_of(f)) * double(f.log_forget.shape[3]);
  return int(clamp64(rows_of(f), 1, useful_threads(f.context.threads, kWorkPerGate * gates)));
}

double load_number(const fdm_tensor &t, int64_t offset) {
  return t.dtype == FDM_FLOAT64 ? static_cast<const double *>(t.data)[offset] : load_scalar(t.data, t.dtype, offset);
}

// The gates of one head of one batch element.
struct GateRow {
  const fdm_forgetting &f;
  int64_t batch, head;

  int64_t tokens() const { return f.log_forget.shape[3]; }
  int64_t offset(const fdm_tensor &t, int64_t token) const {
    return batch * t.stride[0] + head * t.stride[1] + token * t.stride[3];
  }
  double load(const fdm_tensor &t, int64_t token) const { return load_number(t, offset(t, token)); }
  bool is_token(int64_t token) const {
    const fdm_tensor &t = f.padding;
    return !present(t) || static_cast<const uint8_t *>(t.data)[batch * t.stride[0] + token * t.stride[3]];
  }
  void write(const fdm_tensor &t, int64_t token, double value) const {
    store_scalar(t.data, t.dtype, offset(t, token), value);
  }
  void write_row(const fdm_tensor &t, int64_t token, int64_t row) const {
    static_cast<int32_t *>(t.data)[offset(t, token)] = int32_t(row);
  }
};

class RunningSum {
public:
  double add(double value) {
    if (count_++ % kTermsPerPartialSum == 0) {
      finished_ += current_;
      current_ = 0;
    }
    current_ += value;
    return finished_ + current_;
  }

private:
  double finished_ = 0, current_ = 0;
  int64_t count_ = 0;
};

// Calls work(row, worker) for each row.
template <class Work> void for_rows(const fdm_forgetting &f, const Work &work) {
  const int64_t heads = f.log_forget.shape[1];
  parallel_for(threads_of(f), rows_of(f),
               [&](int64_t number, int worker) { work(GateRow{f, number / heads, number % heads}, worker); });
}

} // namespace

int64_t CpuPack::forget_workspace_bytes(const fdm_forgetting &f) {
  return f.log_forget.shape[3] * threads_of(f) * int64_t(sizeof(double)); // the sums of a row, for each worker
}

void CpuPack::forget(const fdm_forgetting &f, void *workspace) {
  for_rows(f, [&](const GateRow &row, int worker) {
    double *sums = static_cast<double *>(workspace) + worker * row.tokens();
    for (int64_t begin = 0, past; begin < row.tokens(); begin = past) {
      past = sequence_of(f, begin).past;
      RunningSum running;
      for (int64_t j = begin; j < past; ++j) {
        const bool is_token = row.is_token(j);
        sums[j] = running.add(is_token ? clamped_gate(f, row.load(f.log_forget, j)) : 0.0);
        row.write(f.bias, j, is_token ? -sums[j] : -INFINITY);
      }
      if (!present(f.end)) continue;
      // Sums only decrease, so a later key is never dropped earlier.
      int64_t end = begin;
      for (int64_t j = begin; j < past; ++j) {
        end = max64(end, j + 1);
        while (end < past && !(sums[end] < sums[j] + f.prune)) ++end;
        row.write_row(f.start, j, j - begin);
        row.write_row(f.end, j, row.is_token(j) ? end - begin : 0);
      }
    }
  });
}

void CpuPack::forget_backward(const fdm_forgetting &f, void *) {
  for_rows(f, [&](const GateRow &row, int) {
    for (int64_t past = row.tokens(), begin; past > 0; past = begin) {
      begin = sequence_of(f, past - 1).begin;
      RunningSum running;
      for (int64_t j = past - 1; j >= begin; --j) {
        const bool is_token = row.is_token(j);
        const double sum = running.add(is_token ? row.load(f.dbias, j) : 0.0);
        const bool has_gradient = is_token && row.load(f.log_forget, j) >= f.least;
        row.write(f.dlog_forget, j, has_gradient ? -sum : 0.0);
      }
    }
  });
}

} // namespace fdm::cpu
