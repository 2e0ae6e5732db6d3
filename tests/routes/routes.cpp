// SPDX-License-Identifier: BSD-3-Clause
// Routes of problems for tests without a GPU: tests/routes/library.py compiles this with the sources of
// cpp/cuda/route for the CPU, with the tables of all architectures.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <random>
#include <string>
#include <vector>

#include "cuda/route/describe.h"
#include "cuda/route/workspaces.h"

namespace {

using namespace fdm;
using namespace fdm::cuda;

// A problem; all tensors are contiguous except as `odd` says. tests/routes/library.py has the same fields.
struct Spec {
  int64_t sms, batch, heads, kv_heads, head_dim, queries, keys;
  int64_t causal, deterministic, forward_only, softcap, sink, splits;
  int64_t mask, mask_batch, mask_heads, max_kept; // mask: fdm_mask_kind
  int64_t keeps_runs;
  int64_t bias, bias_batch, bias_heads, float32; // bias: 0 none, 1 of keys, 2 of rows
  int64_t float64;                               // whether the bias of keys is float64
  int64_t rows, total_keys, page;                // packed: totals over `batch` sequences; page: keys of a page
  int64_t odd;                                   // bits of Odd: tensors with another layout
  int64_t unwanted;                              // bits of gradients not needed: dq, dk, dv, dbias, dsink
  int64_t missing;                               // bits: head dimensions without kernels in the pack
  int64_t value_dim;                             // 0: same as head_dim
  int64_t blocks;                                // whether a mask of rows is one of blocks
};
enum Odd { kInputs = 1, kOut = 2, kDout = 4, kGradients = 8, kMaps = 16, kChunks = 32, kFarRows = 64, kGaps = 128 };

// The kernels of a pack with all head dimensions except those in the bits of `missing`, as in
// cmake/generate_kernels.py.
BuiltFor built_for(int arch, int64_t missing) {
  BuiltFor built{arch, {}, {}, {}, {}, {}};
  const auto add = [](HeadDimList &list, int dim) { list.dims[list.count++] = dim; };
  // The largest also serves all smaller ones.
  const auto add_largest = [&](HeadDimList &list, int largest) {
    for (int n = built.all.count - 1; n >= 0; --n) {
      if (built.all.dims[n] > largest) continue;
      if (list.max() != built.all.dims[n]) add(list, built.all.dims[n]);
      return;
    }
  };
  int64_t bit = 1;
  for (int dim : {32, 64, 96, 128, 192, 256}) {
    const bool there = (missing & bit) == 0;
    bit *= 2;
    if (!there) continue;
    add(built.all, dim);
    if (dim == 64 || dim == 128 || dim == 256) add(built.rare, dim);
    if (dim <= 128 && dim != 96) {
      add(built.pair_bias, dim);
      add(built.pair_bias_sm90, dim);
    }
    if (dim == 64 || dim == 128) add(built.direct, dim);
  }
  add_largest(built.rare, 256);
  add_largest(built.pair_bias, 128);
  return built;
}

fdm_tensor tensor(int64_t a, int64_t b, int64_t c, int64_t d, int dtype, bool odd) {
  fdm_tensor t{};
  const int64_t shape[4] = {a, b, c, d};
  std::memcpy(t.shape, shape, sizeof shape);
  t.stride[3] = 1;
  for (int n = 2; n >= 0; --n) t.stride[n] = t.stride[n + 1] * t.shape[n + 1];
  t.data = reinterpret_cast<void *>(uintptr_t(1 << 20) + (odd ? 2 : 0)); // nothing reads it
  t.dtype = dtype;
  return t;
}

struct Call {
  fdm_problem p{};
  fdm_forward_args forward{};
  fdm_backward_args backward{};
  fdm_selection selection{};

  explicit Call(const Spec &s) {
    const bool packed = s.rows > 0;
    const int dtype = FDM_BFLOAT16, bias_dtype = s.float64 ? FDM_FLOAT64 : s.float32 ? FDM_FLOAT32 : FDM_BFLOAT16;
    const int64_t batch = packed ? 1 : s.batch, rows = packed ? s.rows : s.queries,
                  keys = packed ? s.total_keys : s.keys;
    const auto has = [&](int bit) { return (s.odd & bit) != 0; };
    p.batch = s.batch, p.heads = s.heads, p.kv_heads = s.kv_heads, p.head_dim = s.head_dim;
    p.queries = s.queries, p.keys = s.keys, p.max_kept = s.max_kept;
    p.softcap = s.softcap ? 20.0f : 0.0f;
    p.flags = uint32_t((s.causal ? FDM_CAUSAL : 0) | (s.deterministic ? FDM_DETERMINISTIC : 0) |
                       (s.forward_only ? FDM_FORWARD_ONLY : 0) | (s.keeps_runs ? FDM_KEEPS_RUNS : 0));
    p.q = tensor(batch, rows, s.heads, s.head_dim, dtype, has(kInputs));
    p.k = p.v = s.page ? tensor(keys / s.page + s.batch, s.page, s.kv_heads, s.head_dim, dtype, false)
                       : tensor(batch, keys, s.kv_heads, s.head_dim, dtype, false);
    const int64_t value_dim = s.value_dim ? s.value_dim : s.head_dim;
    p.v.shape[3] = value_dim;
    if (has(kFarRows)) p.k.stride[1] = int64_t(1) << 31;
    if (packed) p.cu_seqlens_q = p.cu_seqlens_k = tensor(s.batch + 1, 1, 1, 1, FDM_INT32, false);
    if (packed && s.rows != s.total_keys) p.cu_seqlens_k.data = &p;
    if (s.page) p.block_table = tensor(s.batch, s.keys / s.page + 1, 1, 1, FDM_INT32, false);
    const auto heads_of = [&](int64_t which) { return which == 0 ? 1 : which == 1 ? s.kv_heads : s.heads; };
    const int64_t mask_batch = s.mask_batch ? batch : 1, bias_batch = s.bias_batch ? batch : 1;
    if (s.mask == FDM_MASK_KEYS) p.mask = tensor(mask_batch, heads_of(s.mask_heads), 1, keys, FDM_BOOL, has(kChunks));
    if (s.mask == FDM_MASK_ROWS)
      p.mask = tensor(mask_batch, heads_of(s.mask_heads), rows, s.keys, s.blocks ? FDM_INT32 : FDM_BOOL, has(kChunks));
    if (s.mask == FDM_MASK_INTERVALS)
      p.start = p.end = tensor(mask_batch, heads_of(s.mask_heads), 1, keys, FDM_INT32, false);
    if (s.bias) {
      p.bias = tensor(bias_batch, heads_of(s.bias_heads), s.bias == 2 ? rows : 1, s.bias == 2 ? s.keys : keys,
                      bias_dtype, has(kChunks));
    }
    if (s.sink) p.sink = tensor(s.heads, 1, 1, 1, FDM_FLOAT32, false);
    forward.out = tensor(batch, rows, s.heads, value_dim, dtype, has(kOut));
    forward.lse = tensor(batch, s.heads, rows, 1, FDM_FLOAT32, false);
    forward.splits = int32_t(s.splits);
    backward.out = forward.out;
    backward.lse = forward.lse;
    backward.dout = tensor(batch, rows, s.heads, value_dim, dtype, has(kDout));
    const auto wants = [&](int bit) { return (s.unwanted >> bit & 1) == 0; };
    const auto gradient = [&](const fdm_tensor &t) {
      fdm_tensor own = tensor(t.shape[0], t.shape[1], t.shape[2], t.shape[3], dtype, has(kGradients));
      if (has(kGaps)) own.stride[0] += 8;
      return own;
    };
    if (wants(0)) backward.dq = gradient(p.q);
    if (wants(1)) backward.dk = gradient(p.k);
    if (wants(2)) backward.dv = gradient(p.v);
    if (wants(3) && s.bias) backward.dbias = p.bias;
    if (wants(4) && s.sink) backward.dsink = p.sink;
    selection.flags = p.flags & FDM_CAUSAL;
    selection.batch = s.batch, selection.heads = s.heads, selection.kv_heads = s.kv_heads;
    selection.queries = s.queries, selection.keys = s.keys;
    selection.start = p.start, selection.end = p.end;
    selection.cu_seqlens_q = p.cu_seqlens_q, selection.cu_seqlens_k = p.cu_seqlens_k;
    // Without intervals, the selection by a bias gives booleans.
    if (!has_intervals(p)) selection.bias = p.bias, selection.mask = p.mask;
    selection.window = s.max_kept > 0 ? s.max_kept : std::max<int64_t>(1, s.keys / 64);
    selection.keep_last = s.sink ? s.keys / 128 : 0;
  }

  Alignment forward_lies(const Spec &s) const {
    Alignment lies = forward_alignment(p, forward);
    lies.row_maps = (s.odd & kMaps) == 0;
    return lies;
  }
};

// The routes of a problem, by pass.
struct Routes {
  const Call call;
  const BuiltFor built;
  const DeviceFacts device;
  const Spec &spec;
  bool differentiable;

  Routes(const Spec &s, int arch, const RouteTable &table)
      : call(s), built(built_for(arch, s.missing)), device{&built, &table, int(s.sms)}, spec(s),
        differentiable(s.page == 0) {}

  ForwardRoute forward() const { return forward_route(call.p, device, call.forward_lies(spec), spec.splits); }
  BackwardRoute backward() const {
    return backward_route(call.p, device, backward_alignment(call.p, call.backward),
                          requested_gradients(call.backward));
  }
  std::string of(int pass) const {
    switch (pass) {
    case 0:
      return describe(plan_route(call.p, device));
    case 1:
      return describe(forward());
    case 2:
      return differentiable ? describe(backward()) : "{}";
    default:
      if (!present(call.selection.start) && (!present(call.selection.bias) || spec.float64)) return "{}";
      return describe(selection_route(call.selection, nullptr, device));
    }
  }
  // For any device with at most as many SMs.
  int64_t room(int pass) const {
    return pass == 1 ? forward_workspace(call.p, device) : differentiable ? backward_workspace(call.p, device) : 0;
  }
  int64_t used(int pass) const {
    return pass == 1 ? forward().workspace_bytes : differentiable ? backward().workspace_bytes : 0;
  }
};

// The topic of drawn problems.
enum Focus { kAnything, kOneQuery, kIntervals, kRowBias, kNoMask };

// Draws problems with sizes near the constants of a table, or near multiples and fractions of them.
class Draws {
public:
  Draws(int64_t seed, const RouteTable &table) : random_(uint64_t(seed)) {
    const auto *values = reinterpret_cast<const int64_t *>(&table);
    for (size_t n = 0; n < sizeof table / sizeof *values; ++n)
      if (values[n] > 0 && values[n] <= 1 << 17) sizes_.push_back(values[n]);
  }

  Spec draw(int focus) {
    Spec s{};
    s.sms = pick({132, 132, 78, 16, 108});
    s.kv_heads = pick({1, 1, 2, 3, 4, 8, 16});
    s.heads = s.kv_heads * pick({1, 1, 1, 2, 2, 3, 4, 5, 7, 8, 16});
    s.batch = chance(3) ? 1 : chance(4) ? number(1, 600) : number(1, 40);
    s.head_dim = pick({8, 24, 32, 33, 40, 64, 64, 64, 65, 72, 96, 128, 128, 129, 136, 160, 192, 256});
    s.queries = chance(3) ? pick({1, 1, 1, 1, 2, 8, 15, 16, 17}) : size();
    s.keys = chance(2) ? s.queries : size();
    s.causal = chance(2);
    s.deterministic = chance(4);
    s.forward_only = chance(3);
    s.softcap = chance(12);
    s.sink = chance(12);
    s.splits = chance(12) ? number(1, 40) : 0;
    s.mask = pick({0, 0, 0, 1, 2, 2, 2, 3});
    s.mask_batch = chance(2);
    s.mask_heads = pick({0, 1, 1, 2});
    if (s.mask == FDM_MASK_INTERVALS && !chance(5))
      s.max_kept = chance(2) ? size() : std::max<int64_t>(1, s.keys / number(1, 17));
    s.bias = pick({0, 0, 1, 2, 2});
    s.bias_batch = chance(2);
    s.bias_heads = pick({0, 1, 2});
    s.float32 = chance(2);
    if (focus == kOneQuery) {
      s.queries = 1;
      s.keys = size() * pick({1, 1, 16, 128});
      s.batch = number(1, 20);
      s.bias = number(0, 1);
      s.mask = number(0, 1);
      s.max_kept = 0;
    } else if (focus == kIntervals) {
      s.mask = FDM_MASK_INTERVALS;
      s.max_kept = chance(2) ? size() : std::max<int64_t>(1, s.keys / number(1, 17));
      s.queries = s.keys = chance(4) ? number(1 << 16, 1 << 19) : s.keys;
      s.bias = number(0, 1);
      s.deterministic = chance(8);
      s.mask_heads = s.bias_heads = number(0, 1);
    } else if (focus == kRowBias) {
      s.bias = 2;
      s.mask = pick({0, 0, 3});
      s.mask_batch = s.bias_batch = chance(3);
      s.deterministic = s.sink = 0;
      s.max_kept = 0;
      s.head_dim = pick({32, 32, 64, 64, 128});
      if (chance(2)) s.queries = s.keys = 16 * number(2, 300);
      if (chance(3)) s.queries = s.keys = number(40, 70), s.kv_heads = s.heads, s.batch = number(1, 1200);
      if (chance(6))
        s.queries = number(17, 64), s.keys = 64 * number(30, 900), s.batch = number(2, 4), s.bias_batch = 0;
    } else if (focus == kNoMask) {
      s.mask = FDM_MASK_NONE;
      s.bias = number(0, 1);
      s.max_kept = 0;
      s.head_dim = pick({32, 64, 64, 96, 128});
      if (chance(2)) s.kv_heads = s.heads;
      if (chance(2)) s.queries = s.keys = 64 * number(1, 40);
    }
    if (chance(8) && s.bias != 2) {
      s.rows = s.queries * s.batch - number(0, s.queries * (s.batch - 1));
      s.total_keys = s.keys == s.queries ? s.rows : s.keys * s.batch;
      s.page = chance(5) ? pick({16, 64, 256}) : 0;
    }
    if (chance(8)) s.odd = int64_t(1) << number(0, 7);
    if (chance(8)) s.unwanted = number(0, 31);
    // Other calls copy rows that kernels cannot read.
    if (!s.forward_only || (s.queries > kAnyRowQueries && s.page == 0)) {
      s.head_dim = round_up(s.head_dim, 8);
      s.odd &= ~int64_t(kInputs | kDout);
    }
    return s;
  }

private:
  std::mt19937_64 random_;
  std::vector<int64_t> sizes_;

  int64_t number(int64_t least, int64_t most) {
    return least >= most ? least : least + int64_t(random_() % uint64_t(most - least + 1));
  }
  bool chance(int64_t of) { return number(1, of) == 1; }
  int64_t pick(std::initializer_list<int64_t> list) { return list.begin()[number(0, int64_t(list.size()) - 1)]; }
  int64_t size() {
    const int64_t own = chance(2) ? sizes_[size_t(number(0, int64_t(sizes_.size()) - 1))] : number(1, 3000);
    const int64_t scaled = chance(2) ? own : chance(2) ? own * number(2, 4) : std::max<int64_t>(1, own / number(2, 8));
    return std::clamp<int64_t>(scaled + (chance(2) ? 0 : pick({-1, 1, 1, 16, -16})), 1, 1 << 17);
  }
};

} // namespace

extern "C" {

// The table of an architecture; `values` has one number for each field.
int route_table_of(int arch, int64_t *values) {
  std::memcpy(values, &route_table(arch), sizeof(RouteTable));
  return int(sizeof(RouteTable) / sizeof(int64_t));
}

// Writes the route of a pass for the constants in `values`, and returns its length.
int route_of(int arch, const int64_t *values, const Spec *spec, int pass, char *text, int room) {
  RouteTable table;
  std::memcpy(static_cast<void *>(&table), values, sizeof table);
  const std::string route = Routes(*spec, arch, table).of(pass);
  std::snprintf(text, size_t(room), "%s", route.c_str());
  return int(route.size());
}

// Writes the way of a call.
void way_of(int arch, const Spec *spec, int pass, char *text, int room) {
  const Routes routes(*spec, arch, route_table(arch));
  const std::string name = pass == 1 ? name_of_forward(forward_route_kind(routes.forward(), routes.call.p))
                                     : name_of_backward(backward_route_kind(routes.backward()));
  std::snprintf(text, size_t(room), "%s", name.c_str());
}

// The workspace bytes of a call for any device with at most that many SMs, and the bytes that its route uses.
int64_t workspace_room(int arch, const Spec *spec, int pass) {
  return Routes(*spec, arch, route_table(arch)).room(pass);
}
int64_t workspace_used(int arch, const Spec *spec, int pass) {
  return Routes(*spec, arch, route_table(arch)).used(pass);
}

void draw_spec(int arch, int64_t seed, Spec *spec) { *spec = Draws(seed, route_table(arch)).draw(int(seed % 5)); }

// Draws problems from seeds until a field's new value changes the route of any pass. Returns the pass, or -1.
int find_change(int arch, int field, int64_t value, int focus, int64_t first_seed, int64_t seeds, Spec *spec) {
  const RouteTable &own = route_table(arch);
  RouteTable changed = own;
  reinterpret_cast<int64_t *>(&changed)[field] = value;
  Draws draws(first_seed, own);
  for (int64_t n = 0; n < seeds; ++n) {
    *spec = draws.draw(focus);
    const Routes before(*spec, arch, own), after(*spec, arch, changed);
    for (int pass : {1, 2, 0, 3}) {
      const bool is_backward = pass > 1;
      if (!(is_backward && spec->forward_only) && before.of(pass) != after.of(pass)) return pass;
    }
  }
  return -1;
}

// Draws problems of contiguous tensors for a device with `sms` SMs until a pass takes the named way. `small_pairs`
// limits the rows x keys of two sequences with two KV heads; `elements` and `work` limit the whole problem. Returns
// whether one was found.
int find_way(int arch, int64_t sms, int pass, const char *name, int64_t seed, int64_t draws, double small_pairs,
             double elements, double work, Spec *spec) {
  Draws random(seed, route_table(arch));
  char text[1 << 10];
  for (int64_t n = 0; n < draws; ++n) {
    Spec s = random.draw(int(n % 5));
    s.sms = sms;
    s.odd = s.splits = s.rows = s.total_keys = s.page = s.unwanted = 0;
    const double heads = double(s.batch * s.heads), pairs = double(s.queries) * double(s.keys);
    const double few =
        double(std::min<int64_t>(s.batch, 2) * std::min<int64_t>(s.kv_heads, 2) * (s.heads / s.kv_heads));
    const double rows = double(s.queries + s.keys) * double(s.head_dim) + (s.bias == 2 || s.mask == 3 ? pairs : 0);
    if (few * pairs > small_pairs || heads * rows > elements || heads * pairs * double(s.head_dim + 16) > work)
      continue;
    way_of(arch, &s, pass, text, int(sizeof text));
    if (std::strcmp(text, name) != 0) continue;
    *spec = s;
    return 1;
  }
  return 0;
}

// Nanoseconds for the choice of the forward and the backward route.
double route_time(int arch, const Spec *spec, int pass, int repeats) {
  const Routes routes(*spec, arch, route_table(arch));
  const Call &call = routes.call;
  const RequestedGradients wanted = requested_gradients(call.backward);
  int64_t sum = 0;
  timespec begin, end;
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int n = 0; n < repeats; ++n) {
    if (pass == 1)
      sum += forward_route(call.p, routes.device, forward_alignment(call.p, call.forward), 0).blocks;
    else
      sum += backward_route(call.p, routes.device, backward_alignment(call.p, call.backward), wanted).workspace_bytes;
  }
  clock_gettime(CLOCK_MONOTONIC, &end);
  volatile int64_t kept = sum;
  (void)kept;
  return (double(end.tv_sec - begin.tv_sec) * 1e9 + double(end.tv_nsec - begin.tv_nsec)) / repeats;
}
}
