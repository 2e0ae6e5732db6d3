// SPDX-License-Identifier: BSD-3-Clause
// The table of a CUDA pack. It enqueues work on the stream of a call.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "../pack_entries.h"
#include "backward/backward.h"
#include "forward/forward.h"
#include "gates/gates.h"
#include "host/facts.h"
#include "host/launch_counts.h"
#include "host/way_counts.h"
#include "lists/lists.h"
#include "pair_bias/pair_bias.h"
#include "plan/make_plan.h"
#include "plan/plan.cuh"
#include "route/describe.h"
#include "route/gate_route.h"
#include "select/select.h"

namespace fdm::cuda {
namespace {

// Makes a device current, and restores the previous one at the end. Each static runtime has its own current device.
class DeviceGuard {
public:
  explicit DeviceGuard(int device) {
    error_ = cudaGetDevice(&before_);
    if (!error_ && before_ != device) error_ = cudaSetDevice(device);
    changed_ = !error_ && before_ != device;
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard &) = delete;
  DeviceGuard &operator=(const DeviceGuard &) = delete;
  cudaError_t error() const { return error_; }

private:
  int before_ = 0;
  bool changed_ = false;
  cudaError_t error_;
};

// The largest head dimension with instantiations for narrower values; 0: none.
template <int... kDims> constexpr int32_t narrow_head_dim(HeadDims<kDims...>) {
  int32_t largest = 0;
  for (const int dim : {kDims...})
    if (FDM_TILE_ARCH == 90 && narrow_value_dim(dim) > 0) largest = dim;
  return largest;
}

struct CudaPack {
  static constexpr int32_t kNarrowHeadDim = narrow_head_dim(InstantiatedHeadDims{});
  static constexpr PackLimits kLimits{kMaxHeadDim,    1u << FDM_FLOAT16 | 1u << FDM_BFLOAT16, 1u << FDM_FLOAT64, 16,
                                      kNarrowHeadDim, narrow_value_dim(kNarrowHeadDim)};

  static constexpr fdm_key_mass_biases kKeyMassBiases = FDM_KEY_MASS_KEYS;
  static constexpr fdm_lists kKeyLists = FDM_LISTS_ANY_ORDER;
  static constexpr bool kPlansBlocks = true;

  static fdm_plan_layout plan_layout(fdm_mask_kind kind) { return cuda::plan_layout(kind); }
  static int64_t plan_bytes(const fdm_problem &p) { return plan_route(p, any_device(built_for())).plan_bytes; }
  static int64_t block_plan_bytes(const fdm_problem &p, const fdm_mask_blocks &blocks) {
    return block_plan_route(p, blocks, any_device(built_for())).plan_bytes;
  }
  // Sizes for any device, which a caller may not know yet.
  static int64_t plan_workspace_bytes(const fdm_problem &p) {
    return plan_route(p, any_device(built_for())).workspace_bytes;
  }
  static int64_t forward_workspace_bytes(const fdm_problem &p) {
    return has_key_lists(p) ? 0 : forward_workspace(p, any_device(built_for()));
  }
  static int64_t backward_workspace_bytes(const fdm_problem &p) {
    const DeviceFacts any = any_device(built_for());
    return has_key_lists(p) ? list_backward_route(p, any, input_alignment(p)).workspace_bytes
                            : backward_workspace(p, any);
  }
  static int64_t key_mass_workspace_bytes(const fdm_problem &p) {
    return key_mass_workspace(p, any_device(built_for()));
  }
  static int64_t selection_workspace_bytes(const fdm_selection &s) { return cuda::selection_workspace_bytes(s); }
  static int64_t forget_workspace_bytes(const fdm_forgetting &f) { return gate_route(f).workspace_bytes; }

  static std::string describe(const fdm_problem &p, const fdm_selection *s, const fdm_forward_args *forward,
                              const fdm_backward_args *backward) {
    DeviceFacts device;
    if (cudaError_t error = device_facts(p.context.device, &device))
      throw std::runtime_error(cudaGetErrorString(error));
    PlanRoute plan = plan_route(p, device);
    std::string json = "{";
    if (s) {
      const SelectionRoute selection = selection_route(*s, present(s->start) ? &p : nullptr, device);
      if (selection.kernel == SelectionKernel::list) plan.launches = {}; // it also makes the plan
      json += "\"selection\": " + cuda::describe(selection) + ", ";
    }
    json += "\"plan\": " + cuda::describe(plan);
    if (forward)
      json +=
          ", \"forward\": " + cuda::describe(forward_route(p, device, forward_alignment(p, *forward), forward->splits));
    if (backward)
      json += ", \"backward\": " + cuda::describe(backward_route(p, device, backward_alignment(p, *backward),
                                                                 requested_gradients(*backward)));
    return json + "}";
  }

  // The host does not read device memory.
  static bool is_filled(const fdm_problem &, const void *) { return true; }

  template <class Work> static int32_t run(const fdm_context &context, const Message &message, const Work &work) {
    return run_guarded(message, [&] {
      const DeviceGuard guard(context.device);
      cudaError_t error = guard.error();
      if (!error) error = work();
      if (!error) return int32_t(FDM_OK);
      return message.fail(FDM_DEVICE_ERROR, "device %d: %s (%s)", context.device, cudaGetErrorString(error),
                          cudaGetErrorName(error));
    });
  }

  // Calls `work` with the facts of the tensors' device.
  template <class Work> static cudaError_t with_facts(const fdm_problem &p, const Work &work) {
    DeviceFacts facts;
    if (cudaError_t error = device_facts(p.context.device, &facts)) return error;
    return work(facts);
  }

  static cudaError_t plan(const fdm_problem &p, void *plan, void *workspace) {
    const auto stream = static_cast<cudaStream_t>(p.context.stream);
    return make_plan(p, plan_of(p, plan), any_device(built_for()), workspace, stream);
  }
  static cudaError_t plan_blocks(const fdm_problem &p, const fdm_mask_blocks &blocks, void *plan) {
    const auto stream = static_cast<cudaStream_t>(p.context.stream);
    const PlanRoute route = block_plan_route(p, blocks, any_device(built_for()));
    return launch_block_lists(p, blocks, plan_of(p, plan), route, stream);
  }
  static cudaError_t forward(const fdm_problem &p, const fdm_forward_args &args, const void *plan, void *workspace) {
    return with_facts(p, [&](const DeviceFacts &facts) {
      return has_key_lists(p) ? run_list_forward(p, args, facts) : run_forward(p, args, facts, plan, workspace);
    });
  }
  static cudaError_t backward(const fdm_problem &p, const fdm_backward_args &args, const void *plan, void *workspace) {
    return with_facts(p, [&](const DeviceFacts &facts) {
      return has_key_lists(p) ? run_list_backward(p, args, facts, workspace)
                              : run_backward(p, args, facts, plan, workspace);
    });
  }
  static cudaError_t key_mass(const fdm_problem &p, const fdm_key_mass_args &args, const void *plan, void *workspace) {
    return with_facts(p, [&](const DeviceFacts &facts) { return run_key_mass(p, args, facts, plan, workspace); });
  }
  static cudaError_t select(const fdm_selection &s, void *workspace) {
    return select_keys(s, workspace, static_cast<cudaStream_t>(s.context.stream));
  }
  static cudaError_t select_and_plan(const fdm_selection &s, const fdm_problem &p, void *plan_base, void *workspace) {
    const auto stream = static_cast<cudaStream_t>(s.context.stream);
    const SelectionRoute route = selection_route(s, &p, any_device(built_for()));
    if (route.kernel == SelectionKernel::list) return launch_short_lists(s, p, plan_of(p, plan_base), route, stream);
    if (cudaError_t error = select(s, workspace)) return error;
    return plan(p, plan_base, workspace);
  }
  static cudaError_t forget(const fdm_forgetting &f, void *workspace) { return run_forget(f, workspace); }
  static cudaError_t forget_backward(const fdm_forgetting &f, void *workspace) {
    return run_forget_backward(f, workspace);
  }
};

#define FDM_TEXT_OF(x) #x
#define FDM_TEXT(x) FDM_TEXT_OF(x)

fdm_pack make_table() {
  fdm_pack table = PackEntries<CudaPack>::table();
  table.name = FDM_PACK_NAME;
  table.compiler = "nvcc " FDM_TEXT(__CUDACC_VER_MAJOR__) "." FDM_TEXT(__CUDACC_VER_MINOR__) "." FDM_TEXT(
      __CUDACC_VER_BUILD__) ", gcc " __VERSION__;
  table.features = FDM_TILE_ARCH == 90 ? "wgmma, mma.sync" : "mma.sync";
  table.device_type = FDM_CUDA;
  table.cuda_version = __CUDACC_VER_MAJOR__ * 1000 + __CUDACC_VER_MINOR__ * 10;
  table.arch = FDM_ARCH;
  table.wants_out_rest = 1;
  table.launch_counts = [](fdm_launch_count *counts, int32_t room) {
    const int32_t kernels = launch_counts.read(counts, room);
    return kernels + route_counts.read(counts + std::min(kernels, room), std::max(room - kernels, 0));
  };
  return table;
}

} // namespace
} // namespace fdm::cuda

extern "C" FDM_PACK_EXPORT const fdm_pack *flash_dmattn_pack(void) {
  static const fdm_pack table = fdm::cuda::make_table();
  return &table;
}
