// SPDX-License-Identifier: BSD-3-Clause
// Opens a cpu pack as the core does and compares its results with a float64 formula. The test needs no Python, so it
// also runs on systems that exist here only as an emulator.
// Usage: driver PACK LEVEL    LEVEL is the SIMD level that the pack must select
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "core/shared_library.h"
#include "pack.h"

namespace {

[[noreturn]] void fail(const std::string &text) {
  std::fprintf(stderr, "driver: %s\n", text.c_str());
  std::exit(1);
}

using Floats = std::vector<float>;

struct Sizes {
  int64_t batch, heads, kv_heads, queries, keys, dim;
  int64_t group() const { return heads / kv_heads; }
};

enum class Mask { none, keys, intervals, rows };

struct Case {
  const char *name;
  Sizes sizes;
  Mask mask;
  bool causal, bias_of_rows;
  int32_t dtype;
  double tolerance; // relative to the largest compared value
};

// Uniform numbers in [-1, 1], equal on every machine.
struct Numbers {
  uint64_t state = 1;
  float next() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return float(int64_t(state >> 40) - (int64_t(1) << 23)) / float(1 << 23);
  }
};

float rounded(float value, int32_t dtype) { // truncates to bfloat16
  if (dtype != FDM_BFLOAT16) return value;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  bits &= 0xffff0000u;
  std::memcpy(&value, &bits, sizeof bits);
  return value;
}

// A contiguous 4-D tensor that owns its data.
struct Tensor {
  std::vector<unsigned char> bytes;
  fdm_tensor view{};
  int64_t size = 0;

  Tensor(int64_t a, int64_t b, int64_t c, int64_t d, int32_t dtype) {
    size = a * b * c * d;
    const int64_t width = dtype == FDM_FLOAT32 || dtype == FDM_INT32 ? 4 : dtype == FDM_BOOL ? 1 : 2;
    bytes.assign(size_t(size * width), 0);
    const int64_t shape[] = {a, b, c, d}, stride[] = {b * c * d, c * d, d, 1};
    std::memcpy(view.shape, shape, sizeof shape);
    std::memcpy(view.stride, stride, sizeof stride);
    view.data = bytes.data();
    view.dtype = dtype;
  }
  float get(int64_t at) const {
    if (view.dtype == FDM_FLOAT32) return reinterpret_cast<const float *>(bytes.data())[at];
    const uint32_t bits = uint32_t(reinterpret_cast<const uint16_t *>(bytes.data())[at]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
  }
  void set(int64_t at, float value) {
    if (view.dtype == FDM_FLOAT32) {
      reinterpret_cast<float *>(bytes.data())[at] = value;
      return;
    }
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    reinterpret_cast<uint16_t *>(bytes.data())[at] = uint16_t(bits >> 16);
  }
  void fill(Numbers &numbers) {
    for (int64_t at = 0; at < size; ++at) set(at, rounded(numbers.next(), view.dtype));
  }
};

struct Problem {
  Sizes s;
  Case about;
  Tensor q, k, v, out, dout, lse, dq, dk, dv, bias, dbias, mask, start, end;
  std::vector<char> keeps; // for each query and key

  explicit Problem(const Case &c)
      : s(c.sizes), about(c), q(s.batch, s.queries, s.heads, s.dim, c.dtype),
        k(s.batch, s.keys, s.kv_heads, s.dim, c.dtype), v(k), out(q), dout(q),
        lse(s.batch, s.heads, s.queries, 1, FDM_FLOAT32), dq(q), dk(k), dv(k),
        bias(1, 1, c.bias_of_rows ? s.queries : 1, s.keys, FDM_FLOAT32), dbias(bias),
        mask(1, 1, c.mask == Mask::rows ? s.queries : 1, s.keys, FDM_BOOL), start(1, 1, 1, s.keys, FDM_INT32),
        end(start), keeps(size_t(s.queries * s.keys)) {
    Numbers numbers;
    // A copied tensor points at its own data.
    for (Tensor *t : {&q, &k, &v, &out, &dout, &lse, &dq, &dk, &dv, &bias, &dbias, &mask, &start, &end})
      t->view.data = t->bytes.data();
    for (Tensor *t : {&q, &k, &v, &dout, &bias}) t->fill(numbers);
    for (int64_t j = 0; j < s.keys; ++j) {
      const int32_t from = int32_t(std::abs(numbers.next()) * float(s.queries)), most = int32_t(s.queries);
      const int32_t to = std::min(most, from + int32_t(std::abs(numbers.next()) * float(s.queries)));
      reinterpret_cast<int32_t *>(start.view.data)[j] = from;
      reinterpret_cast<int32_t *>(end.view.data)[j] = to;
      for (int64_t i = 0; i < mask.view.shape[2]; ++i) mask.bytes[size_t(i * s.keys + j)] = numbers.next() > 0;
      for (int64_t i = 0; i < s.queries; ++i) {
        const bool by_mask = mask.bytes[size_t((c.mask == Mask::rows ? i : 0) * s.keys + j)] != 0;
        const bool kept = c.mask == Mask::none || (c.mask == Mask::intervals ? from <= i && i < to : by_mask);
        keeps[size_t(i * s.keys + j)] = kept && (!c.causal || j <= i + s.keys - s.queries);
      }
    }
  }

  fdm_problem view() const {
    fdm_problem p{};
    p.struct_size = sizeof p;
    p.flags = about.causal ? uint32_t(FDM_CAUSAL) : 0u;
    p.context.threads = 3;
    p.scale = 0.25f;
    p.batch = s.batch, p.heads = s.heads, p.kv_heads = s.kv_heads, p.head_dim = s.dim;
    p.queries = s.queries, p.keys = s.keys;
    p.q = q.view, p.k = k.view, p.v = v.view, p.bias = bias.view;
    if (about.mask == Mask::keys || about.mask == Mask::rows) p.mask = mask.view;
    if (about.mask == Mask::intervals) p.start = start.view, p.end = end.view;
    return p;
  }
};

// The expected results in float64.
struct Reference {
  std::vector<double> out, dq, dk, dv, lse, dbias;

  explicit Reference(const Problem &p)
      : out(size_t(p.q.size)), dq(out), dk(size_t(p.k.size)), dv(dk), lse(size_t(p.lse.size)),
        dbias(size_t(p.bias.size)) {
    for (int64_t b = 0; b < p.s.batch; ++b)
      for (int64_t h = 0; h < p.s.heads; ++h)
        for (int64_t i = 0; i < p.s.queries; ++i) row(p, b, h, i);
  }

private:
  static double dot(const Tensor &x, int64_t at, const Tensor &y, int64_t other, int64_t dim) {
    double sum = 0;
    for (int64_t d = 0; d < dim; ++d) sum += double(x.get(at + d)) * y.get(other + d);
    return sum;
  }

  void row(const Problem &p, int64_t b, int64_t h, int64_t i) {
    const Sizes &s = p.s;
    const int64_t at = ((b * s.queries + i) * s.heads + h) * s.dim;
    const auto key = [&](int64_t j) { return ((b * s.keys + j) * s.kv_heads + h / s.group()) * s.dim; };
    const auto bias = [&](int64_t j) { return (p.about.bias_of_rows ? i : 0) * s.keys + j; };
    std::vector<double> weight(size_t(s.keys));
    double sum = 0, delta = 0;
    for (int64_t j = 0; j < s.keys; ++j) {
      if (!p.keeps[size_t(i * s.keys + j)]) continue;
      weight[size_t(j)] = std::exp(0.25 * dot(p.q, at, p.k, key(j), s.dim) + p.bias.get(bias(j)));
      sum += weight[size_t(j)];
    }
    lse[size_t((b * s.heads + h) * s.queries + i)] = std::log(sum);
    if (sum == 0) return;
    for (double &w : weight) w /= sum;
    for (int64_t j = 0; j < s.keys; ++j) delta += weight[size_t(j)] * dot(p.dout, at, p.v, key(j), s.dim);
    for (int64_t j = 0; j < s.keys; ++j) {
      const double w = weight[size_t(j)], ds = w * (dot(p.dout, at, p.v, key(j), s.dim) - delta);
      dbias[size_t(bias(j))] += ds;
      for (int64_t d = 0; d < s.dim; ++d) {
        out[size_t(at + d)] += w * p.v.get(key(j) + d);
        dq[size_t(at + d)] += 0.25 * ds * p.k.get(key(j) + d);
        dk[size_t(key(j) + d)] += 0.25 * ds * p.q.get(at + d);
        dv[size_t(key(j) + d)] += w * p.dout.get(at + d);
      }
    }
  }
};

void compare(const Problem &p, const char *what, const Tensor &found, const std::vector<double> &expected) {
  double largest = 0, error = 0;
  for (int64_t at = 0; at < found.size; ++at) {
    const double right = expected[size_t(at)], value = found.get(at);
    if (std::isinf(right) && value == right) continue; // the lse of a row that keeps no key
    largest = std::max(largest, std::abs(right));
    error = std::max(error, std::isfinite(value) ? std::abs(value - right) : HUGE_VAL);
  }
  std::printf("%-12s %-6s error %.1e of %.1e\n", p.about.name, what, error, largest * p.about.tolerance);
  if (!(error <= largest * p.about.tolerance)) fail(std::string(p.about.name) + ": " + what + " is wrong");
}

struct Buffer {
  std::vector<unsigned char> bytes;
  fdm_buffer view() { return {bytes.data(), int64_t(bytes.size())}; }
};

void run(const fdm_pack &pack, const Case &c) {
  Problem problem(c);
  const fdm_problem p = problem.view();
  const Reference expected(problem);
  char message[512] = "";
  const auto check = [&](int32_t status) {
    if (status != FDM_OK) fail(std::string(c.name) + ": " + message);
  };
  const auto workspace = [&](int32_t pass) {
    int64_t bytes = 0;
    check(pack.workspace_bytes(&p, pass, &bytes, message, sizeof message));
    return Buffer{std::vector<unsigned char>(size_t(bytes))};
  };
  const int kinds[] = {FDM_MASK_NONE, FDM_MASK_KEYS, FDM_MASK_INTERVALS, FDM_MASK_ROWS};
  const fdm_plan_layout &l = pack.plan_layouts[kinds[int(c.mask)]];
  const int64_t tiles = l.tile_rows > 0 ? p.queries / l.tile_rows + 1 : 0;
  const int64_t tile_keys = std::min(p.keys, l.most_tile_keys);
  const int64_t per_list = l.per_list + p.keys * l.per_key + tiles * (l.per_tile + tile_keys * l.per_tile_key);
  Buffer plan{std::vector<unsigned char>(size_t(l.fixed + per_list))};
  Buffer scratch = workspace(FDM_PASS_PLAN);
  check(pack.plan(&p, plan.view(), scratch.view(), message, sizeof message));
  fdm_forward_args forward{};
  forward.struct_size = sizeof forward, forward.out = problem.out.view, forward.lse = problem.lse.view;
  scratch = workspace(FDM_PASS_FORWARD);
  check(pack.forward(&p, &forward, plan.view(), scratch.view(), message, sizeof message));
  fdm_backward_args backward{};
  backward.struct_size = sizeof backward, backward.out = problem.out.view, backward.lse = problem.lse.view;
  backward.dout = problem.dout.view, backward.dq = problem.dq.view, backward.dk = problem.dk.view;
  backward.dv = problem.dv.view, backward.dbias = problem.dbias.view;
  scratch = workspace(FDM_PASS_BACKWARD);
  check(pack.backward(&p, &backward, plan.view(), scratch.view(), message, sizeof message));
  compare(problem, "out", problem.out, expected.out);
  compare(problem, "lse", problem.lse, expected.lse);
  compare(problem, "dq", problem.dq, expected.dq);
  compare(problem, "dk", problem.dk, expected.dk);
  compare(problem, "dv", problem.dv, expected.dv);
  compare(problem, "dbias", problem.dbias, expected.dbias);
}

constexpr Sizes kSmall{1, 2, 1, 13, 37, 20}, kLarge{2, 4, 2, 100, 150, 64};
constexpr Case kCases[] = {
    {"no mask", kSmall, Mask::none, false, false, FDM_FLOAT32, 2e-5},
    {"causal", kLarge, Mask::none, true, false, FDM_FLOAT32, 2e-5},
    {"key mask", kLarge, Mask::keys, false, false, FDM_FLOAT32, 2e-5},
    {"intervals", kLarge, Mask::intervals, true, false, FDM_FLOAT32, 2e-5},
    {"row mask", kLarge, Mask::rows, false, true, FDM_FLOAT32, 2e-5},
    {"bfloat16", kLarge, Mask::intervals, true, true, FDM_BFLOAT16, 2e-2},
};

} // namespace

int main(int count, char **words) {
  if (count != 3) fail("usage: driver PACK LEVEL");
  std::string reason;
  void *library = fdm::open_library(words[1], reason);
  if (library == nullptr) fail(reason);
  const auto function = reinterpret_cast<fdm_pack_function>(fdm::find_symbol(library, FDM_PACK_SYMBOL));
  if (function == nullptr) fail("the library is no kernel pack");
  const fdm_pack &pack = *function();
  std::printf("%s %s, built by %s, runs at %s\n", pack.name, pack.version, pack.compiler, pack.features);
  if (std::strcmp(pack.features, words[2]) != 0) fail(std::string("it should run at ") + words[2]);
  for (const Case &c : kCases) run(pack, c);
  std::puts("driver: passed");
  return 0;
}
