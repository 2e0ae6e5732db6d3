// SPDX-License-Identifier: BSD-3-Clause
// The members of the pack that ../pack_entries.h describes. Each source file defines those of its pass, and
// distributes their work over threads.
#pragma once

#include <string>

#include "../pack_calls.h"

namespace fdm::cpu {

struct CpuPack {
  static constexpr PackLimits kLimits{256, 1u << FDM_FLOAT32 | 1u << FDM_FLOAT16 | 1u << FDM_BFLOAT16,
                                      1u << FDM_FLOAT64};
  static constexpr fdm_key_mass_biases kKeyMassBiases = FDM_KEY_MASS_ALL;
  static constexpr fdm_lists kKeyLists = FDM_LISTS_IN_ORDER;
  static constexpr bool kPlansBlocks = false;

  static std::string describe(const fdm_problem &p, const fdm_selection *s, const fdm_forward_args *forward,
                              const fdm_backward_args *backward);
  static bool is_filled(const fdm_problem &p, const void *plan);
  template <class Work> static int32_t run(const fdm_context &, const Message &message, const Work &work) {
    return run_guarded(message, [&] {
      work();
      return FDM_OK;
    });
  }

  static fdm_plan_layout plan_layout(fdm_mask_kind kind);
  static int64_t plan_bytes(const fdm_problem &p);
  static int64_t plan_workspace_bytes(const fdm_problem &p);
  static void plan(const fdm_problem &p, void *plan, void *workspace);

  static int64_t forward_workspace_bytes(const fdm_problem &p);
  static void forward(const fdm_problem &p, const fdm_forward_args &args, const void *plan, void *workspace);

  static int64_t backward_workspace_bytes(const fdm_problem &p);
  static void backward(const fdm_problem &p, const fdm_backward_args &args, const void *plan, void *workspace);

  static int64_t key_mass_workspace_bytes(const fdm_problem &p);
  static void key_mass(const fdm_problem &p, const fdm_key_mass_args &args, const void *plan, void *workspace);

  static int64_t selection_workspace_bytes(const fdm_selection &s);
  static void select(const fdm_selection &s, void *workspace);
  static void select_and_plan(const fdm_selection &s, const fdm_problem &p, void *plan, void *workspace);

  static int64_t forget_workspace_bytes(const fdm_forgetting &f);
  static void forget(const fdm_forgetting &f, void *workspace);
  static void forget_backward(const fdm_forgetting &f, void *workspace);
};

} // namespace fdm::cpu
