# SPDX-License-Identifier: BSD-3-Clause
"""The nanobind module: checks tensors, fills the structs of cpp/pack.h, and calls kernel packs.

A tensor is an object whose type has ``__dlpack_c_exchange_api__`` (``torch.Tensor`` of torch
>= 2.10) or the tuple ``(data_ptr, dtype, shape, strides_in_elements, device_type,
device_index)`` with a dtype such as ``"float32"`` and DLPack's device type (1 cpu, 2 cuda).
Only a Call keeps references to tensors; other callers keep them alive.

Wrong arguments raise TypeError (not a tensor, wrong dtype) or ValueError (everything else).
Failures of a pack raise ValueError (invalid argument, buffer too small), NotImplementedError
(unsupported), MemoryError or RuntimeError.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from .record import AttentionInputs, SelectionInputs

TensorTuple: TypeAlias = tuple[int, str, tuple[int, ...], tuple[int, ...], int, int]
# Any: an object with the exchange API, which type checkers know nothing of.
TensorLike: TypeAlias = TensorTuple | Any

PACK_ABI_VERSION: int
# The names of the fields of the records, in the order in which they are read.
ATTENTION_FIELDS: tuple[str, ...]
SELECTION_FIELDS: tuple[str, ...]

class PackError(RuntimeError):
    """A library that cannot be used as a kernel pack; the message has its path and the reason."""

class Pack:
    """A loaded kernel pack. It stays loaded for the life of the process."""

    @property
    def path(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def compiler(self) -> str: ...
    @property
    def features(self) -> str: ...
    @property
    def abi_version(self) -> int: ...
    @property
    def device_type(self) -> int:
        """DLPack's device type: 1 cpu, 2 cuda."""
    @property
    def cuda_version(self) -> int:
        """Of the toolkit, 13000 for 13.0; 0 for cpu packs."""
    @property
    def arch(self) -> int:
        """90 for sm_90; 0 for cpu packs."""
    @property
    def max_head_dim(self) -> int: ...
    @property
    def dtypes(self) -> list[str]:
        """The dtypes that query may have."""
    @property
    def wants_out_rest(self) -> bool:
        """Whether it is to be given what rounding leaves of out."""
    @property
    def plan_layouts(self) -> dict[str, tuple[int, int, int, int, int, int, int]]:
        """The fields of fdm_plan_layout for masks "none", "keys", "intervals" and "rows".

        They are fixed, per_list, per_key, per_tile, per_tile_key, tile_rows and most_tile_keys.
        """
    @property
    def key_mass_biases(self) -> Literal["none", "keys", "all"]:
        """With which biases `Problem.key_mass` can be called: not at all, those that are the same
        for every query, or all.
        """
    @property
    def row_bytes(self) -> int:
        """The bytes that kernels copy of a row at a time; `Problem.needs_row_copies` tells when."""
    @property
    def narrow_widths(self) -> tuple[int, int]:
        """The largest head dimension beside which values may be narrower, and their most columns.

        0 where there are no kernels for them. pack.h tells which calls they serve.
        """
    @property
    def lists_keys(self) -> bool:
        """Whether `Problem.list_keys` can be called."""
    @property
    def plans_blocks(self) -> bool:
        """Whether `Problem.take_blocks` can be called."""
    @property
    def forgets(self) -> bool:
        """Whether it has kernels for forget gates."""
    @property
    def orders_lists(self) -> bool:
        """Whether gradients of calls that list keys can be deterministic."""
    @property
    def launch_counts(self) -> dict[str, int]:
        """How often this process has launched each kernel, by mangled name, and how many calls took
        which way ("forward: ...", "backward: ..."); empty for cpu packs.
        """

def load_pack(path: str) -> Pack:
    """Opens a kernel pack.

    Raises PackError when it cannot be opened, is no kernel pack, or has another ABI version.
    """

class Problem:
    """A validated attention problem.

    Its arguments are the fields of `record.AttentionInputs`, the first by position, others by name.
    A field that is left out has the default that it has there. Tensors have the shapes below.

    query: (B, Q, H, D); packed (total_q, H, D).
    key, value: (B, K, Hk, D); packed (total_k, Hk, D); with block_table (pages, page size, Hk, D).
    mask: bool, bias: query's dtype or float32:
        (B|1, H|Hk|1, Q|1, K|1); packed (H|Hk|1, 1, total_k) or (H|Hk|1, total_q, max_seqlen_k).
    start, end: int32 (B|1, H|Hk|1, K); packed (H|Hk|1, total_k). Not together with mask.
    cu_seqlens: int32 (B + 1,), contiguous; each max_seqlen at least the longest sequence.
    block_table: int32 (B, pages of a sequence); packed and forward only.
    given_plan: not read here. With one, mask may be int32: the plan is that of a mask of blocks.
    sink: query's dtype or float32 (H,).
    max_kept: of start and end; any n queries in a row keep at most max_kept + n - 1 keys together.
        0: not known. A plan is made for so many; more of them are right, but slower.
    window: keys to select by the bias, which must be per key, and the problem causal; -1: none.
        The plan begins with their start and end.
    keep_last, keep_first: of the keys that a query sees, these are kept, and others selected; 0
        without window.
    keeps_runs: of start and end; the keys that a query keeps follow each other, but for few. Where
        that is not so, results are right, too.
    threads: of cpu packs. stream: CUstream as an integer, of GPU packs.
    """

    def __init__(
        self, pack: Pack, *fields: Any, threads: int = 1, stream: int = 0, **named: Any
    ) -> None: ...
    def list_keys(self, indices: TensorLike, index_bias: TensorLike | None) -> None:
        """Makes it a problem whose queries list their keys, without a mask.

        indices: int32 (B, Hk|1, Q, k); packed (Hk|1, total_q, k).
        index_bias: float16, bfloat16 or float32 (B, H|Hk|1, Q, k); packed (H|Hk|1, total_q, k).
        """
    def take_blocks(
        self, numbers: TensorLike, contents: TensorLike, kept: int, partial: int
    ) -> None:
        """Makes it a problem of a mask of blocks, for `plan` alone; without another mask.

        numbers: int32 (B|1, H|Hk|1, blocks of queries, blocks of keys): -1 keeps no pair of the
            block, 0 all, n > 0 those of contents[n - 1].
        contents: bool (n, queries of a block, keys of a block), contiguous.
        kept, partial: upper bounds of how many numbers are at least 0, and above 0.
        """
    @property
    def plan_bytes(self) -> int: ...
    @property
    def plan_workspace_bytes(self) -> int: ...
    @property
    def forward_workspace_bytes(self) -> int: ...
    @property
    def backward_workspace_bytes(self) -> int: ...
    def describe(self, gradients: tuple[str, ...], selection: Selection | None = None) -> str:
        """How a call is computed, as JSON; gradients of these fields are wanted, or none.

        selection: of the booleans that are the problem's mask.
        """
    def plan(self, plan: TensorLike | None, workspace: TensorLike | None) -> None:
        """Writes the plan that forward and backward read.

        Buffers are uint8 (bytes,), or None where no bytes are needed.
        """
    def forward(
        self,
        out: TensorLike,
        lse: TensorLike,
        plan: TensorLike | None,
        workspace: TensorLike | None,
        splits: int = 0,
    ) -> None:
        """Writes out (query's shape and dtype) and lse (float32 (B, H, Q), varlen (H, total_q)).

        splits: parts of the key axis that are computed apart and merged; 0 lets the pack choose.
        """
    def attend_bytes(self, has_lse: bool, has_plan: bool) -> int: ...
    def attend(
        self,
        out: TensorLike,
        lse: TensorLike | None,
        plan: TensorLike | None,
        scratch: TensorLike | None,
    ) -> None:
        """Does what forward does, after plan where plan is None, and keeps the results only.

        scratch: uint8 (attend_bytes,), of the same lse and plan; None where no bytes are needed.
        """
    def kept_bytes(self, has_lse: bool, has_plan: bool) -> int: ...
    def keep(
        self,
        out: TensorLike,
        lse: TensorLike | None,
        plan: TensorLike | None,
        kept: TensorLike | None,
        workspace: TensorLike | None,
    ) -> None:
        """Does what attend does for a call that has a backward pass; out must be contiguous.

        kept: uint8 (kept_bytes,), of the same lse and plan. Gets the plan unless one is given, then
            what rounding has left of out, if the pack wants it, and then an lse that is None.
        workspace: as large as the larger one of plan and forward.
        """
    def backward(
        self,
        dout: TensorLike,
        dlse: TensorLike | None,
        out: TensorLike,
        lse: TensorLike | None,
        gradients: Mapping[str, TensorLike | None],
        plan: TensorLike | None,
        workspace: TensorLike | None,
        kept: TensorLike | None = None,
    ) -> None:
        """Writes the gradients that are given, by the names of the fields that they belong to.

        Each has its field's shape and dtype. plan and kept: those of keep, or the plan of forward.
        """
    @property
    def key_mass_workspace_bytes(self) -> int: ...
    def needs_row_copies(self, for_backward: bool) -> bool:
        """Whether kernels cannot read the rows of query, key or value: those of the forward pass,
        or with ``for_backward`` those of any pass.

        They read contiguous copies whose rows have a multiple of `Pack.row_bytes` bytes.
        """
    def key_mass(
        self,
        mass: TensorLike,
        lse: TensorLike,
        plan: TensorLike | None,
        workspace: TensorLike | None,
    ) -> None:
        """Writes the attention that each key received: float32 (B, H, K), varlen (H, total_k)."""

class Allocator:
    """Makes tensors for results, on the device of a tensor of the call."""

    def __init__(
        self, empty_like: Any, contiguous: Any, float32: Any, float64: Any, uint8: Any
    ) -> None:
        """empty_like: returns a tensor like another, contiguous with this memory_format.

        float32, float64, uint8: torch's dtypes.
        """

class Call:
    """A call of attention, which is read once, and runs on the current stream of query's library.

    Memory is from that library's allocator. Each step returns None, with nothing done, where
    query's type has no DLPack C exchange API, or the allocator refuses.
    """

    def __init__(self, inputs: AttentionInputs) -> None: ...
    @property
    def fields(self) -> tuple[Any, ...]:
        """Of `record.AttentionInputs`; None for tensors that keep has given away."""
    def attend(
        self, pack: Pack, threads: int, allocator: Allocator, need_lse: bool
    ) -> tuple[Any, Any] | None:
        """Returns out, and lse if it is needed."""
    def keep(
        self, pack: Pack, threads: int, allocator: Allocator, need_lse: bool
    ) -> tuple[Any, ...] | None:
        """Does what attend does for a call that has a backward pass.

        Returns the tensors of the record, out, lse, and what else is kept (Problem.keep), None if
        that has no bytes; and keeps no reference to them. An lse that is not needed is the last
        part of what else is kept, and None, unless the record has a plan.
        """
    def differentiate(
        self,
        pack: Pack,
        threads: int,
        allocator: Allocator,
        kept: tuple[TensorLike | None, ...],
        dout: TensorLike,
        dlse: TensorLike | None,
        flags: tuple[bool, ...],
    ) -> tuple[Any, ...] | None:
        """Returns the gradients of query, key, value, bias and sink, None where a flag wants none,
        and as many more of these as there are more flags.

        kept: what keep has returned, or has its form. None is also returned where it has other
            tensors than keep has given away.
        """
    def lse_within(self, kept: Any, out: Any, dtype: Any) -> Any:
        """Returns the lse that is the last part of what keep has kept.

        out: makes an lse without elements. dtype: torch's, of the lse.
        """

def usual_call(
    query: TensorLike,
    key: TensorLike,
    value: TensorLike,
    bias: TensorLike | None,
    sink: TensorLike | None,
    mask: TensorLike | None,
    start: TensorLike | None,
    end: TensorLike | None,
    max_kept: int,
    keeps_runs: bool,
    scale: float | None,
    causal: bool | None,
    softcap: float | None,
    window: int | None,
    keep_last: int,
    keep_first: int,
    deterministic: bool,
) -> Call | None:
    """Returns the call that arguments of flash_dmattn_func make.

    None where something is wrong, or rare: other types or ranks, mixed dtypes or devices, expanded
    tensors, a window beside a mask or one that does not select causally by a bias per key, or
    tensors without DLPack's C exchange API.
    """

class Selection:
    """A validated selection of the last, the first, and the keys with the largest bias.

    Its arguments are the fields of `record.SelectionInputs`, the first by position, others by name.

    bias: any float dtype, mask: bool; both of the shapes that Problem takes, bias with all keys.
    batch, heads, kv_heads, queries, keys: B, H, Hk, Q, K; packed, queries and keys of the longest
        sequence.
    """

    def __init__(
        self, pack: Pack, *fields: Any, threads: int = 1, stream: int = 0, **named: Any
    ) -> None: ...
    @property
    def workspace_bytes(self) -> int: ...
    def intervals(self, start: TensorLike, end: TensorLike, workspace: TensorLike | None) -> None:
        """Writes start and end, int32, of the broadcast shape of bias and mask without queries."""
    def keep(self, keep: TensorLike, workspace: TensorLike | None) -> None:
        """Writes keep, bool, of the broadcast shape of bias and mask."""

class Forgetting:
    """Validated forget gates of causal self-attention.

    log_forget: ``(B, H, N)``, any float dtype; packed ``(H, total)``.
    padding: bool ``(B, N)``, True is a token.
    cu_seqlens: int32 ``(sequences + 1,)``, of packed gates.
    least: a gate below it counts as this.
    """

    def __init__(
        self,
        pack: Pack,
        log_forget: TensorLike,
        padding: TensorLike | None,
        cu_seqlens: TensorLike | None,
        least: float,
        threads: int = 1,
        stream: int = 0,
    ) -> None: ...
    @property
    def workspace_bytes(self) -> int: ...
    def forget(
        self,
        bias: TensorLike,
        start: TensorLike | None,
        end: TensorLike | None,
        prune: float,
        workspace: TensorLike | None,
    ) -> None:
        """Writes what `forgetting_bias` returns: float32 or float64 ``(B, H, 1, N)``, packed
        ``(H, 1, total)``, and int32 start and end of the gates' shape, both or none.
        """
    def forget_backward(
        self, dbias: TensorLike, dlog_forget: TensorLike, workspace: TensorLike | None
    ) -> None:
        """Writes the gradient of the gates, in their dtype; dbias is float32 or float64."""

def select(
    pack: Pack, threads: int, results: tuple[TensorLike, ...], inputs: SelectionInputs
) -> bool:
    """Makes a Selection and writes start and end, or keep; False where a Call would return None."""

def forget(
    pack: Pack,
    threads: int,
    results: tuple[TensorLike, TensorLike | None, TensorLike | None],
    gates: tuple[TensorLike, TensorLike | None, TensorLike | None],
    least: float,
    prune: float,
) -> bool:
    """Makes a Forgetting of the gates, and writes bias, start and end; False as `select`."""

def forget_backward(
    pack: Pack,
    threads: int,
    dbias: TensorLike,
    dlog_forget: TensorLike,
    gates: tuple[TensorLike, TensorLike | None, TensorLike | None],
    least: float,
) -> bool:
    """Makes a Forgetting of the gates, and writes their gradient; False as `select`."""

def check_attention(inputs: tuple[Any, ...], device_type: int) -> None:
    """Raises where Problem would, by the rules that do not depend on a pack; float64 is allowed.

    inputs: all fields; a tuple that stands for a tensor may have None in place of its data_ptr.
    device_type: DLPack's; of tensors on a cpu the values of cu_seqlens and block_table are read.
    """

def check_selection(inputs: tuple[Any, ...], device_type: int) -> None:
    """Raises where Selection would; else as check_attention."""
