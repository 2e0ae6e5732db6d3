// SPDX-License-Identifier: BSD-3-Clause
// The table of the cpu pack: checks what a caller could get wrong about memory, then runs the passes.
#include "../pack.h"

#include <cstdio>
#include <new>

#include "kernels.h"
#include "passes.h"
#include "plan.h"
#include "selection.h"

namespace fdm::cpu {
namespace {

constexpr int32_t kMaxHeadDim = 256;
constexpr uint32_t kDtypes = 1u << FDM_FLOAT32 | 1u << FDM_FLOAT16 | 1u << FDM_BFLOAT16;

// A place for the message of a failed call.
struct Message {
  char *text;
  size_t bytes;

  template <class... Values> int32_t fail(fdm_status status, const char *format, Values... values) const {
    if (text && bytes) std::snprintf(text, bytes, format, values...);
    return status;
  }
};

int32_t check_problem(const fdm_problem *p, const Message &message) {
  if (!p || p->struct_size < sizeof(fdm_problem))
    return message.fail(FDM_INVALID_ARGUMENT, "fdm_problem has %u bytes, this pack was compiled with %zu",
                        p ? p->struct_size : 0u, sizeof(fdm_problem));
  if (p->head_dim < 1 || p->head_dim > kMaxHeadDim)
    return message.fail(FDM_UNSUPPORTED, "head dimension %lld is not in 1 ... %d", static_cast<long long>(p->head_dim),
                        kMaxHeadDim);
  if (p->q.dtype < 0 || p->q.dtype > 31 || !(kDtypes >> p->q.dtype & 1u))
    return message.fail(FDM_UNSUPPORTED, "dtype %d of q is not supported", p->q.dtype);
  if (p->kv_heads < 1 || p->heads % p->kv_heads != 0)
    return message.fail(FDM_INVALID_ARGUMENT, "%lld query heads are not a multiple of %lld key/value heads",
                        static_cast<long long>(p->heads), static_cast<long long>(p->kv_heads));
  if (p->queries > INT32_MAX || p->keys > INT32_MAX)
    return message.fail(FDM_UNSUPPORTED, "%lld queries and %lld keys: a sequence has at most 2^31 - 1 of each",
                        static_cast<long long>(p->queries), static_cast<long long>(p->keys));
  if (p->context.threads < 1)
    return message.fail(FDM_INVALID_ARGUMENT, "threads is %d, at least 1 is needed", p->context.threads);
  return FDM_OK;
}

int32_t check_buffer(const char *name, fdm_buffer buffer, int64_t needed, const Message &message) {
  if (buffer.bytes >= needed && (buffer.data || needed == 0)) return FDM_OK;
  return message.fail(FDM_BUFFER_TOO_SMALL, "%s has %lld bytes, %lld are needed", name,
                      static_cast<long long>(buffer.bytes), static_cast<long long>(needed));
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

// Checks common to plan, forward and backward; then the work. Nothing below throws but where the host has no memory for
// a thread's bookkeeping.
template <class Work>
int32_t run(const fdm_problem *p, int32_t pass, fdm_buffer plan, fdm_buffer workspace, const Message &message,
            Work &&work) {
  if (int32_t status = check_problem(p, message)) return status;
  if (int32_t status = check_buffer("plan", plan, plan_bytes(*p), message)) return status;
  if (int32_t status = check_buffer("workspace", workspace, workspace_needed(*p, pass), message)) return status;
  try {
    work();
  } catch (const std::bad_alloc &) {
    return message.fail(FDM_OUT_OF_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    return message.fail(FDM_INTERNAL_ERROR, "%s", error.what());
  }
  return FDM_OK;
}

template <class Args> int32_t check_args(const Args *args, const char *name, const Message &message) {
  if (args && args->struct_size >= sizeof(Args)) return FDM_OK;
  return message.fail(FDM_INVALID_ARGUMENT, "%s has %u bytes, this pack was compiled with %zu", name,
                      args ? args->struct_size : 0u, sizeof(Args));
}

int32_t workspace_bytes(const fdm_problem *p, int32_t pass, int64_t *bytes, char *text, size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_problem(p, message)) return status;
  *bytes = workspace_needed(*p, pass);
  return FDM_OK;
}

int32_t plan(const fdm_problem *p, fdm_buffer plan, fdm_buffer workspace, char *text, size_t text_bytes) {
  return run(p, FDM_PASS_PLAN, plan, workspace, {text, text_bytes}, [&] { make_plan(*p, plan.data, workspace.data); });
}

int32_t forward(const fdm_problem *p, const fdm_forward_args *args, fdm_buffer plan, fdm_buffer workspace, char *text,
                size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_args(args, "fdm_forward_args", message)) return status;
  return run(p, FDM_PASS_FORWARD, plan, workspace, message,
             [&] { forward_pass(*p, *args, plan.data, workspace.data); });
}

int32_t backward(const fdm_problem *p, const fdm_backward_args *args, fdm_buffer plan, fdm_buffer workspace, char *text,
                 size_t text_bytes) {
  const Message message{text, text_bytes};
  if (int32_t status = check_args(args, "fdm_backward_args", message)) return status;
  if (p && present(p->block_table)) return message.fail(FDM_UNSUPPORTED, "paged keys have no backward pass");
  return run(p, FDM_PASS_BACKWARD, plan, workspace, message,
             [&] { backward_pass(*p, *args, plan.data, workspace.data); });
}

int32_t check_selection(const fdm_selection *s, const Message &message) {
  if (int32_t status = check_args(s, "fdm_selection", message)) return status;
  if (s->kv_heads < 1 || s->heads % s->kv_heads != 0 || s->window < 0 || s->context.threads < 1)
    return message.fail(FDM_INVALID_ARGUMENT, "heads %lld, kv_heads %lld, window %lld or threads %d is out of range",
                        static_cast<long long>(s->heads), static_cast<long long>(s->kv_heads),
                        static_cast<long long>(s->window), s->context.threads);
  return FDM_OK;
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
  try {
    select_keys(*s, workspace.data);
  } catch (const std::exception &error) {
    return message.fail(FDM_INTERNAL_ERROR, "%s", error.what());
  }
  return FDM_OK;
}

#if defined(__clang__)
constexpr char kCompiler[] = "clang " __clang_version__;
#else
constexpr char kCompiler[] = "gcc " __VERSION__;
#endif

fdm_pack make_table() {
  fdm_pack table{};
  table.abi_version = FDM_PACK_ABI_VERSION;
  table.struct_size = sizeof(fdm_pack);
  table.name = "cpu";
  table.version = FDM_VERSION;
  table.compiler = kCompiler;
  table.features = best_kernels().name;
  table.device_type = FDM_CPU;
  table.max_head_dim = kMaxHeadDim;
  table.dtypes = kDtypes;
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
} // namespace fdm::cpu

extern "C" __attribute__((visibility("default"))) const fdm_pack *flash_dmattn_pack(void) {
  static const fdm_pack table = fdm::cpu::make_table();
  return &table;
}
