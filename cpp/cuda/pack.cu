// SPDX-License-Identifier: BSD-3-Clause
// The table of a CUDA pack: checks what a caller could get wrong about memory and devices, then enqueues the work.
#include <cuda_runtime_api.h>

#include "../pack_calls.h"
#include "backward/backward.h"
#include "forward/forward.h"
#include "host/dispatch.h"
#include "plan/make_plan.h"
#include "plan/plan.cuh"
#include "select/select.h"

namespace fdm::cuda {
namespace {

constexpr PackLimits kLimits{kMaxHeadDim, 1u << FDM_FLOAT16 | 1u << FDM_BFLOAT16};

int64_t plan_bytes(const fdm_problem &p) {
  if (mask_kind(p) == FDM_MASK_NONE) return 0;
  int64_t bytes;
  lay_out_plan(p, nullptr, &bytes);
  return bytes;
}

int64_t workspace_needed(const fdm_problem &p, int32_t pass) {
  switch (pass) {
  case FDM_PASS_PLAN:
    return plan_workspace_bytes(p);
  case FDM_PASS_FORWARD:
    return forward_workspace_bytes(p);
  default:
    return backward_workspace_bytes(p);
  }
}

// Makes a device current, and the one that was so again at the end. Each static runtime has its own current device.
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

template <class Work> int32_t enqueue(const fdm_context &context, const Message &message, const Work &work) {
  return run_guarded(message, [&] {
    const DeviceGuard guard(context.device);
    cudaError_t error = guard.error();
    if (!error) error = work();
    if (!error) return int32_t(FDM_OK);
    return message.fail(FDM_DEVICE_ERROR, "device %d: %s (%s)", context.device, cudaGetErrorString(error),
                        cudaGetErrorName(error));
  });
}

template <class Work>
int32_t run(const fdm_problem *p, int32_t pass, fdm_buffer plan, fdm_buffer workspace, const Message &message,
            const Work &work) {
  if (int32_t status = check_problem(p, kLimits, message)) return status;
  if (int32_t status = check_buffer("plan", plan, plan_bytes(*p), message)) return status;
  if (int32_t status = check_buffer("workspace", workspace, workspace_needed(*p, pass), message)) return status;
  return enqueue(p->context, message, work);
}

int32_t workspace_bytes(const fdm_problem *p, int32_t pass, int64_t *bytes, char *text, size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_problem(p, kLimits, message)) return status;
  *bytes = workspace_needed(*p, pass);
  return FDM_OK;
}

int32_t plan(const fdm_problem *p, fdm_buffer plan, fdm_buffer workspace, char *text, size_t text_bytes) {
  return run(p, FDM_PASS_PLAN, plan, workspace, {text, text_bytes},
             [&] { return make_plan(*p, plan.data, workspace.data, static_cast<cudaStream_t>(p->context.stream)); });
}

int32_t forward(const fdm_problem *p, const fdm_forward_args *args, fdm_buffer plan, fdm_buffer workspace, char *text,
                size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_args(args, "fdm_forward_args", message)) return status;
  return run(p, FDM_PASS_FORWARD, plan, workspace, message,
             [&] { return run_forward(*p, *args, plan.data, workspace.data); });
}

int32_t backward(const fdm_problem *p, const fdm_backward_args *args, fdm_buffer plan, fdm_buffer workspace, char *text,
                 size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_args(args, "fdm_backward_args", message)) return status;
  if (p && present(p->block_table)) return message.fail(FDM_UNSUPPORTED, "paged keys have no backward pass");
  return run(p, FDM_PASS_BACKWARD, plan, workspace, message,
             [&] { return run_backward(*p, *args, plan.data, workspace.data); });
}

int32_t select_workspace(const fdm_selection *s, int64_t *bytes, char *text, size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_selection(s, message)) return status;
  *bytes = selection_workspace_bytes(*s);
  return FDM_OK;
}

int32_t select(const fdm_selection *s, fdm_buffer workspace, char *text, size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_selection(s, message)) return status;
  if (int32_t status = check_buffer("workspace", workspace, selection_workspace_bytes(*s), message)) return status;
  return enqueue(s->context, message,
                 [&] { return select_keys(*s, workspace.data, static_cast<cudaStream_t>(s->context.stream)); });
}

#define FDM_TEXT_OF(x) #x
#define FDM_TEXT(x) FDM_TEXT_OF(x)

fdm_pack make_table() {
  fdm_pack table{};
  table.abi_version = FDM_PACK_ABI_VERSION;
  table.struct_size = sizeof(fdm_pack);
  table.name = FDM_PACK_NAME;
  table.version = FDM_VERSION;
  table.compiler = "nvcc " FDM_TEXT(__CUDACC_VER_MAJOR__) "." FDM_TEXT(__CUDACC_VER_MINOR__) "." FDM_TEXT(
      __CUDACC_VER_BUILD__) ", gcc " __VERSION__;
  table.features = FDM_TILE_ARCH == 90 ? "wgmma, mma.sync" : "mma.sync";
  table.device_type = FDM_CUDA;
  table.cuda_version = __CUDACC_VER_MAJOR__ * 1000 + __CUDACC_VER_MINOR__ * 10;
  table.arch = FDM_ARCH;
  table.max_head_dim = kLimits.max_head_dim;
  table.dtypes = kLimits.dtypes;
  for (int kind = 0; kind < FDM_MASK_KIND_COUNT; ++kind) table.plan_layouts[kind] = plan_layout(fdm_mask_kind(kind));
  table.workspace_bytes = workspace_bytes;
  table.plan = plan;
  table.forward = forward;
  table.backward = backward;
  table.selection_workspace_bytes = select_workspace;
  table.select = select;
  return table;
}

} // namespace
} // namespace fdm::cuda

extern "C" __attribute__((visibility("default"))) const fdm_pack *flash_dmattn_pack(void) {
  static const fdm_pack table = fdm::cuda::make_table();
  return &table;
}
