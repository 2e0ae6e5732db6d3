// SPDX-License-Identifier: BSD-3-Clause
// The table of the cpu pack.
#include "../pack_entries.h"
#include "columns.h"
#include "forgetting.h"
#include "kernels.h"
#include "passes.h"
#include "plan.h"
#include "selection.h"

namespace fdm::cpu {
namespace {

struct CpuPack {
  static constexpr PackLimits kLimits{256, 1u << FDM_FLOAT32 | 1u << FDM_FLOAT16 | 1u << FDM_BFLOAT16,
                                      1u << FDM_FLOAT64};

  static constexpr fdm_key_mass_biases kKeyMassBiases = FDM_KEY_MASS_ALL;
  static constexpr fdm_lists kKeyLists = FDM_LISTS_IN_ORDER;

  static fdm_plan_layout plan_layout(fdm_mask_kind kind) { return cpu::plan_layout(kind); }
  static int64_t plan_bytes(const fdm_problem &p) { return cpu::plan_bytes(p); }
  static int64_t plan_workspace_bytes(const fdm_problem &p) { return cpu::plan_workspace_bytes(p); }
  static int64_t forward_workspace_bytes(const fdm_problem &p) { return cpu::forward_workspace_bytes(p); }
  static int64_t backward_workspace_bytes(const fdm_problem &p) { return cpu::backward_workspace_bytes(p); }
  static int64_t key_mass_workspace_bytes(const fdm_problem &p) { return cpu::key_mass_workspace_bytes(p); }
  static int64_t selection_workspace_bytes(const fdm_selection &s) { return cpu::selection_workspace_bytes(s); }
  static int64_t forget_workspace_bytes(const fdm_forgetting &f) { return cpu::forget_workspace_bytes(f); }

  static std::string describe(const fdm_problem &p, const fdm_selection *s, const fdm_forward_args *forward,
                              const fdm_backward_args *backward) {
    std::string json = "{";
    const auto add = [&](const char *pass, const char *kernel, int64_t plan, int64_t workspace) {
      json += (json.size() > 1 ? ", \"" : "\"") + std::string(pass) + "\": {\"kernel\": \"" + kernel + "\"";
      if (plan > 0) json += ", \"plan_bytes\": " + std::to_string(plan);
      if (workspace > 0) json += ", \"workspace_bytes\": " + std::to_string(workspace);
      json += "}";
    };
    if (s) add("selection", present(s->start) ? "heap" : "keep", 0, selection_workspace_bytes(*s));
    if (plan_bytes(p) > 0) add("plan", "columns of tiles", plan_bytes(p), plan_workspace_bytes(p));
    if (forward) add("forward", best_kernels().name, 0, forward_workspace_bytes(p));
    if (backward) add("backward", best_kernels().name, 0, backward_workspace_bytes(p));
    return json + "}";
  }

  // An unwritten plan may hold 0 tile rows, by which the passes would divide.
  static bool is_filled(const fdm_problem &p, const void *plan) {
    const int64_t rows = tile_rows(p, plan);
    return rows >= kMinTileRows && rows <= kMaxTileRows && (rows & (rows - 1)) == 0;
  }

  template <class Work> static int32_t run(const fdm_context &, const Message &message, const Work &work) {
    return run_guarded(message, [&] {
      work();
      return FDM_OK;
    });
  }

  static void plan(const fdm_problem &p, void *plan, void *workspace) { make_plan(p, plan, workspace); }
  static void forward(const fdm_problem &p, const fdm_forward_args &args, const void *plan, void *workspace) {
    forward_pass(p, args, plan, workspace);
  }
  static void backward(const fdm_problem &p, const fdm_backward_args &args, const void *plan, void *workspace) {
    backward_pass(p, args, plan, workspace);
  }
  static void key_mass(const fdm_problem &p, const fdm_key_mass_args &args, const void *plan, void *workspace) {
    key_mass_pass(p, args, plan, workspace);
  }
  static void select(const fdm_selection &s, void *workspace) { select_keys(s, workspace); }
  static void select_and_plan(const fdm_selection &s, const fdm_problem &p, void *plan, void *workspace) {
    select_keys(s, workspace);
    make_plan(p, plan, workspace);
  }
  static void forget(const fdm_forgetting &f, void *workspace) { forget_pass(f, workspace); }
  static void forget_backward(const fdm_forgetting &f, void *) { forget_backward_pass(f); }
};

#if defined(__clang__)
constexpr char kCompiler[] = "clang " __clang_version__;
#else
constexpr char kCompiler[] = "gcc " __VERSION__;
#endif

fdm_pack make_table() {
  fdm_pack table = PackEntries<CpuPack>::table();
  table.name = "cpu";
  table.compiler = kCompiler;
  table.features = best_kernels().name;
  table.device_type = FDM_CPU;
  return table;
}

} // namespace
} // namespace fdm::cpu

extern "C" FDM_PACK_EXPORT const fdm_pack *flash_dmattn_pack(void) {
  static const fdm_pack table = fdm::cpu::make_table();
  return &table;
}
