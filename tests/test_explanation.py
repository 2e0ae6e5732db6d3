# SPDX-License-Identifier: BSD-3-Clause
"""Explanations of calls: they match the calls and compute nothing."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import flash_dmattn
from flash_dmattn import explain, flash_dmattn_func, flash_dmattn_varlen_func
from flash_dmattn.backends import select_backend, torch_memory
from flash_dmattn.backends.pack import PackBackend
from flash_dmattn.key_lists import formula
from flash_dmattn.key_lists import ops as key_list_ops
from flash_dmattn.recorder import recorded_calls

BOUNDS = torch.tensor([0, 3, 9], dtype=torch.int32)


def call(head_dim: int = 16, **others: Any) -> dict[str, Any]:
    query = torch.randn(2, 40, 4, head_dim)
    key, value = torch.randn(2, 2, 40, 2, head_dim)
    return {"query": query, "key": key, "value": value, **others}


def packed(**others: Any) -> dict[str, Any]:
    tensors = {name: torch.randn(9, 2, 16) for name in ("query", "key", "value")}
    bounds = {"cu_seqlens_q": BOUNDS, "cu_seqlens_k": BOUNDS, "max_seqlen_q": 6, "max_seqlen_k": 6}
    return {**tensors, **bounds, **others}


def bias(rows: int = 1) -> torch.Tensor:
    return torch.randn(2, 2, rows, 40)


CALLS = {
    "plain": call(),
    "selection": call(attn_bias=bias(), window_size=8, is_causal=True),
    "selection of rows": call(attn_bias=bias(40), window_size=8),
    "selection of all": call(attn_bias=bias(), window_size=40, is_causal=True),
    "mask": call(attn_mask=torch.ones(2, 40, dtype=torch.bool)),
    "one query": {**call(), "query": torch.randn(2, 1, 4, 16)},
    "selection for one query": {
        **call(attn_bias=bias(), window_size=8, is_causal=True),
        "query": torch.randn(2, 1, 4, 16),
    },
    "no keys": {**call(), "key": torch.randn(2, 0, 2, 16), "value": torch.randn(2, 0, 2, 16)},
    "packed": packed(),
    "packed selection": packed(attn_bias=torch.randn(1, 1, 9), window_size=2, is_causal=True),
}


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is computed")

    for name in ("attend", "keep", "make_plan", "forward", "backward", "differentiate"):
        monkeypatch.setattr(PackBackend, name, refuse)
    for name in ("select_intervals", "select_keep"):
        monkeypatch.setattr(PackBackend, name, refuse)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_explained_without_being_made(name: str, nothing_runs: None) -> None:
    arguments = CALLS[name]
    found = explain(**arguments)
    assert found.backend == "cpu"
    assert found.pack is not None
    assert found.pack.startswith("cpu (")
    assert found.forward is not None
    assert found.forward["kernel"]
    assert found.backward is None
    assert found.gradients == ()
    assert (found.selection is not None) == ("selection" in name and name != "selection of all")
    assert (found.plan is not None) == (
        ("selection" in name and "all" not in name) or name == "mask"
    )
    text = str(found)
    assert text.startswith("backend cpu, kernel pack cpu (")
    assert "\n  forward:" in text
    assert "none, since no gradient is wanted" in text


def test_a_backward_pass_is_explained_if_there_is_one() -> None:
    arguments = call(attn_bias=bias())
    arguments["value"].requires_grad_()
    arguments["attn_bias"].requires_grad_()
    found = explain(**arguments)
    assert found.gradients == ("value", "bias")
    assert found.backward is not None
    assert found.backward["workspace_bytes"] > 0
    assert "\n  backward:" in str(found)
    with torch.no_grad():
        assert explain(**arguments).backward is None


def listed(**others: Any) -> dict[str, Any]:
    indices = torch.randint(40, (2, 1, 40, 5), dtype=torch.int32)
    return call(key_indices=indices, index_bias=torch.randn(2, 1, 40, 5), **others)


LISTED = {
    "dense": listed(is_causal=True),
    "packed": packed(key_indices=torch.zeros(2, 9, 3, dtype=torch.int32), is_causal=True),
    "wide": listed(head_dim=300),
}


@pytest.mark.parametrize("name", LISTED)
def test_listed_keys_are_explained(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something is computed")

    for step in ("forward", "backward"):
        monkeypatch.setattr(formula, step, refuse)
        monkeypatch.setattr(PackBackend, f"list_{step}", refuse)
    arguments, is_wide = LISTED[name], name == "wide"
    found = explain(**arguments)
    assert (found.backend, found.plan, found.selection) == (
        "reference" if is_wide else "cpu",
        None,
        None,
    )
    assert (found.pack is None) == is_wide
    forward = "PyTorch operations" if is_wide else "list_forward of cpu"
    assert found.forward == {"kernel": forward}
    assert (found.backward, found.gradients, found.obstacles) == (None, (), ())
    assert f"forward:   {forward}" in str(found)
    arguments = {**arguments, "key": arguments["key"].clone().requires_grad_()}
    found = explain(**arguments)
    assert found.backward == {"kernel": forward.replace("forward", "backward")}
    assert explain(**arguments, deterministic=True).backward == found.backward
    assert found.gradients == ("key",)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(**arguments).gradients == ("key",)
    with torch.no_grad():
        assert explain(**arguments).backward is None


def test_listed_keys_are_explained_by_their_triton_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(key_list_ops, "select_backend", lambda *_: None)
    arguments = listed(backend="triton")
    arguments["index_bias"].requires_grad_()
    found = explain(**arguments)
    assert found.backend == "triton"
    assert found.forward == {"kernel": "list_forward_kernel"}
    assert found.backward == {"kernel": "list_backward_kernel"}
    assert found.gradients == ("index_bias",)
    found = explain(**arguments, deterministic=True)
    assert found.forward == {"kernel": "PyTorch operations"}
    assert "deterministic=False" in found.obstacles[0].fix


@pytest.mark.parametrize(
    "wrong",
    [
        {"key_indices": torch.zeros(2, 1, 40, 5, dtype=torch.int64)},
        {"key_indices": torch.zeros(2, 3, 40, 5, dtype=torch.int32)},
        {"index_bias": torch.randn(2, 1, 40, 6)},
        {"attn_mask": torch.ones(2, 40, dtype=torch.bool)},
        {"backend": "cuda"},
    ],
)
def test_listed_keys_raise_what_the_call_raises(wrong: dict[str, Any]) -> None:
    arguments = {**listed(), **wrong}
    with pytest.raises(Exception) as of_call:  # noqa: PT011
        flash_dmattn_func(**arguments)
    with pytest.raises(of_call.type) as found:
        explain(**arguments)
    assert str(found.value) == str(of_call.value)


def test_calls_of_other_threads_compute_while_one_is_explained() -> None:
    with recorded_calls(), ThreadPoolExecutor(1) as threads:
        out = threads.submit(flash_dmattn_func, **call()).result()
    assert isinstance(out, torch.Tensor)
    assert out.isfinite().all()


def test_it_tells_what_makes_a_call_slower() -> None:
    mask = torch.ones(2, 1, 40, 40, dtype=torch.bool)
    text = str(explain(**call(attn_mask=mask, attn_bias=bias(40))))
    assert "attn_mask has a row for each query" in text
    assert "pass an IntervalMask" in text
    assert "attn_bias has a row for each query" in text
    reference = explain(**call(backend="reference"))
    assert reference.backend == "reference"
    assert reference.pack is None
    assert reference.obstacles[0].fix == "leave backend out, which then follows the device"
    assert not explain(**call()).obstacles


def test_rows_that_cannot_be_copied_at_once_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cpu pack stands in for the cuda backend."""
    backend = select_backend(torch.device("cpu"), "auto")
    monkeypatch.setattr(backend, "name", "cuda")
    monkeypatch.setattr(torch_memory, "_stream", lambda _: 0)
    assert "pad query, key and value with zeros to 24" in str(explain(**call(20)))
    arguments = call()
    arguments["key"] = torch.randn(2, 40, 2, 17)[..., 1:]
    (obstacle,) = explain(**arguments).obstacles
    assert obstacle.fix == "pass key.contiguous()"
    arguments = call(deterministic=True)
    arguments["query"].requires_grad_()
    assert "deterministic" in explain(**arguments).obstacles[0].reason


@pytest.mark.parametrize(
    "wrong",
    [
        {"attn_bias": torch.randn(2, 2, 7)},
        {"window_size": 3},
        {"is_causal": "yes"},
        {"backend": "cuad"},
        {"key": torch.randn(2, 40, 3, 16)},
        {name: torch.randn(2, 40, 2, 300) for name in ("query", "key", "value")},
        {"sink": torch.randn(3)},
        {"unknown": 1},
    ],
)  # fmt: skip
def test_it_raises_what_the_call_raises(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception) as of_call:  # noqa: PT011
        flash_dmattn_func(**{**call(), **wrong})
    with pytest.raises(of_call.type) as found:
        explain(**{**call(), **wrong})
    assert str(found.value).replace("explain", "") in str(of_call.value) or wrong == {"unknown": 1}


def test_packed_arguments_are_checked_as_in_the_call() -> None:
    wrong = packed(max_seqlen_q=-1)
    with pytest.raises(ValueError) as of_call:  # noqa: PT011
        flash_dmattn_varlen_func(**wrong)
    with pytest.raises(ValueError) as found:  # noqa: PT011
        explain(**wrong)
    assert str(found.value) == str(of_call.value)


@pytest.mark.parametrize("backend", ["reference", "flex"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"query": torch.randn(2, 40, 4, 8)},
        {"softcap": -1.0},
        {"sink": torch.zeros(4, dtype=torch.float64)},
        {"max_seqlen_q": 2},
    ],
)
def test_backends_without_packs_check_what_is_explained(
    backend: str, wrong: dict[str, Any]
) -> None:
    if "flex" not in flash_dmattn.get_available_backends() and backend == "flex":
        pytest.skip("torch has no FlexAttention here")
    function: Any = flash_dmattn_func
    arguments = {**call(), **wrong, "backend": backend}
    if "max_seqlen_q" in wrong:
        function, arguments = flash_dmattn_varlen_func, packed(**wrong, backend=backend)
    with pytest.raises((TypeError, ValueError)) as of_call:
        function(**arguments)
    with pytest.raises(of_call.type) as found:
        explain(**arguments)
    assert str(found.value) == str(of_call.value)


def test_flags_of_calls_with_lists_are_checked() -> None:
    lists = torch.zeros(2, 2, 40, 3, dtype=torch.int32)
    with pytest.raises(TypeError, match="return_lse must be"):
        explain(**call(key_indices=lists, return_lse=3))


def test_a_block_mask_of_packed_sequences_is_refused() -> None:
    flex_attention = pytest.importorskip("torch.nn.attention.flex_attention")
    mask = flex_attention.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 9, 9, device="cpu")
    with pytest.raises(TypeError, match="attn_mask must be a boolean"):
        explain(**packed(attn_mask=mask))


def test_narrow_keys_keep_their_scale() -> None:
    arguments = call(8)
    arguments["value"] = torch.randn(2, 40, 2, 16)
    (obstacle,) = explain(**arguments).obstacles
    wide = {name: torch.nn.functional.pad(arguments[name], (0, 8)) for name in ("query", "key")}
    assert "query and key 16 wide" in obstacle.fix
    assert obstacle.fix.endswith("softmax_scale=8**-0.5")
    torch.testing.assert_close(
        flash_dmattn_func(**{**arguments, **wide}, softmax_scale=8**-0.5),
        flash_dmattn_func(**arguments),
    )


def test_it_tells_of_autocast() -> None:
    arguments = call()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert explain(**arguments).forward is not None
    assert arguments["query"].dtype == torch.float32


def test_it_is_frozen() -> None:
    found = explain(**call())
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.backend = "other"  # type: ignore[misc]
    assert found.forward is not None
    with pytest.raises(TypeError):
        found.forward["kernel"] = "other"  # type: ignore[index]


def test_it_is_refused_under_compile() -> None:
    compiled = torch.compile(
        lambda q: str(flash_dmattn.explain(q, q, q)), backend="eager", fullgraph=True
    )
    with pytest.raises(Exception, match="call it uncompiled"):
        compiled(torch.randn(1, 4, 1, 8))
