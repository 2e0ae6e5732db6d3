/* SPDX-License-Identifier: BSD-3-Clause
 *
 * A kernel pack that computes nothing: it remembers what it was called with, for tests of the core. Macros turn it
 * into packs that the core must refuse. */
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "pack.h"

#define EXPORT __attribute__((visibility("default")))

#ifndef ABI_VERSION
#define ABI_VERSION FDM_PACK_ABI_VERSION
#endif
#ifndef STRUCT_SIZE
#define STRUCT_SIZE sizeof(fdm_pack)
#endif
#ifndef DEVICE_TYPE
#define DEVICE_TYPE FDM_CPU
#endif
#ifndef PACK_NAME
#define PACK_NAME "recording"
#endif
#ifndef ENTRY_NAME
#define ENTRY_NAME flash_dmattn_pack
#endif
#ifndef DTYPES
#define DTYPES (1 << FDM_FLOAT32 | 1 << FDM_FLOAT16)
#endif
#ifndef WANTS_OUT_REST
#define WANTS_OUT_REST 0
#endif
#ifndef NO_TABLE
#define NO_TABLE 0
#endif

/* What the last call got. */
EXPORT fdm_problem recorded_problem;
EXPORT fdm_forward_args recorded_forward;
EXPORT fdm_backward_args recorded_backward;
EXPORT fdm_selection recorded_selection;
EXPORT fdm_mask_blocks recorded_mask_blocks;
EXPORT fdm_buffer recorded_plan, recorded_workspace;

/* What the next call does. */
EXPORT int32_t next_status;
EXPORT char next_message[64];
EXPORT int64_t next_workspace_bytes, next_plan_bytes = 1;
EXPORT int32_t meeting_size; /* forward returns once this many threads are inside it, or fails after 10 s */

static atomic_int meeting;

static int32_t finish(char *message, size_t message_bytes) {
  strncpy(message, next_message, message_bytes - 1);
  message[message_bytes - 1] = '\0';
  return next_status;
}

static int32_t workspace_bytes(const fdm_problem *problem, int32_t pass, int64_t *bytes, char *message,
                               size_t message_bytes) {
  (void)problem, (void)message, (void)message_bytes;
  *bytes = next_workspace_bytes * (pass + 1);
  return FDM_OK;
}

static int32_t plan_bytes(const fdm_problem *problem, int64_t *bytes, char *message, size_t message_bytes) {
  (void)problem, (void)message, (void)message_bytes;
  *bytes = next_plan_bytes;
  return FDM_OK;
}

static int32_t plan(const fdm_problem *problem, fdm_buffer plan_buffer, fdm_buffer workspace, char *message,
                    size_t message_bytes) {
  recorded_problem = *problem;
  recorded_plan = plan_buffer;
  recorded_workspace = workspace;
  return finish(message, message_bytes);
}

static int32_t forward(const fdm_problem *problem, const fdm_forward_args *args, fdm_buffer plan_buffer,
                       fdm_buffer workspace, char *message, size_t message_bytes) {
  if (meeting_size > 0) {
    const time_t begin = time(NULL);
    atomic_fetch_add(&meeting, 1);
    while (atomic_load(&meeting) < meeting_size)
      if (time(NULL) - begin > 10) return FDM_INTERNAL_ERROR;
    return FDM_OK;
  }
  recorded_forward = *args;
  return plan(problem, plan_buffer, workspace, message, message_bytes);
}

static int32_t backward(const fdm_problem *problem, const fdm_backward_args *args, fdm_buffer plan_buffer,
                        fdm_buffer workspace, char *message, size_t message_bytes) {
  recorded_backward = *args;
  return plan(problem, plan_buffer, workspace, message, message_bytes);
}

static int32_t selection_workspace_bytes(const fdm_selection *selection, int64_t *bytes, char *message,
                                         size_t message_bytes) {
  (void)selection, (void)message, (void)message_bytes;
  *bytes = next_workspace_bytes;
  return FDM_OK;
}

static int32_t do_select(const fdm_selection *selection, fdm_buffer workspace, char *message, size_t message_bytes) {
  recorded_selection = *selection;
  recorded_workspace = workspace;
  return finish(message, message_bytes);
}

static int32_t select_and_plan(const fdm_selection *selection, const fdm_problem *problem, fdm_buffer plan_buffer,
                               fdm_buffer workspace, char *message, size_t message_bytes) {
  recorded_selection = *selection;
  return plan(problem, plan_buffer, workspace, message, message_bytes);
}

static int32_t block_plan_bytes(const fdm_problem *problem, const fdm_mask_blocks *blocks, int64_t *bytes,
                                char *message, size_t message_bytes) {
  (void)problem, (void)message, (void)message_bytes;
  *bytes = 100 * blocks->kept + blocks->partial;
  return FDM_OK;
}

static int32_t plan_blocks(const fdm_problem *problem, const fdm_mask_blocks *blocks, fdm_buffer plan_buffer,
                           char *message, size_t message_bytes) {
  recorded_mask_blocks = *blocks;
  return plan(problem, plan_buffer, (fdm_buffer){0}, message, message_bytes);
}

static const fdm_pack table = {
    .abi_version = ABI_VERSION,
    .struct_size = STRUCT_SIZE,
    .name = PACK_NAME,
    .version = "1.2.3",
    .compiler = "a compiler",
    .features = "none",
    .device_type = DEVICE_TYPE,
    .cuda_version = DEVICE_TYPE == FDM_CUDA ? 13000 : 0,
    .arch = DEVICE_TYPE == FDM_CUDA ? 90 : 0,
    .max_head_dim = 256,
    .dtypes = DTYPES,
    .plan_layouts = {{0, 0, 0, 0, 0, 1, 0},
                     {64, 8, 4, 0, 0, 1, 0},
                     {64, 16, 12, 2, 3, 32, 4},
                     {64, 0, 0, 128, 5, 32, INT64_MAX}},
    .workspace_bytes = workspace_bytes,
    .plan = plan,
#ifndef NO_FORWARD
    .forward = forward,
#endif
    .backward = backward,
    .selection_workspace_bytes = selection_workspace_bytes,
    .select = do_select,
    .select_and_plan = select_and_plan,
    .plan_bytes = plan_bytes,
#ifndef NO_BLOCKS
    .block_plan_bytes = block_plan_bytes,
    .plan_blocks = plan_blocks,
#endif
    .wants_out_rest = WANTS_OUT_REST,
};

EXPORT const fdm_pack *ENTRY_NAME(void) { return NO_TABLE ? NULL : &table; }
