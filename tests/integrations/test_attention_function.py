# SPDX-License-Identifier: BSD-3-Clause
"""The attention function, with every mask, bias and packing, against the float64 formula."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import attention_reference, flash_dmattn_func
from flash_dmattn.integrations import model_attention
from flash_dmattn.integrations.key_bias import KeyBias, attach_key_bias
from flash_dmattn.integrations.model_attention import (
    _flash_dynamic_mask_attention_forward,
)
from flash_dmattn.integrations.packed_documents import bounds_of_sequences, documents_of_positions
from flash_dmattn.integrations.transformers_attention import (
    flash_dynamic_mask_attention_forward,
)
from support import assert_accurate, rand_bool, randn

B, Q, K, H, HK, D, WINDOW = 2, 19, 19, 4, 2, 16, 6
LOWEST = torch.finfo(torch.float32).min

MASKS = {
    "none": None,
    "padding": rand_bool(B, K, seed=1, density=0.7),
    "integers": rand_bool(B, K, seed=1, density=0.7).long(),
    "heads": rand_bool(B, HK, K, seed=2, density=0.7),
    "keys": rand_bool(B, 1, 1, K, seed=3, density=0.7),
    "rows": rand_bool(B, 1, Q, K, seed=4, density=0.7),
    "added": torch.zeros(B, 1, Q, K).masked_fill(~rand_bool(B, 1, Q, K, seed=5), LOWEST),
    "added-bias": randn(B, H, Q, K, seed=6).masked_fill(~rand_bool(B, H, Q, K, seed=6), LOWEST),
}
BIASES = {
    "none": None,
    "shared": randn(B, K, seed=7),
    "heads": randn(B, HK, K, seed=8),
    "keys": randn(B, HK, 1, K, seed=9),
    "rows": randn(1, H, Q, K, seed=10),
}


class Module(torch.nn.Module):
    """A stand-in for an attention module."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def problem(seed: int = 0) -> list[Tensor]:
    shapes = ((B, H, Q, D), (B, HK, K, D), (B, HK, K, D))
    return [randn(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def full(tensor: Tensor) -> Tensor:
    """Return a mask or bias as ``(B, H, Q, K)``."""
    if tensor.dim() < 4:
        tensor = tensor[:, None, None] if tensor.dim() == 2 else tensor[:, :, None]
    if tensor.shape[1] == HK:
        tensor = tensor.repeat_interleave(H // HK, 1)
    return tensor.expand(B, H, Q, K)


def with_places(score: Tensor, kept: Tensor, window: int, last: int, first: int) -> Tensor:
    """Keep the last and the first kept keys of each row, and the best of the others."""
    number = kept.cumsum(-1)
    by_place = kept & ((number <= first) | (number > number[..., -1:] - last))
    return by_place | top(score, kept & ~by_place, window)


def top(score: Tensor, kept: Tensor, window: int) -> Tensor:
    """Keep the largest scores of each row; ties go to the first."""
    score = score.masked_fill(~kept, -torch.inf)
    order = torch.sort(score, dim=-1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(K).expand_as(order))
    return kept & (rank < window)


def judged(run: Any, kept: Tensor, biases: list[Tensor], tensors: list[Tensor]) -> None:
    """Compare ``run(query, key, value, *biases)`` and its gradients by the 2x rule."""

    def outcome(dtype: torch.dtype, call: Any) -> dict[str, Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in (*tensors, *biases)]
        out = call(*leaves)
        gradients = torch.autograd.grad(out, leaves, randn(B, Q, H, D, seed=3).to(dtype) / 4)
        named = {f"gradient {i}": gradient for i, gradient in enumerate(gradients)}
        return {"out": out.detach(), **named}

    def formula(query: Tensor, key: Tensor, value: Tensor, *added: Tensor) -> Tensor:
        bias = sum(full(b) for b in added) if added else None
        query, key, value = (t.transpose(1, 2) for t in (query, key, value))
        return attention_reference(query, key, value, kept, bias)[0]

    truth = outcome(torch.float64, formula)
    assert_accurate(outcome(torch.float32, run), truth, outcome(torch.float32, formula))


@pytest.mark.parametrize("causal, window", itertools.product([False, True], [None, WINDOW]))
@pytest.mark.parametrize("bias_kind", BIASES)
@pytest.mark.parametrize("mask_kind", MASKS)
def test_masks_with_biases(
    mask_kind: str, bias_kind: str, causal: bool, window: int | None
) -> None:
    mask, bias = MASKS[mask_kind], BIASES[bias_kind]
    added = [] if bias is None else [bias]
    kept = torch.ones(B, H, Q, K, dtype=torch.bool)
    if mask is not None and mask.is_floating_point():
        kept = full(mask) > LOWEST / 2
        added = [mask, *added]
    elif mask is not None:
        kept = full(mask != 0)
    if causal:
        kept = kept.tril()
    if window is not None:
        if not added:
            return
        kept = top(sum(full(b) for b in added), kept, window)

    is_added = mask is not None and mask.is_floating_point()

    def run(query: Tensor, key: Tensor, value: Tensor, *leaves: Tensor) -> Tensor:
        return flash_dynamic_mask_attention_forward(
            Module(is_causal=False),
            query,
            key,
            value,
            leaves[0] if is_added else mask,
            None if bias is None else leaves[-1],
            window_size=window,
            is_causal=causal,
        )[0]

    judged(run, kept, added, problem())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias_kind", BIASES)
@pytest.mark.parametrize("mask_kind", MASKS)
def test_masks_with_places(mask_kind: str, bias_kind: str, causal: bool) -> None:
    """Only a mask with a row for each query determines causality by itself."""
    mask, bias = MASKS[mask_kind], BIASES[bias_kind]
    window = 0 if bias is None else 3
    places = {"window_size": window, "keep_last": 4, "keep_first": 2}
    has_rows = mask_kind in ("rows", "added")
    if mask_kind == "added-bias" or (bias is None and mask_kind == "added"):
        return  # its values also serve as a bias
    query, key, value = problem()

    def run() -> Tensor:
        return flash_dynamic_mask_attention_forward(
            Module(is_causal=False), query, key, value, mask, bias, is_causal=causal, **places
        )[0]

    if not causal and not has_rows:
        with pytest.raises(ValueError, match="keep_last must be 0 with is_causal=False"):
            run()
        return
    kept = torch.ones(B, H, Q, K, dtype=torch.bool)
    if mask is not None:
        kept = full(mask) > LOWEST / 2 if mask.is_floating_point() else full(mask != 0)
    kept = kept.tril() if causal else kept
    score = torch.zeros(B, H, Q, K) if bias is None else full(bias)
    kept = with_places(score, kept, window, 4, 2)
    states = (t.transpose(1, 2) for t in (query, key, value))
    want = flash_dmattn_func(*states, kept, None if bias is None else full(bias))
    torch.testing.assert_close(run(), want, atol=1e-5, rtol=1e-5)


CU_SEQLENS = torch.tensor([0, 3, 14, K], dtype=torch.int32)
POSITIONS = torch.cat([torch.arange(int(n)) for n in CU_SEQLENS.diff()])[None]
OWN = torch.block_diag(*(torch.ones(int(n), int(n)) for n in CU_SEQLENS.diff())).bool()


@pytest.mark.parametrize("causal, window", itertools.product([False, True], [None, 4]))
@pytest.mark.parametrize("bias_kind", BIASES)
@pytest.mark.parametrize("packing", ["positions", "lengths"])
def test_packed_documents(packing: str, bias_kind: str, causal: bool, window: int | None) -> None:
    bias = BIASES[bias_kind]
    cu_seqlens = torch.cat([CU_SEQLENS, CU_SEQLENS[1:] + K])  # two rows of documents
    given = (
        {"position_ids": POSITIONS}
        if packing == "positions"
        else {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    )
    kept = (OWN.tril() if causal else OWN).expand(B, H, Q, K)
    if window is not None:
        if bias is None:
            return
        # Few distinct values make biases tie.
        bias = (bias * 2).round() / 2
        kept = top(full(bias), kept, window)

    def run(query: Tensor, key: Tensor, value: Tensor, *leaves: Tensor) -> Tensor:
        return flash_dynamic_mask_attention_forward(
            Module(is_causal=causal),
            query,
            key,
            value,
            None,
            *leaves,
            window_size=window,
            **given,
        )[0]

    judged(run, kept, [] if bias is None else [bias], problem())


@pytest.mark.parametrize("bias_kind", BIASES)
@pytest.mark.parametrize("packing", ["positions", "lengths"])
def test_packed_documents_with_places(packing: str, bias_kind: str) -> None:
    bias, (query, key, value) = BIASES[bias_kind], problem()
    cu_seqlens = torch.cat([CU_SEQLENS, CU_SEQLENS[1:] + K])
    given: dict[str, Any] = (
        {"position_ids": POSITIONS}
        if packing == "positions"
        else {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
    )
    given |= {"window_size": 0 if bias is None else 2, "keep_last": 3, "keep_first": 1}
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), query, key, value, None, bias, **given
    )
    score = torch.zeros(B, H, Q, K) if bias is None else full(bias)
    kept = with_places(score, OWN.tril().expand(B, H, Q, K), given["window_size"], 3, 1)
    states = (t.transpose(1, 2) for t in (query, key, value))
    want = flash_dmattn_func(*states, kept, None if bias is None else full(bias))
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


def test_a_sliding_window_with_places() -> None:
    """keep_last counts only keys in the sliding window."""
    bias, (query, key, value) = BIASES["keys"], problem()
    places = {"window_size": 2, "keep_last": 3, "keep_first": 1}
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), query, key, value, None, bias, sliding_window=9, **places
    )
    near = torch.ones(Q, K, dtype=torch.bool).tril().triu(-8)
    kept = with_places(full(bias), near.expand(B, H, Q, K), 2, 3, 1)
    states = (t.transpose(1, 2) for t in (query, key, value))
    want = flash_dmattn_func(*states, kept, full(bias))
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("causal, window", itertools.product([False, True], [None, 4]))
@pytest.mark.parametrize("bias_kind", BIASES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_sliding_window_of_packed_sequences(
    padded: bool, bias_kind: str, causal: bool, window: int | None
) -> None:
    bias, mask = BIASES[bias_kind], MASKS["padding"] if padded else None
    cu_seqlens = torch.cat([CU_SEQLENS, CU_SEQLENS[1:] + K])
    kept = (OWN & torch.ones(Q, K, dtype=torch.bool).tril(4 * (not causal)).triu(-4)).expand(
        B, H, Q, K
    )
    kept = kept if mask is None else kept & full(mask != 0)
    if window is not None:
        if bias is None:
            return
        kept = top(full(bias), kept, window)

    def run(query: Tensor, key: Tensor, value: Tensor, *leaves: Tensor) -> Tensor:
        return flash_dynamic_mask_attention_forward(
            Module(is_causal=causal), query, key, value, mask, *leaves,
            window_size=window, sliding_window=5, cu_seq_lens_q=cu_seqlens,
            cu_seq_lens_k=cu_seqlens,
        )[0]  # fmt: skip

    judged(run, kept, [] if bias is None else [bias], problem())


@pytest.mark.parametrize("lengths", [{}, {"max_length_q": 14, "max_length_k": 14}])
def test_a_sliding_window_longer_than_all_packed_sequences(lengths: dict[str, int]) -> None:
    """It drops nothing: it neither costs a mask nor refuses a sequence in two rows."""
    query, key, value = (t[:2, :, :10] for t in problem())
    bias = torch.randn(2, 1, 1, 10)
    bounds = torch.tensor([0, 6, 20], dtype=torch.int32)  # the second sequence is in both rows

    def run(sliding_window: int | None) -> Tensor:
        return flash_dynamic_mask_attention_forward(
            Module(is_causal=True), query, key, value, None, bias, window_size=3,
            sliding_window=sliding_window, cu_seq_lens_q=bounds, cu_seq_lens_k=bounds, **lengths,
        )[0]  # fmt: skip

    assert torch.equal(run(20), run(None))
    with pytest.raises(ValueError, match="window_size and sliding_window"):
        run(4)


def test_a_sliding_window_of_sequences_with_more_keys_than_queries() -> None:
    """It is aligned as causality is, to the last query and key of each sequence."""
    query, key, value = (t[:1] for t in problem())
    lengths = [(3, 5), (2, 2), (4, 1), (Q - 9, K - 8)]
    bounds = [
        torch.tensor([0, *itertools.accumulate(part)], dtype=torch.int32)
        for part in zip(*lengths, strict=True)
    ]
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), query, key, value, None,
        sliding_window=2, cu_seq_lens_q=bounds[0], cu_seq_lens_k=bounds[1],
    )  # fmt: skip
    own = [torch.ones(q, k).tril(k - q).triu(k - q - 1) for q, k in lengths]
    kept = torch.block_diag(*own).bool()[None, None]
    want = flash_dmattn_func(*(t.transpose(1, 2) for t in (query, key, value)), kept)
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seq_lens_k"])
def test_bounds_of_queries_or_keys_alone_are_refused(name: str) -> None:
    missing = {"cu_seq_lens_q": "cu_seq_lens_k", "cu_seq_lens_k": "cu_seq_lens_q"}[name]
    with pytest.raises(ValueError, match=f"{missing} must be given too, got None"):
        flash_dynamic_mask_attention_forward(
            Module(is_causal=True), *problem(), None, **{name: CU_SEQLENS}
        )


def test_lengths_with_rows() -> None:
    query, key, value = (t[:1] for t in problem())
    mask = MASKS["rows"][:1]
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), query, key, value, mask, BIASES["rows"],
        cu_seq_lens_q=CU_SEQLENS, cu_seq_lens_k=CU_SEQLENS, is_causal=True,
    )  # fmt: skip
    want, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=False), query, key, value, mask & OWN.tril(), BIASES["rows"]
    )
    assert torch.equal(out, want)
    across_rows = torch.tensor([0, K - 1, 2 * K], dtype=torch.int32)
    with pytest.raises(ValueError, match="sequence of cu_seq_lens is in several of the 2 rows"):
        flash_dynamic_mask_attention_forward(
            Module(is_causal=True), *problem(), MASKS["rows"],
            cu_seq_lens_q=across_rows, cu_seq_lens_k=across_rows,
        )  # fmt: skip


def test_equal_bounds_become_one_tensor() -> None:
    """Trainers move the bounds of queries and of keys to a device separately."""
    whole = CU_SEQLENS.long()
    bounds_q, bounds_k = bounds_of_sequences(whole, whole, compare=False)
    assert bounds_q is bounds_k
    assert bounds_q.dtype == torch.int32

    one, other = CU_SEQLENS.clone(), CU_SEQLENS.clone()
    for _ in range(2):
        bounds_q, bounds_k = bounds_of_sequences(one, other, compare=True)
        assert bounds_q is bounds_k
    assert torch.equal(bounds_q, CU_SEQLENS)
    assert bounds_of_sequences(one, other, compare=False)[1] is other
    other[1] += 1
    assert bounds_of_sequences(one, other, compare=True)[1] is other
    assert bounds_of_sequences(one, other[:-1], compare=True)[1].shape == other[:-1].shape


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bounds_and_positions_that_change_in_place_are_read_again(mode: Any) -> None:
    with mode():
        one, other = CU_SEQLENS.clone(), CU_SEQLENS.clone()
        assert bounds_of_sequences(one, other, compare=True)[1] is one
        other[1] += 1
        assert bounds_of_sequences(one, other, compare=True)[1] is other
        positions = torch.arange(8).unsqueeze(0)
        assert documents_of_positions(positions) is None
        positions[:, 3:] -= 3
        found = documents_of_positions(positions)
        assert found is not None
        assert found.ids.tolist() == [[0] * 3 + [1] * 5]
        assert documents_of_positions(positions) is found


def test_packed_training_passes_one_tensor_of_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def varlen(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, **_: Any) -> Tensor:
        seen.append(bounds[0] is bounds[1])
        return query

    monkeypatch.setattr(model_attention, "flash_dmattn_varlen_func", varlen)
    for trains in (True, False):
        query, key, value = (t[:1].requires_grad_(trains) for t in problem())
        flash_dynamic_mask_attention_forward(
            Module(is_causal=True), query, key, value, None,
            cu_seq_lens_q=CU_SEQLENS.clone(), cu_seq_lens_k=CU_SEQLENS.clone(), is_causal=True,
        )  # fmt: skip
    assert seen == [True, False]


def test_lengths_that_end_early() -> None:
    given = {"cu_seq_lens_q": CU_SEQLENS, "cu_seq_lens_k": CU_SEQLENS}
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), *problem(), MASKS["rows"], is_causal=True, **given
    )
    assert not out[1].any()
    own = OWN.tril() & MASKS["rows"] & torch.tensor([True, False])[:, None, None, None]
    want, _ = flash_dynamic_mask_attention_forward(Module(is_causal=False), *problem(), own)
    assert torch.equal(out, want)


def test_unusable_biases_take_no_place_in_the_window() -> None:
    bias = BIASES["keys"].clone()
    bias[..., 4:7], bias[..., 15] = torch.nan, -torch.inf
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), *problem(), None, bias, window_size=3, position_ids=POSITIONS
    )
    assert out.isfinite().all()
    usable = full(bias) > -torch.inf
    kept = top(full(bias), OWN.tril() & usable, 3)
    want, _ = flash_dynamic_mask_attention_forward(Module(is_causal=False), *problem(), kept, bias)
    torch.testing.assert_close(out, want)


def test_mask_shorter_than_a_cache_ends_it() -> None:
    query, key, value = problem()
    key, value = (torch.cat([t, torch.full_like(t, torch.nan)], 2) for t in (key, value))
    bias = torch.cat([BIASES["keys"], torch.full_like(BIASES["keys"], 9)], -1)
    given = (MASKS["padding"], bias, None, WINDOW)
    out, _ = flash_dynamic_mask_attention_forward(Module(is_causal=True), query, key, value, *given)
    given = (MASKS["padding"], BIASES["keys"], None, WINDOW)
    want, _ = flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), *given)
    assert torch.equal(out, want)


def test_a_mask_with_rows_says_what_is_causal() -> None:
    mask, module = MASKS["rows"], Module(is_causal=True)
    out, _ = flash_dynamic_mask_attention_forward(module, *problem(), mask)
    want, _ = flash_dynamic_mask_attention_forward(Module(is_causal=False), *problem(), mask)
    assert torch.equal(out, want)


@pytest.mark.parametrize("causal", [False, True])
def test_sliding_window(causal: bool) -> None:
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=causal), *problem(), MASKS["padding"], sliding_window=5
    )
    near = torch.ones(Q, K, dtype=torch.bool).triu(-4).tril(0 if causal else 4)
    kept = near & MASKS["padding"][:, None, None]
    want, _ = flash_dynamic_mask_attention_forward(Module(is_causal=False), *problem(), kept)
    torch.testing.assert_close(out, want)


def test_other_names_of_arguments() -> None:
    module, bias = Module(is_causal=True), BIASES["keys"]
    want, _ = flash_dynamic_mask_attention_forward(
        module, *problem(), None, bias, window_size=WINDOW
    )
    for given in ({"position_bias": bias}, {"attention_bias": bias}):
        out, nothing = flash_dynamic_mask_attention_forward(
            module, *problem(), None, keep_window_size=WINDOW, **given
        )
        assert torch.equal(out, want)
        assert nothing is None
    with pytest.raises(ValueError, match="keep_window_size=5 and window_size=6"):
        flash_dynamic_mask_attention_forward(
            module, *problem(), None, bias, window_size=WINDOW, keep_window_size=5
        )


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("kind", ["shared", "heads", "keys", "rows"])
def test_biases_of_any_form_add_up(kind: str, own: bool) -> None:
    """A bias of query heads is added to one of another rank, or of KV heads."""
    more, bias, module = randn(1, H, Q, K, seed=11), BIASES[kind], Module(is_causal=True)
    assert bias is not None
    biases = [bias, more]
    if own:
        biases.append(randn(B, HK, K, seed=12))

    def run(query: Tensor, key: Tensor, value: Tensor, *biases: Tensor) -> Tensor:
        if own:
            attach_key_bias(module, KeyBias(lambda module, value: biases[2], None))
        return flash_dynamic_mask_attention_forward(
            module, query, key, value, None, biases[0], position_bias=biases[1]
        )[0]

    kept = torch.ones(Q, K, dtype=torch.bool).tril().expand(B, H, Q, K)
    judged(run, kept, biases, problem())


@pytest.mark.parametrize(
    "given",
    [
        {"output_attentions": True},
        {"head_mask": torch.ones(H)},
        {"layer_head_mask": torch.ones(H)},
        {"dropout": 0.1},
        {"sinks": torch.zeros(2, H, Q, 1)},
        {"cache": object()},
        {"block_table": torch.zeros(2, 2, dtype=torch.int32)},
    ],
    ids=lambda given: next(iter(given)),
)
def test_refusals_name_the_argument(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(NotImplementedError, match=f"^{name} must be None, False or 0"):
        flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), None, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_sinks_of_any_dtype(dtype: torch.dtype) -> None:
    query, key, value = problem()
    sink = torch.linspace(-1, 1, H)
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), query, key, value, None, s_aux=sink.to(dtype)
    )
    states = (t.transpose(1, 2) for t in (query, key, value))
    want = flash_dmattn_func(*states, is_causal=True, sink=sink.to(dtype).float())
    torch.testing.assert_close(out, want)


@pytest.mark.parametrize("own", [False, True], ids=["", "key_bias"])
@pytest.mark.parametrize(
    "name, shape",
    [
        ("position_bias", (B, 3, 1, K)),
        ("position_bias", (B, 0, 1, K)),
        ("position_bias", (B, HK, 1, K - 1)),
        ("position_bias", (B + 1, 1, 1, K)),
        ("position_bias", (1, H, Q - 1, K)),
        ("attention_mask", (B, 3, Q, K)),
    ],
)
def test_biases_that_do_not_fit_each_other(name: str, shape: tuple[int, ...], own: bool) -> None:
    module = Module(is_causal=True)
    given: dict[str, Any] = {"attention_mask": None, "attention_bias": randn(B, H, Q, K)}
    given[name] = torch.zeros(shape)
    if own:
        given["attention_bias"] = None
        attach_key_bias(module, KeyBias(lambda module, value: randn(B, H, Q, K), None))
    text = f"{name} must have the shape of attention_bias, {(B, H, Q, K)}, to which it is added"
    with pytest.raises(ValueError, match=re.escape(text) + f".*got {re.escape(str(shape))}"):
        flash_dynamic_mask_attention_forward(module, *problem(), **given)


_BOUNDS = torch.tensor([0, Q, 2 * Q], dtype=torch.int32)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"sliding_window": 4},
        {"indices": torch.zeros(B, Q, 3, dtype=torch.int32)},
        {"cu_seq_lens_q": _BOUNDS, "cu_seq_lens_k": _BOUNDS, "max_length_q": Q, "max_length_k": Q},
    ],
    ids=lambda others: next(iter(others), ""),
)
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize(
    "shape",
    [(B + 1, 1, 1, K), (B, 3, 1, K), (B, 3, Q, K), (B, 1, Q - 1, K), (B, 1, 1, K - 1),
     (B, 1, Q, K - 1)],
)  # fmt: skip
def test_masks_and_biases_that_do_not_fit(
    shape: tuple[int, ...], dtype: torch.dtype, others: dict[str, Any]
) -> None:
    name = "attention_mask" if dtype == torch.bool else "attention_bias"
    given = {"attention_mask": None, name: torch.ones(shape, dtype=dtype)}
    form = r"\(\{B\|1\}, \{H\|Hk\|1\}, \{Q\|1\}, \{K\|1\}\) with B=2, H=4, Hk=2, Q=19, K=19"
    text = f"{name} must have shape {form}.* got {re.escape(str(shape))}"
    with pytest.raises(ValueError, match=text):
        flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), **given, **others)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"indices": torch.zeros(B, Q, 3, dtype=torch.int32)},
        {"cu_seq_lens_q": _BOUNDS, "cu_seq_lens_k": _BOUNDS, "max_length_q": Q, "max_length_k": Q},
    ],
    ids=lambda others: next(iter(others), ""),
)
@pytest.mark.parametrize("mask", [[1], 3, "causal", torch.eye(Q).to_sparse()], ids=str)
def test_masks_that_are_none(mask: Any, others: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"attention_mask must be a torch.Tensor"):
        flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), mask, **others)


@pytest.mark.parametrize("shape", [(H, K), (1, B)])
def test_intervals_of_packed_sequences_are_refused(shape: tuple[int, int]) -> None:
    intervals = flash_dmattn.IntervalMask(*torch.zeros(2, *shape, dtype=torch.int32))
    text = "attention_mask must be an IntervalMask of shape .*K\\), got " + re.escape(str(shape))
    with pytest.raises(ValueError, match=text):
        flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), intervals)


def test_biases_on_different_devices() -> None:
    with pytest.raises(ValueError, match="position_bias must be on attention_bias's device cpu"):
        flash_dynamic_mask_attention_forward(
            Module(is_causal=True), *problem(), None, torch.zeros(B, K),
            position_bias=torch.zeros(B, K, device="meta"),
        )  # fmt: skip


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=f"where attention_bias is None, .* got {WINDOW}"):
        flash_dynamic_mask_attention_forward(
            Module(is_causal=True), *problem(), None, window_size=WINDOW
        )
    with pytest.raises(ValueError, match=r"attention_mask must have two, three or four .* \(3,\)"):
        flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), torch.ones(3))
    query, key, value = (t.transpose(1, 2) for t in problem())
    for name in ("query_states", "key_states", "value_states"):
        states = {"query_states": query, "key_states": key, "value_states": value}
        for wrong, error in (([1], TypeError), (query[0], ValueError), (query[0, 0], ValueError)):
            with pytest.raises(error, match=f"{name} must "):
                _flash_dynamic_mask_attention_forward(
                    **{**states, name: wrong}, attention_mask=torch.ones(B, K), attention_bias=None,
                    query_length=Q, key_length=K, is_causal=True,
                )  # fmt: skip
    with pytest.raises(ValueError, match=r"implementation must be .* got 'sdpa'"):
        _flash_dynamic_mask_attention_forward(
            query, key, value, None, None, Q, K, True, implementation="sdpa"
        )


@pytest.mark.parametrize(
    "given, text",
    [
        ({"attention_bias": [1]}, "attention_bias must be a torch.Tensor, got list"),
        ({"attention_bias": torch.ones(B, K) > 0}, "attention_bias must hold real .*torch.bool"),
        ({"attention_bias": torch.ones(B, K) * 1j}, "attention_bias must hold real .*complex64"),
        (
            {"attention_bias": torch.ones(B, K), "position_bias": torch.ones(B, K) > 0},
            "position_bias must hold real numbers, got torch.bool",
        ),
        ({"position_ids": [1]}, "position_ids must be a torch.Tensor, got list"),
        (
            {"cu_seq_lens_q": [0, Q], "cu_seq_lens_k": torch.tensor([0, Q])},
            "cu_seq_lens_q must be a torch.Tensor, got list",
        ),
    ],
)  # fmt: skip
def test_wrong_types(given: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), None, **given)


def test_float32_of_adapters_is_cast_back() -> None:
    module = Module(is_causal=True)
    module.add_module("projection", torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    out, _ = flash_dynamic_mask_attention_forward(
        module, *problem(), None, BIASES["keys"], window_size=WINDOW
    )
    assert out.dtype == torch.bfloat16
    quantized = Module(is_causal=True)
    quantized.config = type("Config", (), {"_pre_quantization_dtype": torch.float16})()
    assert flash_dynamic_mask_attention_forward(quantized, *problem(), None)[0].dtype == (
        torch.float16
    )
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), None)
    assert out.dtype == torch.bfloat16


def test_values_of_another_head_dimension() -> None:
    query, key, value = problem()
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), query, key, value[..., :7], None
    )
    want, _ = flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), None)
    torch.testing.assert_close(out, want[..., :7])


def test_gradient_of_a_bias_has_its_shape() -> None:
    bias = BIASES["keys"].clone().requires_grad_()
    out, _ = flash_dynamic_mask_attention_forward(
        Module(is_causal=True), *problem(), MASKS["padding"], bias, window_size=WINDOW
    )
    out.sum().backward()
    assert bias.grad is not None
    assert bias.grad.shape == (B, HK, 1, K)


def test_no_tensor_is_made_of_the_size_of_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention gets the given tensors: no mask for none, and a bias at its own rank."""
    seen: list[Any] = []
    real = flash_dmattn.flash_dmattn_func

    def record(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[3:5])
        return real(*args, **kwargs)

    module = "flash_dmattn.integrations.model_attention"
    monkeypatch.setattr(f"{module}.flash_dmattn_func", record)
    bias = BIASES["keys"]
    flash_dynamic_mask_attention_forward(Module(is_causal=True), *problem(), None)
    flash_dynamic_mask_attention_forward(
        Module(is_causal=True), *problem(), MASKS["padding"], bias, window_size=WINDOW
    )
    assert seen[0] == (None, None)
    assert seen[1][0].shape == (B, 1, 1, K)
    assert seen[1][1].shape == bias.shape
    assert seen[1][1].data_ptr() == bias.data_ptr()
