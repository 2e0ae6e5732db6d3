/* SPDX-License-Identifier: BSD-3-Clause
 *
 * The C interface between flash_dmattn and a kernel pack.
 *
 * A kernel pack is a shared library that exports one function, FDM_PACK_SYMBOL, which returns a table of what the
 * library was built for and of its entry points. A pack gets raw pointers, strides, a device ordinal, a stream and
 * buffers that the caller owns. It returns a status and a message. It allocates nothing on the device, never ends the
 * process, and knows nothing of Python or torch; so one binary serves every version of both.
 *
 * Conventions
 *  - Strides count elements, are 64-bit, and may be 0 (a broadcast dimension) or negative.
 *  - Shapes written {B|1} mean "B, or 1 to broadcast". H is the number of query heads, Hk of KV heads, and
 *    query head h reads KV head h / (H / Hk). A head dimension of size Hk is indexed by that same quotient.
 *  - A tensor whose data is NULL is absent, unless one of its dimensions is 0.
 *  - "Varlen" problems pack their sequences along the row dimension: batch dimension 1, cu_seqlens present.
 *  - On a GPU every entry point only enqueues work on the stream: no synchronisation, no allocation, so that it can be
 *    captured into a CUDA graph. On a CPU it returns when the work is done.
 *
 * Compatibility: structs only grow at the end, and each carries its size. A pack refuses an argument struct that is
 * smaller than the one it was compiled with; the caller refuses a table whose abi_version differs from its own.
 */
#ifndef FLASH_DMATTN_PACK_H
#define FLASH_DMATTN_PACK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FDM_PACK_ABI_VERSION 8
#define FDM_PACK_SYMBOL "flash_dmattn_pack"

/* Stands before the definition of that function: the one thing of a pack that others see. */
#if defined(_WIN32)
#define FDM_PACK_EXPORT __declspec(dllexport)
#else
#define FDM_PACK_EXPORT __attribute__((visibility("default")))
#endif

enum fdm_status {
  FDM_OK = 0,
  FDM_INVALID_ARGUMENT = 1, /* the problem contradicts itself or the conventions above */
  FDM_UNSUPPORTED = 2,      /* a valid problem that this pack was not built for */
  FDM_BUFFER_TOO_SMALL = 3, /* the plan or the workspace has fewer bytes than asked for */
  FDM_OUT_OF_MEMORY = 4,    /* of the host; packs allocate nothing on a device */
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
  FDM_FLOAT64 = 6 /* of a bias per key, and of its lse */
};

/* The values are those of DLPack's DLDeviceType. */
enum fdm_device_type { FDM_CPU = 1, FDM_CUDA = 2 };

enum fdm_flag {
  FDM_CAUSAL = 1,        /* query i sees keys j <= i + K - Q: aligned to the bottom right */
  FDM_DETERMINISTIC = 2, /* equal inputs on an equal machine give equal bits */
  FDM_FORWARD_ONLY = 4,  /* nobody but one call of forward reads the plan, so a pack may leave it empty */
  FDM_SELECTS = 8,       /* start and end are those of select_and_plan; without memory while sizes are asked for */
  FDM_KEEPS_RUNS = 16 /* the keys that start and end keep for a query follow each other, but for few. Results are right
                          * where that is not so, too */
};

/* How a problem gives its mask; the index of fdm_pack.plan_layouts. */
enum fdm_mask_kind {
  FDM_MASK_NONE = 0,      /* no mask: at most the causal limit */
  FDM_MASK_KEYS = 1,      /* a boolean mask per key */
  FDM_MASK_INTERVALS = 2, /* start and end: key j is kept by queries start_j <= i < end_j */
  FDM_MASK_ROWS = 3,      /* a boolean mask per query */
  FDM_MASK_KIND_COUNT = 4
};

/* With which biases a pack computes the key mass. */
enum fdm_key_mass_biases {
  FDM_KEY_MASS_NONE = 0, /* it has no kernel for it */
  FDM_KEY_MASS_KEYS = 1, /* those that are the same for every query, and none */
  FDM_KEY_MASS_ALL = 2
};

/* Which calls whose queries list their keys a pack computes. */
enum fdm_lists {
  FDM_LISTS_NONE = 0,
  FDM_LISTS_ANY_ORDER = 1, /* forward, and backward without FDM_DETERMINISTIC */
  FDM_LISTS_IN_ORDER = 2   /* all: equal inputs always give equal bits */
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
 * all in float32. A row that keeps nothing gives o = 0 and lse = -inf. A bias of -inf means "not kept".
 *
 * A float64 bias may be so large that float32 would round what matters of it: of the biases of a row tile their
 * largest is subtracted in float64, and the rest is float32. lse is the whole, in float64.
 *
 * The sink of a head is one more score in the sum that p is divided by, with nothing to attend to; lse is without it:
 *
 *   p_ij = exp(s_ij) / (exp(lse_i) + exp(sink)) */
typedef struct fdm_problem {
  uint32_t struct_size; /* sizeof(fdm_problem) */
  uint32_t flags;       /* bits of enum fdm_flag */
  fdm_context context;
  float scale;
  float softcap; /* 0: off */
  int64_t batch, heads, kv_heads, head_dim;
  int64_t queries, keys; /* Q and K; for varlen the longest sequence's */

  fdm_tensor q; /* (B, Q, H, D); varlen (1, total_q, H, D) */
  fdm_tensor k,
      v; /* (B, K, Hk, D); varlen (1, total_k, Hk, D); paged (pages, page size, Hk, D). The columns of v may be
                    * fewer where fdm_pack.narrow_value_dim allows it */

  /* At most one of mask and (start, end). */
  fdm_tensor mask;       /* bool ({B|1}, {H|Hk|1}, {Q|1}, {K|1}); varlen as bias */
  fdm_tensor start, end; /* int32 ({B|1}, {H|Hk|1}, 1, K); varlen (1, {H|Hk|1}, 1, total_k), rows of the own sequence */
  fdm_tensor bias;       /* q's dtype or float32 ({B|1}, {H|Hk|1}, {Q|1}, {K|1}); also float64 (.., .., 1, {K|1});
                          * varlen per key (1, {H|Hk|1}, 1, total_k) or per query (1, {H|Hk|1}, total_q, max_k) */

  fdm_tensor cu_seqlens_q, cu_seqlens_k; /* int32 (B + 1, 1, 1, 1), both or none: none means not varlen */
  fdm_tensor block_table; /* int32 (B, max pages of a sequence, 1, 1): k and v are paged; forward only, varlen only */

  fdm_tensor sink; /* q's dtype or float32 (H, 1, 1, 1) */

  /* Of start and end, if it is above 0: any n queries in a row keep at most max_kept + n - 1 keys together, as after a
   * causal selection of max_kept keys. A plan has room for no more. Where it is not so, results are right all the same,
   * but take longer. 0: not known. */
  int64_t max_kept;

  /* The keys that each query lists, in any order: indices in its own sequence. One that is negative, that its sequence has not,
   * or that is beyond the causal limit is no key; a key listed twice counts twice. There is then no mask and no plan, and bias is
   * the same for every query. index_bias is added to the scores of what is listed. Absent: queries list no keys. */
  fdm_tensor indices; /* int32 (B, {Hk|1}, Q, k), k above 0; varlen (1, {Hk|1}, total_q, k) */
  fdm_tensor
      index_bias; /* float16, bfloat16 or float32 (B, {H|Hk|1}, Q, k); varlen (1, {H|Hk|1}, total_q, k); or absent */
} fdm_problem;

typedef struct fdm_forward_args {
  uint32_t struct_size;
  int32_t splits;      /* parts of the key axis computed apart and then merged (decode); 0: the pack chooses */
  fdm_tensor out;      /* q's shape and dtype, with the columns of v */
  fdm_tensor lse;      /* float32, float64 if the bias is (B, H, Q, 1); varlen (1, H, total_q, 1); natural logarithm */
  fdm_tensor out_rest; /* what rounding has left of out; uint8, the strides of out, 16-byte aligned; or absent */
} fdm_forward_args;

/* Gradients whose data is NULL are not computed. Every wanted gradient is written in full. */
typedef struct fdm_backward_args {
  uint32_t struct_size;
  uint32_t reserved;
  fdm_tensor out, lse;    /* what forward wrote */
  fdm_tensor dout;        /* the shape and dtype of out, any strides */
  fdm_tensor dlse;        /* as lse, or absent */
  fdm_tensor dq, dk, dv;  /* the shapes and dtypes of q, k, v */
  fdm_tensor dbias;       /* the shape and dtype of bias; summed in float32 over its broadcast dimensions */
  fdm_tensor dsink;       /* the shape and dtype of sink */
  fdm_tensor out_rest;    /* what forward wrote, any strides; or absent */
  fdm_tensor dindex_bias; /* the shape and dtype of index_bias */
} fdm_backward_args;

/* The attention that each key received: mass_j = sum_i p_ij, for each query head. Written in full; 0 for a key of no
 * sequence, and for one that no query keeps. */
typedef struct fdm_key_mass_args {
  uint32_t struct_size;
  uint32_t reserved;
  fdm_tensor lse;  /* what forward wrote */
  fdm_tensor mass; /* float32 (B, H, K, 1), contiguous; varlen (1, H, total_k, 1) */
} fdm_key_mass_args;

/* Selection of the last keep_last and the first keep_first keys that a row sees and that the mask keeps, and of the
 * others the window ones with the largest bias, by (bias descending, key index ascending). NaN and -inf are never
 * selected, but counted among the last and the first. Exactly one form of result is wanted:
 *  - start and end: for a causal selection by a bias per key: query i sees keys j <= i + K - Q.
 *    Key j is selected by the queries start_j <= i < end_j; a key that none selects has start_j = end_j = 0.
 *  - keep: one row of booleans for each row of bias. */
typedef struct fdm_selection {
  uint32_t struct_size;
  uint32_t flags; /* FDM_CAUSAL */
  fdm_context context;
  int64_t batch, heads, kv_heads; /* of the attention problem; shapes below may have any of the head counts */
  int64_t queries, keys;          /* Q and K; for varlen the longest sequence's */
  int64_t window;                 /* at least 0 */
  fdm_tensor bias; /* any float dtype ({B|1}, {H|Hk|1}, {Q|1}, K); varlen (1, {H|Hk|1}, {total_q|1}, total_k | max_k) */
  fdm_tensor mask; /* bool, as bias or absent; broadcasts against it, also in the key dimension */
  fdm_tensor cu_seqlens_q, cu_seqlens_k;
  fdm_tensor start, end; /* with FDM_CAUSAL: int32 ({B|1}, {H|Hk|1}, 1, K), the broadcast shape of bias and mask */
  fdm_tensor keep;       /* bool, the broadcast shape of bias and mask */
  int64_t keep_last, keep_first; /* 0 to K */
} fdm_selection;

/* What forget gates add to the scores of causal self-attention. Row i adds the gates j + 1 to i of its sequence to the
 * score of key j, and drops the key once they sum to less than prune. The sums of row i are the same for all keys, so a
 * bias per key does: with F_i the sum of the gates of the sequence up to i, in float64,
 *
 *   bias_j = -F_j, -inf for what is no token;  start_j = j;  end_j = the first row i with F_i < F_j + prune, 0 for no token
 *
 * A gate below `least` counts as `least`, and one of no token as 0; neither has a gradient. Gates of a sequence act within
 * it, and its rows count from its first. What is in no sequence gets any finite result. */
typedef struct fdm_forgetting {
  uint32_t struct_size;
  uint32_t reserved;
  fdm_context context;
  double least, prune;    /* at most 0; prune is read where end is present */
  fdm_tensor log_forget;  /* float32, float16, bfloat16 or float64 (B, H, 1, N); varlen (1, H, 1, total) */
  fdm_tensor padding;     /* bool (B, 1, 1, N), true is a token; or absent */
  fdm_tensor cu_seqlens;  /* int32 (sequences + 1, 1, 1, 1); or absent */
  fdm_tensor bias;        /* float32 or float64, the shape of log_forget: written by `forget` */
  fdm_tensor start, end;  /* int32, the shape of log_forget: written by `forget`; or both absent: nothing is dropped */
  fdm_tensor dbias;       /* float32 or float64, the shape of log_forget: read by `forget_backward` */
  fdm_tensor dlog_forget; /* the shape and dtype of log_forget: written by `forget_backward` */
} fdm_forgetting;

/* An upper bound of the bytes of a plan, as data, so that it can be evaluated on symbolic sizes too:
 *
 *   fixed + lists * (per_list + keys * per_key + tiles * (per_tile + tile_keys * per_tile_key))
 *
 * lists = mask.shape[0] * mask.shape[1] (of start for intervals); keys = K (total_k for varlen);
 * tiles = rows / tile_rows + sequences, rounded down, with rows = Q and sequences = 1 (total_q and B for varlen);
 * tile_keys = min(K, most_tile_keys), with the K of the longest sequence for varlen, and max_kept + tile_rows - 1 in
 * place of most_tile_keys where max_kept is above 0. */
typedef struct fdm_plan_layout {
  int64_t fixed, per_list, per_key, per_tile, per_tile_key, tile_rows;
  int64_t most_tile_keys; /* INT64_MAX: a tile has room for all keys, whatever max_kept */
} fdm_plan_layout;

/* A kernel, by its mangled name, or the way that calls took ("forward: ...", "backward: ..."), and how often this process has
 * launched it, or made such calls. */
typedef struct fdm_launch_count {
  const char *kernel;
  uint64_t launches;
} fdm_launch_count;

typedef struct fdm_pack {
  uint32_t abi_version; /* FDM_PACK_ABI_VERSION; the first field for ever */
  uint32_t struct_size; /* sizeof(fdm_pack) */

  const char *name;     /* "cpu", "cu13-sm90" */
  const char *version;  /* of the project */
  const char *compiler; /* name and version */
  const char *features; /* what was chosen at run time, such as "avx512"; "" if nothing */
  int32_t device_type;  /* enum fdm_device_type */
  int32_t cuda_version; /* of the toolkit, 13000 for 13.0; 0 for cpu packs */
  int32_t arch;         /* 90 for sm_90; 0 for cpu packs */
  int32_t max_head_dim;
  uint32_t dtypes;          /* bit d is set if q may have dtype d */
  uint32_t key_bias_dtypes; /* those that a bias per key may have, besides float32 and q's */
  fdm_plan_layout plan_layouts[FDM_MASK_KIND_COUNT];

  /* Each returns enum fdm_status, and on failure writes a message of at most message_bytes with its final zero.
   * A workspace may be uninitialised and is free for reuse once the work has run. */
  int32_t (*workspace_bytes)(const fdm_problem *, int32_t pass, int64_t *bytes, char *message, size_t message_bytes);
  /* Turns the mask into the columns that each tile of queries keeps. The plan is read by forward and backward. */
  int32_t (*plan)(const fdm_problem *, fdm_buffer plan, fdm_buffer workspace, char *message, size_t message_bytes);
  int32_t (*forward)(const fdm_problem *, const fdm_forward_args *, fdm_buffer plan, fdm_buffer workspace,
                     char *message, size_t message_bytes);
  int32_t (*backward)(const fdm_problem *, const fdm_backward_args *, fdm_buffer plan, fdm_buffer workspace,
                      char *message, size_t message_bytes);
  int32_t (*selection_workspace_bytes)(const fdm_selection *, int64_t *bytes, char *message, size_t message_bytes);
  int32_t (*select)(const fdm_selection *, fdm_buffer workspace, char *message, size_t message_bytes);
  /* Does what select and then plan do, where start and end of the selection are those of the problem. The workspace is
   * as large as the larger of theirs. */
  int32_t (*select_and_plan)(const fdm_selection *, const fdm_problem *, fdm_buffer plan, fdm_buffer workspace,
                             char *message, size_t message_bytes);
  /* The bytes of the plan that a call reads: no more than its layout tells, and 0 where it reads none, so that none need
   * be made or kept. A null pointer tells as much as the layout. */
  int32_t (*plan_bytes)(const fdm_problem *, int64_t *bytes, char *message, size_t message_bytes);
  /* Writes `room` of the kernels that were launched, at most, and returns how many there are. A null pointer: the pack has
   * no kernels. */
  int32_t (*launch_counts)(fdm_launch_count *counts, int32_t room);
  /* Writes how a problem is computed, as a JSON object with its final zero: what selects, plans, and computes the passes whose
   * arguments are given (null: not asked for), and how much workspace each takes. FDM_BUFFER_TOO_SMALL if it is longer than
   * text_bytes. Enqueues nothing, and reads no tensor. */
  int32_t (*describe)(const fdm_problem *, const fdm_selection *, const fdm_forward_args *, const fdm_backward_args *,
                      char *text, size_t text_bytes, char *message, size_t message_bytes);
  /* Sums the probabilities of each key; not for paged keys. May be null where key_mass_biases is FDM_KEY_MASS_NONE. */
  int32_t (*key_mass)(const fdm_problem *, const fdm_key_mass_args *, fdm_buffer plan, fdm_buffer workspace,
                      char *message, size_t message_bytes);
  /* 1: backward computes dout . out. The gradients of a row's scores sum to 0 only as exactly as out is given, and the
   * gradient of a sink and sums of that of a bias per key collect what is missing of all rows. So forward and backward of calls
   * with either, unless the bias has a row for each query, are given out_rest. 0: never. What its bytes mean is the pack's. */
  int32_t wants_out_rest;
  int32_t key_mass_biases; /* enum fdm_key_mass_biases */
  int32_t lists_keys;      /* enum fdm_lists */
  /* Values may have any multiple of 8 columns up to narrow_value_dim where query and key have a multiple of 8 above it and up to
   * narrow_head_dim, rows of all can be copied 16 bytes at a time, no bias has a row for each query, and keys are neither paged
   * nor listed; for backward also not with FDM_DETERMINISTIC, a softcap, a mask with a row for each query, or a mask or bias of
   * a query head alone where heads share keys, and only where gradients of query, key and value are wanted. 0: never. */
  int16_t narrow_head_dim, narrow_value_dim;
  /* Bias and intervals of forget gates, and the gradient of the gates. The workspace is the same for both. */
  int32_t (*forget_workspace_bytes)(const fdm_forgetting *, int64_t *bytes, char *message, size_t message_bytes);
  int32_t (*forget)(const fdm_forgetting *, fdm_buffer workspace, char *message, size_t message_bytes);
  int32_t (*forget_backward)(const fdm_forgetting *, fdm_buffer workspace, char *message, size_t message_bytes);
} fdm_pack;

typedef const fdm_pack *(*fdm_pack_function)(void);

#ifdef __cplusplus
}
#endif
#endif
