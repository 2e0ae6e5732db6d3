/* SPDX-License-Identifier: BSD-3-Clause
 *
 * The C interface between flash_dmattn and a kernel pack.
 *
 * A kernel pack is a shared library that exports one function, FDM_PACK_SYMBOL. The function returns a table that
 * holds the build properties of the library and its entry points. A pack receives raw pointers, strides, a device
 * ordinal, a stream and buffers that the caller owns. It returns a status and a message. It allocates nothing on the
 * device, never ends the process, and does not depend on Python or torch. Therefore one binary serves every version
 * of both.
 *
 * Conventions
 * - Strides count elements, are 64-bit, and may be 0 (a broadcast dimension) or negative.
 * - Shapes written {B|1} mean "B, or 1 to broadcast". H is the number of query heads, Hk of KV heads. Query head h
 *   reads KV head h / (H / Hk), and the same quotient indexes a head dimension of size Hk.
 * - A tensor whose data is NULL is absent, unless one of its dimensions is 0.
 * - A varlen problem packs its sequences along the row dimension: batch dimension 1, cu_seqlens present.
 * - On a GPU every entry point only enqueues work on the stream, without synchronisation or allocation. A CUDA graph
 *   can capture it. On a CPU an entry point returns when the work is done.
 *
 * Compatibility: structs only grow at the end, and each carries its size. A pack refuses an argument struct that is
 * smaller than the one that it was compiled with. The caller refuses a table whose abi_version differs from its own. */
#ifndef FLASH_DMATTN_PACK_H
#define FLASH_DMATTN_PACK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FDM_PACK_ABI_VERSION 10
#define FDM_PACK_SYMBOL "flash_dmattn_pack"

/* Marks the definition of that function, the only exported symbol of a pack. */
#if defined(_WIN32)
#define FDM_PACK_EXPORT __declspec(dllexport)
#else
#define FDM_PACK_EXPORT __attribute__((visibility("default")))
#endif

enum fdm_status {
  FDM_OK = 0,
  FDM_INVALID_ARGUMENT = 1, /* the problem contradicts itself or the conventions above */
  FDM_UNSUPPORTED = 2,      /* a valid problem that this pack was not built for */
  FDM_BUFFER_TOO_SMALL = 3, /* the plan or the workspace is too small */
  FDM_OUT_OF_MEMORY = 4,    /* out of host memory; packs allocate nothing on a device */
  FDM_DEVICE_ERROR = 5,     /* a driver or runtime call failed */
  FDM_INTERNAL_ERROR = 6    /* a defect of the pack */
};

enum fdm_dtype {
  FDM_FLOAT32 = 0,
  FDM_FLOAT16 = 1,
  FDM_BFLOAT16 = 2,
  FDM_BOOL = 3,
  FDM_INT32 = 4,
  FDM_UINT8 = 5,
  FDM_FLOAT64 = 6 /* only for a per-key bias and its lse */
};

/* The values of DLPack's DLDeviceType. */
enum fdm_device_type { FDM_CPU = 1, FDM_CUDA = 2 };

enum fdm_flag {
  FDM_CAUSAL = 1,        /* query i sees keys j <= i + K - Q: aligned to the bottom right */
  FDM_DETERMINISTIC = 2, /* equal inputs on the same machine give bitwise equal results */
  FDM_FORWARD_ONLY = 4,  /* only one forward call reads the plan, so a pack may leave it empty */
  FDM_SELECTS = 8,       /* start and end are results of select_and_plan; they have no memory while sizes are queried */
  /* The keys that start and end keep for a query form one run of consecutive keys with few gaps. The flag is a hint:
   * results are correct without that property. */
  FDM_KEEPS_RUNS = 16
};

/* The form of a problem's mask; indexes fdm_pack.plan_layouts. */
enum fdm_mask_kind {
  FDM_MASK_NONE = 0,      /* no mask; a causal limit is possible */
  FDM_MASK_KEYS = 1,      /* a boolean mask per key */
  FDM_MASK_INTERVALS = 2, /* start and end: key j is kept by queries start_j <= i < end_j */
  FDM_MASK_ROWS = 3,      /* a boolean mask per query */
  FDM_MASK_KIND_COUNT = 4
};

/* The biases with which a pack computes the key mass. */
enum fdm_key_mass_biases {
  FDM_KEY_MASS_NONE = 0, /* no key mass kernel */
  FDM_KEY_MASS_KEYS = 1, /* no bias, and biases that are the same for every query */
  FDM_KEY_MASS_ALL = 2
};

/* The calls with per-query key lists (fdm_problem.indices) that a pack computes. */
enum fdm_lists {
  FDM_LISTS_NONE = 0,
  FDM_LISTS_ANY_ORDER = 1, /* forward, and backward without FDM_DETERMINISTIC */
  FDM_LISTS_IN_ORDER = 2   /* all; equal inputs always give bitwise equal results */
};

enum fdm_pass { FDM_PASS_PLAN = 0, FDM_PASS_FORWARD = 1, FDM_PASS_BACKWARD = 2, FDM_PASS_KEY_MASS = 3 };

typedef struct fdm_tensor {
  void *data;
  int64_t shape[4];
  int64_t stride[4]; /* in elements */
  int32_t dtype;     /* enum fdm_dtype */
  int32_t reserved;
} fdm_tensor;

typedef struct fdm_buffer {
  void *data; /* 16-byte aligned */
  int64_t bytes;
} fdm_buffer;

/* Where the work runs. */
typedef struct fdm_context {
  int32_t device;  /* ordinal of the GPU; ignored by cpu packs */
  int32_t threads; /* cpu packs: threads to use, at least 1; ignored by GPU packs */
  void *stream;    /* CUstream, 0 is the legacy default stream; ignored by cpu packs */
} fdm_context;

/* One attention problem:
 *
 *   s_ij = scale * q_i.k_j;  s_ij = softcap * tanh(s_ij / softcap) where softcap > 0;  s_ij = s_ij + bias_ij
 *   p = softmax over the kept keys;  o_i = sum_j p_ij v_j;  lse_i = log(sum_j exp(s_ij)) over the kept keys
 *
 * All of it is in float32. A row that keeps no key gives o = 0 and lse = -inf. A bias of -inf drops the key.
 *
 * A float64 bias may be too large for float32 precision. A kernel subtracts the largest bias of a row tile in float64
 * and continues with float32 differences. lse includes the subtracted value and is float64.
 *
 * The sink of a head is one more score in the softmax denominator, without a key or value; lse excludes it:
 *
 *   p_ij = exp(s_ij) / (exp(lse_i) + exp(sink)) */
typedef struct fdm_problem {
  uint32_t struct_size; /* sizeof(fdm_problem) */
  uint32_t flags;       /* bits of enum fdm_flag */
  fdm_context context;
  float scale;
  float softcap; /* 0: off */
  int64_t batch, heads, kv_heads, head_dim;
  int64_t queries, keys; /* Q and K; for varlen, of the longest sequence */

  fdm_tensor q; /* (B, Q, H, D); varlen (1, total_q, H, D) */
  /* (B, K, Hk, D); varlen (1, total_k, Hk, D); paged (pages, page size, Hk, D). v may have fewer columns where
   * fdm_pack.narrow_value_dim allows it. */
  fdm_tensor k, v;

  /* At most one of mask and (start, end). */
  /* bool ({B|1}, {H|Hk|1}, {Q|1}, {K|1}); varlen as bias. int32: a mask of blocks (fdm_mask_blocks), whose plan
   * plan_blocks makes. Then only the shape of this tensor is read. */
  fdm_tensor mask;
  fdm_tensor start, end; /* int32 ({B|1}, {H|Hk|1}, 1, K); varlen (1, {H|Hk|1}, 1, total_k), rows within the sequence */
  /* q's dtype or float32 ({B|1}, {H|Hk|1}, {Q|1}, {K|1}); float64 only with 1 in place of Q;
   * varlen per key (1, {H|Hk|1}, 1, total_k) or per query (1, {H|Hk|1}, total_q, max_k) */
  fdm_tensor bias;

  fdm_tensor cu_seqlens_q, cu_seqlens_k; /* int32 (B + 1, 1, 1, 1), both or none; present: varlen */
  fdm_tensor block_table; /* int32 (B, max pages of a sequence, 1, 1): k and v are paged; forward only, varlen only */

  fdm_tensor sink; /* q's dtype or float32 (H, 1, 1, 1) */

  /* An upper bound for start and end, if above 0: any n consecutive queries together keep at most max_kept + n - 1
   * keys, as after a causal selection of max_kept keys. A plan has room for no more. If the bound does not hold,
   * results are correct, but the kernels take longer. 0: unknown. */
  int64_t max_kept;

  /* The keys that each query lists, in any order: indices within its own sequence. An index is ignored if it is
   * negative, beyond the sequence, or beyond the causal limit. A key that is listed twice counts twice. A problem
   * with indices has no mask and no plan, and its bias is the same for every query. index_bias is added to the scores
   * of the listed keys. Absent: queries list no keys. */
  fdm_tensor indices; /* int32 (B, {Hk|1}, Q, k), k above 0; varlen (1, {Hk|1}, total_q, k) */
  /* float16, bfloat16 or float32 (B, {H|Hk|1}, Q, k); varlen (1, {H|Hk|1}, total_q, k); or absent */
  fdm_tensor index_bias;
} fdm_problem;

/* A mask per query as blocks of consecutive queries and keys, for plan_blocks. The last blocks may be cut off by Q and
 * K. The mask of the problem is of dtype int32, with Q > 1. The problem is not packed, and has no bias per query. */
typedef struct fdm_mask_blocks {
  uint32_t struct_size;
  uint32_t reserved;
  /* int32 (mask.shape[0], mask.shape[1], blocks of queries, blocks of keys): -1: no pair of the block is kept,
   * 0: all are, n > 0: those that contents[n - 1] keeps */
  fdm_tensor numbers;
  fdm_tensor contents; /* bool (n, queries of a block, keys of a block, 1), contiguous; its shape counts if n is 0 */
  /* Upper bounds of how many numbers are at least 0, and above 0. They determine the size of the plan. */
  int64_t kept, partial;
} fdm_mask_blocks;

typedef struct fdm_forward_args {
  uint32_t struct_size;
  int32_t splits; /* split-KV parts of the key dimension; 0: the pack chooses */
  fdm_tensor out; /* q's shape and dtype, with the columns of v */
  /* (B, H, Q, 1), varlen (1, H, total_q, 1); float32, or float64 if the bias is float64; natural logarithm */
  fdm_tensor lse;
  fdm_tensor out_rest; /* the rounding error of out; uint8, the strides of out, 16-byte aligned; or absent */
} fdm_forward_args;

/* A gradient whose data is NULL is not computed. Every requested gradient is written in full. */
typedef struct fdm_backward_args {
  uint32_t struct_size;
  uint32_t reserved;
  fdm_tensor out, lse;    /* output of forward */
  fdm_tensor dout;        /* the shape and dtype of out */
  fdm_tensor dlse;        /* as lse, or absent */
  fdm_tensor dq, dk, dv;  /* the shapes and dtypes of q, k, v */
  fdm_tensor dbias;       /* the shape and dtype of bias; summed in float32 or float64 over broadcast dimensions */
  fdm_tensor dsink;       /* the shape and dtype of sink */
  fdm_tensor out_rest;    /* output of forward, or absent */
  fdm_tensor dindex_bias; /* the shape and dtype of index_bias */
} fdm_backward_args;

/* The key mass of each query head: mass_j = sum_i p_ij. It is written in full. It is 0 for a key that belongs to no
 * sequence or that no query keeps. */
typedef struct fdm_key_mass_args {
  uint32_t struct_size;
  uint32_t reserved;
  fdm_tensor lse;  /* output of forward */
  fdm_tensor mass; /* float32 (B, H, K, 1), contiguous; varlen (1, H, total_k, 1) */
} fdm_key_mass_args;

/* Selects three groups of keys for each row: the last keep_last and the first keep_first keys that the row sees and
 * the mask keeps, and the `window` other keys with the largest bias, ordered by (bias descending, key index
 * ascending). Keys whose bias is NaN or -inf are never selected, but they count among the last and the first. The
 * caller requests exactly one form of result:
 * - start and end, for a causal selection by a per-key bias: query i sees keys j <= i + K - Q.
 *   The queries start_j <= i < end_j select key j. A key that no query selects has start_j = end_j = 0.
 * - keep: one row of booleans for each row of bias. */
typedef struct fdm_selection {
  uint32_t struct_size;
  uint32_t flags; /* FDM_CAUSAL */
  fdm_context context;
  int64_t batch, heads, kv_heads; /* of the attention problem; shapes below may have any of the head counts */
  int64_t queries, keys;          /* Q and K; for varlen, of the longest sequence */
  int64_t window;                 /* at least 0 */
  fdm_tensor bias; /* any float dtype ({B|1}, {H|Hk|1}, {Q|1}, K); varlen (1, {H|Hk|1}, {total_q|1}, total_k | max_k) */
  fdm_tensor mask; /* bool, as bias or absent; broadcasts against it, also in the key dimension */
  fdm_tensor cu_seqlens_q, cu_seqlens_k;
  fdm_tensor start, end; /* with FDM_CAUSAL: int32 ({B|1}, {H|Hk|1}, 1, K), the broadcast shape of bias and mask */
  fdm_tensor keep;       /* bool, the broadcast shape of bias and mask */
  int64_t keep_last, keep_first; /* 0 to K */
} fdm_selection;

/* The per-key bias that forget gates add to the scores of causal self-attention. Row i adds the gates j + 1 to i of
 * its sequence to the score of key j. It drops the key once their sum is less than prune. F_i is the sum of the gates
 * of the sequence up to i, in float64. The term F_i is the same for all keys of row i, so a per-key bias suffices:
 *
 *   bias_j = -F_j, or -inf for padding;  start_j = j;  end_j = the first row i with F_i < F_j + prune, or 0 for padding
 *
 * A gate below `least` counts as `least`, and a gate of padding counts as 0; neither has a gradient. Gates act within
 * their sequence, and row indices count from its first row. Positions in no sequence get an arbitrary finite result. */
typedef struct fdm_forgetting {
  uint32_t struct_size;
  uint32_t reserved;
  fdm_context context;
  double least, prune;    /* at most 0; prune is read only if end is present */
  fdm_tensor log_forget;  /* float32, float16, bfloat16 or float64 (B, H, 1, N); varlen (1, H, 1, total) */
  fdm_tensor padding;     /* bool (B, 1, 1, N), true for a token; or absent */
  fdm_tensor cu_seqlens;  /* int32 (sequences + 1, 1, 1, 1); or absent */
  fdm_tensor bias;        /* float32 or float64, the shape of log_forget: written by `forget` */
  fdm_tensor start, end;  /* int32, the shape of log_forget: written by `forget`; both absent: no key is dropped */
  fdm_tensor dbias;       /* float32 or float64, the shape of log_forget: read by `forget_backward` */
  fdm_tensor dlog_forget; /* the shape and dtype of log_forget: written by `forget_backward` */
} fdm_forgetting;

/* An upper bound of the bytes of a plan. It is data, so that it can be evaluated on symbolic sizes:
 *
 *   fixed + lists * (per_list + keys * per_key + tiles * (per_tile + tile_keys * per_tile_key))
 *
 * lists = mask.shape[0] * mask.shape[1] (of start for intervals); keys = K (total_k for varlen)
 * tiles = rows / tile_rows + sequences, rounded down; rows = Q and sequences = 1 (total_q and B for varlen)
 * tile_keys = min(K, most_tile_keys), with the K of the longest sequence for varlen. If max_kept is above 0,
 *             max_kept + tile_rows - 1 replaces most_tile_keys. */
typedef struct fdm_plan_layout {
  int64_t fixed, per_list, per_key, per_tile, per_tile_key, tile_rows;
  int64_t most_tile_keys; /* INT64_MAX: a tile has room for all keys, regardless of max_kept */
} fdm_plan_layout;

/* A counter of this process: the launches of a kernel, by its mangled name, or the calls that took a route, by its
 * name ("forward: ...", "backward: ..."). */
typedef struct fdm_launch_count {
  const char *kernel;
  uint64_t launches;
} fdm_launch_count;

typedef struct fdm_pack {
  uint32_t abi_version; /* FDM_PACK_ABI_VERSION; always the first field */
  uint32_t struct_size; /* sizeof(fdm_pack) */

  const char *name;     /* "cpu", "cu13-sm90" */
  const char *version;  /* version of the project */
  const char *compiler; /* name and version */
  const char *features; /* run-time choices such as "avx512"; "" if there are none */
  int32_t device_type;  /* enum fdm_device_type */
  int32_t cuda_version; /* CUDA toolkit, 13000 for 13.0; 0 for cpu packs */
  int32_t arch;         /* 90 for sm_90; 0 for cpu packs */
  int32_t max_head_dim;
  uint32_t dtypes;          /* bit d is set if q may have dtype d */
  uint32_t key_bias_dtypes; /* dtypes of a per-key bias besides float32 and q's */
  fdm_plan_layout plan_layouts[FDM_MASK_KIND_COUNT];

  /* Each entry point returns enum fdm_status. On failure it writes a message of at most message_bytes with its final
   * zero. A workspace may be uninitialised. It is free for reuse once the work has run. */
  int32_t (*workspace_bytes)(const fdm_problem *, int32_t pass, int64_t *bytes, char *message, size_t message_bytes);
  /* Converts the mask to the column lists of each row tile. Forward and backward read the plan. */
  int32_t (*plan)(const fdm_problem *, fdm_buffer plan, fdm_buffer workspace, char *message, size_t message_bytes);
  int32_t (*forward)(const fdm_problem *, const fdm_forward_args *, fdm_buffer plan, fdm_buffer workspace,
                     char *message, size_t message_bytes);
  int32_t (*backward)(const fdm_problem *, const fdm_backward_args *, fdm_buffer plan, fdm_buffer workspace,
                      char *message, size_t message_bytes);
  int32_t (*selection_workspace_bytes)(const fdm_selection *, int64_t *bytes, char *message, size_t message_bytes);
  int32_t (*select)(const fdm_selection *, fdm_buffer workspace, char *message, size_t message_bytes);
  /* Runs select and then plan, where start and end of the selection are those of the problem. The workspace needs the
   * larger of their two sizes. */
  int32_t (*select_and_plan)(const fdm_selection *, const fdm_problem *, fdm_buffer plan, fdm_buffer workspace,
                             char *message, size_t message_bytes);
  /* The bytes of the plan that a call reads, at most the bound of its layout. 0: the call reads no plan, and the
   * caller need not make one. A null pointer: the layout gives the size. */
  int32_t (*plan_bytes)(const fdm_problem *, int64_t *bytes, char *message, size_t message_bytes);
  /* Writes at most `room` counters and returns how many exist. A null pointer: the pack has no kernels. */
  int32_t (*launch_counts)(fdm_launch_count *counts, int32_t room);
  /* Writes a JSON object with its final zero that describes the selection, the plan, and the passes whose arguments
   * are not null: the route of each and its workspace. Returns FDM_BUFFER_TOO_SMALL if the text is longer than
   * text_bytes. Enqueues nothing and reads no tensor data. */
  int32_t (*describe)(const fdm_problem *, const fdm_selection *, const fdm_forward_args *, const fdm_backward_args *,
                      char *text, size_t text_bytes, char *message, size_t message_bytes);
  /* Sums the probabilities of each key. Paged keys are not supported. May be null if key_mass_biases is
   * FDM_KEY_MASS_NONE. */
  int32_t (*key_mass)(const fdm_problem *, const fdm_key_mass_args *, fdm_buffer plan, fdm_buffer workspace,
                      char *message, size_t message_bytes);
  /* 1: backward computes delta = dout . out. The score gradients of a row then sum to 0 only up to the rounding error
   * of out. The gradients of a sink and of a per-key bias accumulate this error over all rows. Calls with a sink or a
   * bias therefore pass out_rest to forward and backward, unless the bias is per query. 0: out_rest is never needed.
   * The pack defines its bytes. */
  int32_t wants_out_rest;
  int32_t key_mass_biases; /* enum fdm_key_mass_biases */
  int32_t lists_keys;      /* enum fdm_lists */
  /* The bytes that kernels copy at a time of rows of q, k, v, out and dout: rows begin at multiples of it and have a
   * multiple of it, and their elements are neighbours. Forward passes of empty problems, of at most 16 queries (of the
   * longest sequence), of listed or of paged keys take any rows, more slowly. 1: any rows in all passes. */
  int32_t row_bytes;
  /* The value dimension may be any multiple of 8 up to narrow_value_dim if all of these hold: the head dimension of q
   * and k is above narrow_value_dim and at most narrow_head_dim; rows are as row_bytes asks in all passes; no bias is
   * per query; keys are neither paged nor listed. Backward additionally requires: no
   * FDM_DETERMINISTIC, no softcap, no per-query mask, no mask or bias per query head with GQA, and gradients of q, k
   * and v all requested. 0: never. */
  int32_t narrow_head_dim, narrow_value_dim;
  /* Bias and intervals of forget gates, and the gradient of the gates. Both passes need the same workspace. */
  int32_t (*forget_workspace_bytes)(const fdm_forgetting *, int64_t *bytes, char *message, size_t message_bytes);
  int32_t (*forget)(const fdm_forgetting *, fdm_buffer workspace, char *message, size_t message_bytes);
  int32_t (*forget_backward)(const fdm_forgetting *, fdm_buffer workspace, char *message, size_t message_bytes);
  /* The size of the plan of a mask of blocks, of which plan_bytes is a lower bound, and the plan. A pack has both
   * functions or neither. With them it has plan_bytes. */
  int32_t (*block_plan_bytes)(const fdm_problem *, const fdm_mask_blocks *, int64_t *bytes, char *message,
                              size_t message_bytes);
  int32_t (*plan_blocks)(const fdm_problem *, const fdm_mask_blocks *, fdm_buffer plan, char *message,
                         size_t message_bytes);
} fdm_pack;

typedef const fdm_pack *(*fdm_pack_function)(void);

#ifdef __cplusplus
}
#endif
#endif
