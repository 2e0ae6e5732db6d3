// SPDX-License-Identifier: BSD-3-Clause
// The table of the cpu pack.
#include "../pack_entries.h"
#include "columns.h"
#include "kernels.h"
#include "passes.h"

namespace fdm::cpu {

std::string CpuPack::describe(const fdm_problem &p, const fdm_selection *s, const fdm_forward_args *forward,
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
bool CpuPack::is_filled(const fdm_problem &p, const void *plan) {
  const int64_t rows = tile_rows(p, plan);
  return rows >= kMinTileRows && rows <= kMaxTileRows && (rows & (rows - 1)) == 0;
}

void CpuPack::select_and_plan(const fdm_selection &s, const fdm_problem &p, void *plan, void *workspace) {
  select(s, workspace);
  CpuPack::plan(p, plan, workspace);
}

namespace {

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
