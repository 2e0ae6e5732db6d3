# SPDX-License-Identifier: BSD-3-Clause
"""The public interface: signatures, defaults, forms of results, autocast, backends by name."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import flash_dmattn
from flash_dmattn import (
    IntervalMask,
    attention_reference,
    dynamic_mask,
    flash_dmattn_func,
    flash_dmattn_func_auto,
    flash_dmattn_varlen_func,
    forgetting_bias,
    make_plan,
    pair_bias_attention,
)
from flash_dmattn.distributed import context_parallel_dmattn
from support import Target, rand_bool, randn, simple_problem

# In the order of 1.2.2, whose callers pass them by position.
DENSE_ARGUMENTS = [
    "query",
    "key",
    "value",
    "attn_mask",
    "attn_bias",
    "softmax_scale",
    "is_causal",
    "softcap",
    "deterministic",
    "return_attn_probs",
]
VARLEN_ARGUMENTS = [
    "query",
    "key",
    "value",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "is_causal",
    "softcap",
    "deterministic",
    "return_attn_probs",
    "block_table",
]


def inputs(target: Target, dtype: torch.dtype | None = None) -> list[Tensor]:
    problem = simple_problem(dtype or target.dtypes[0])
    return [t.to(target.device) for t in (problem.query, problem.key, problem.value)]


@pytest.mark.parametrize(
    "function, names, required",
    [(flash_dmattn_func, DENSE_ARGUMENTS, 3), (flash_dmattn_varlen_func, VARLEN_ARGUMENTS, 7)],
)
def test_signatures_begin_as_in_1_2_2(function: object, names: list[str], required: int) -> None:
    parameters = inspect.signature(function).parameters.values()
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert [p.name for p in positional] == names
    assert all(p.default is p.empty for p in positional[:required])
    assert all(p.default is None for p in positional[required:])
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters if p.name not in names)


def test_arguments_by_position(target: Target) -> None:
    query, key, value = inputs(target)
    mask, bias = rand_bool(2, 1, 1, 23).to(target.device), randn(2, 2, 1, 23).to(query)
    call = flash_dmattn_func_auto(target.backend)
    by_position = call(query, key, value, mask, bias, 0.4, True, 3.0, True, False)
    want, _ = attention_reference(
        query, key, value, mask, bias, scale=0.4, causal=True, softcap=3.0
    )
    torch.testing.assert_close(by_position, want, atol=1e-3, rtol=1e-3)


def test_forms_of_results(target: Target) -> None:
    query, key, value = inputs(target)
    backend = {"backend": target.backend}
    out = flash_dmattn_func(query, key, value, **backend)
    assert isinstance(out, Tensor)
    assert out.is_contiguous()
    pair = flash_dmattn_func(query, key, value, return_lse=True, **backend)
    assert [t.shape for t in pair] == [query.shape, (2, 4, 17)]
    assert pair[1].dtype == torch.float32
    triple = flash_dmattn_func(query, key, value, return_attn_probs=True, **backend)
    assert [t.shape for t in triple] == [query.shape, (2, 4, 17), (2, 4, 17, 23)]
    assert triple[2].dtype == query.dtype


@pytest.mark.parametrize("mask_kind", ["none", "bool", "intervals"])
def test_probabilities_are_true_and_differentiable(mask_kind: str, target: Target) -> None:
    query, key, value = inputs(target)
    mask = {
        "none": None,
        "bool": rand_bool(2, 2, 17, 23).to(target.device),
        "intervals": IntervalMask.sliding_window(4, 0, 17, 23, device=target.device),
    }[mask_kind]
    bias = randn(2, 2, 1, 23).to(query).requires_grad_()
    out, lse, probabilities = flash_dmattn_func(
        query, key, value, mask, bias, None, True, 2.0, None, True, backend=target.backend
    )
    repeated = value.repeat_interleave(2, 2).float()
    want = torch.einsum("bhqk,bkhd->bqhd", probabilities.float(), repeated)
    torch.testing.assert_close(out.float(), want, atol=5e-3, rtol=5e-3)
    kept = lse.isfinite()
    torch.testing.assert_close(probabilities.float().sum(-1), kept.float(), atol=1e-2, rtol=0)
    (probabilities.float() ** 2).sum().backward()
    assert bias.grad.any()


@pytest.mark.parametrize("mask_kind", ["none", "padding"])
def test_probabilities_of_a_window(mask_kind: str, target: Target) -> None:
    """The selected keys are treated like those that a mask keeps."""
    query, key, value = inputs(target)
    bias = randn(2, 2, 1, 23).to(query)
    mask = None if mask_kind == "none" else rand_bool(2, 1, 1, 23).to(target.device)
    out, _, probabilities = flash_dmattn_func(
        query, key, value, mask, bias, None, True,
        window_size=5, return_attn_probs=True, backend=target.backend,
    )  # fmt: skip
    assert (probabilities > 0).sum(-1).max() == 5
    repeated = value.repeat_interleave(2, 2).float()
    expected = torch.einsum("bhqk,bkhd->bqhd", probabilities.float(), repeated)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


def test_defaults_are_not_causal_and_not_capped(target: Target) -> None:
    query, key, value = inputs(target)
    out = flash_dmattn_func(query, key, value, backend=target.backend)
    want, _ = attention_reference(query, key, value, scale=16**-0.5)
    torch.testing.assert_close(out, want, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast(bias_dtype: torch.dtype, target: Target) -> None:
    query, key, value = (t.float().requires_grad_() for t in inputs(target))
    bias = randn(2, 2, 1, 23).to(target.device, bias_dtype).requires_grad_()
    with torch.autocast(target.device, dtype=torch.bfloat16):
        out = flash_dmattn_func(query, key, value, None, bias, backend=target.backend)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    for tensor in (query, key, value, bias):
        assert tensor.grad.dtype == tensor.dtype
    plain = [t.detach().bfloat16() for t in (query, key, value)]
    plain_bias = bias.detach() if bias_dtype == torch.float32 else bias.detach().bfloat16()
    want = flash_dmattn_func(*plain, None, plain_bias, backend=target.backend)
    assert torch.equal(out, want)


@pytest.mark.parametrize("name", ["query", "attn_bias"])
def test_autocast_casts_no_integers(name: str, target: Target) -> None:
    """Booleans stay too: a mask that is passed as a bias must not be added."""
    query, key, value = inputs(target)
    arguments = {"query": query, "key": key, "value": value, "backend": target.backend}
    mask = rand_bool(2, 1, 1, 23).to(target.device)
    arguments[name] = query.int() if name == "query" else mask
    with torch.autocast(target.device, dtype=torch.bfloat16), pytest.raises(TypeError, match=name):
        flash_dmattn_func(**arguments)


def test_meta_tensors_give_shapes() -> None:
    """They have no data and a device type without autocast."""
    query, key, value = (
        t.to("meta").requires_grad_() for t in inputs(Target("cpu", "cpu"), torch.bfloat16)
    )
    bias = torch.empty(2, 2, 1, 23, device="meta", requires_grad=True)
    out, lse, probabilities = flash_dmattn_func(
        query, key, value, None, bias, is_causal=True, window_size=4, return_attn_probs=True
    )
    assert out.is_meta
    assert (out.shape, out.dtype) == (query.shape, torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 17), torch.float32)
    assert probabilities.shape == (2, 4, 17, 23)
    (out.float().sum() + lse.sum()).backward()
    for tensor in (query, key, value, bias):
        assert tensor.grad.shape == tensor.shape
    bounds = torch.empty(3, dtype=torch.int32, device="meta")
    packed = (t.detach().flatten(0, 1) for t in (query, key, value))
    out, _, probabilities = flash_dmattn_varlen_func(
        *packed, bounds, bounds, 17, 23, return_attn_probs=True
    )
    assert out.shape == (34, 4, 16)
    assert probabilities.shape == (2, 4, 17, 23)


OTHER_DEVICES = """
import types
import torch
from flash_dmattn.arguments import autocast_dtype
from flash_dmattn.reference import without_autocast

def product(x):
    with without_autocast(x.device.type):
        return x @ x

compiled = torch.compile(product, backend="eager", fullgraph=True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert compiled(torch.ones(2, 2)).dtype == torch.float32
assert compiled(torch.ones(2, 2, device="meta")).dtype == torch.float32

torch.utils.rename_privateuse1_backend("other")
with without_autocast("other"):  # its package has no autocast
    pass
others = {"get_amp_supported_dtype": lambda: [torch.bfloat16], "is_available": lambda: True}
torch._register_device_module("other", types.SimpleNamespace(**others))
for name in ("xla", "other"):
    tensor = types.SimpleNamespace(device=types.SimpleNamespace(type=name))
    assert autocast_dtype(tensor) is None
    with torch.autocast(name, dtype=torch.bfloat16):
        assert autocast_dtype(tensor) == torch.bfloat16
        with without_autocast(name):
            assert not torch.is_autocast_enabled(name)
"""


def test_autocast_of_devices_of_other_packages() -> None:
    """They are named and registered for the whole process."""
    subprocess.run([sys.executable, "-c", OTHER_DEVICES], check=True)


def test_autocast_of_packed_sequences(target: Target) -> None:
    query, key, value = (t.float().flatten(0, 1) for t in inputs(target))
    bounds = [
        torch.tensor(b, dtype=torch.int32, device=target.device) for b in ([0, 17, 34], [0, 23, 46])
    ]
    with torch.autocast(target.device, dtype=torch.bfloat16):
        out = flash_dmattn_varlen_func(query, key, value, *bounds, 17, 23, backend=target.backend)
    assert out.dtype == torch.bfloat16


def test_a_bound_function_has_the_same_signature(target: Target) -> None:
    bound = flash_dmattn_func_auto(target.backend, is_causal=True, window_size=5)
    signature = inspect.signature(bound)
    assert list(signature.parameters) == list(inspect.signature(flash_dmattn_func).parameters)
    assert signature.parameters["is_causal"].default is True
    assert signature.parameters["backend"].default == target.backend
    query, key, value = inputs(target)
    bias = randn(2, 1, 1, 23).to(query)
    options = {"is_causal": True, "window_size": 5, "backend": target.backend}
    want = flash_dmattn_func(query, key, value, None, bias, **options)
    assert torch.equal(bound(query, key, value, None, bias), want)
    dense = flash_dmattn_func(query, key, value, None, bias, backend=target.backend)
    assert torch.equal(bound(query, key, value, None, bias, None, False, window_size=None), dense)


def test_auto_follows_the_device() -> None:
    tensors = inputs(Target("cpu", "cpu"))
    assert torch.equal(flash_dmattn_func_auto()(*tensors), flash_dmattn_func(*tensors))


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: flash_dmattn_func_auto("cdua"), ValueError, r"got 'cdua'. Did you mean 'cuda'\?"),
        (
            lambda: flash_dmattn_func_auto(causal=True),
            TypeError,
            r"cannot bind causal; .*is_causal",
        ),
        (lambda: flash_dmattn_func_auto(query=1), TypeError, r"cannot bind query"),
    ],
)
def test_auto_refuses(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()  # type: ignore[operator]


def test_available_backends() -> None:
    available = flash_dmattn.get_available_backends()
    assert "cpu" in available
    assert "reference" in available
    assert ("cuda" in available) == flash_dmattn.CUDA_AVAILABLE
    assert not torch.cuda.is_available() or flash_dmattn.CUDA_AVAILABLE
    assert flash_dmattn.TRITON_AVAILABLE is ("triton" in available)
    assert flash_dmattn.FLEX_AVAILABLE is ("flex" in available)


@pytest.mark.parametrize("value, expected", [(None, False), ("0", False), ("1", True)])
def test_default_of_deterministic(
    value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flash_dmattn.arguments import resolved_deterministic

    monkeypatch.delenv("FLASH_DMATTN_DETERMINISTIC", raising=False)
    if value is not None:
        monkeypatch.setenv("FLASH_DMATTN_DETERMINISTIC", value)
    assert resolved_deterministic(None) is expected
    torch.use_deterministic_algorithms(True)
    try:
        assert resolved_deterministic(None) is True
    finally:
        torch.use_deterministic_algorithms(False)
    assert resolved_deterministic(True) is True
    assert resolved_deterministic(False) is False


@pytest.mark.parametrize("preference", ["cpu", "flex", "reference"])
def test_backend_by_environment(preference: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dmattn.backends import select_backend

    monkeypatch.setenv("FLASH_DMATTN_BACKEND", preference)
    assert select_backend(torch.device("cpu"), "auto").name == preference


def test_what_to_do_about_a_pack_of_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from flash_dmattn.backends import select_backend

    with pytest.raises(ValueError, match="or use backend=None, which follows the device"):
        select_backend(torch.device("cpu"), "cuda")
    monkeypatch.setenv("FLASH_DMATTN_BACKEND", "cuda")
    with pytest.raises(ValueError, match="or use FLASH_DMATTN_BACKEND=auto, which follows"):
        select_backend(torch.device("cpu"), "auto")


def test_public_names_are_there() -> None:
    for name in flash_dmattn.__all__:
        getattr(flash_dmattn, name)
        assert name in dir(flash_dmattn)
    with pytest.raises(AttributeError, match="no attribute 'flash_attn'"):
        _ = flash_dmattn.flash_attn


def test_import_needs_no_torch() -> None:
    """The package imports without torch; a name that needs torch explains the remedy."""
    script = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import flash_dmattn\n"
        "print(flash_dmattn.__version__)\n"
        "try:\n"
        "    flash_dmattn.flash_dmattn_func\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "which is not installed: pip install torch" in done.stdout


def test_import_is_light() -> None:
    script = "import sys, flash_dmattn; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("name", ["attn_mask", "attn_bias"])
@pytest.mark.parametrize("shape", [(2, 1), (1, 40), (1, 1), (2, 2, 1), (1, 2, 40), (2, 1, 1)])
def test_only_four_dimensions_are_broadcast(name: str, shape: tuple[int, ...]) -> None:
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 40, 2, 8)
    given = torch.ones(shape)
    if name == "attn_mask":
        given = given > 0
    text = rf"{name} with {len(shape)} dimensions must have shape .*; only with four dimensions"
    with pytest.raises(ValueError, match=text):
        flash_dmattn_func(query, key, key, **{name: given})
    if name == "attn_mask":
        with pytest.raises(ValueError, match=text):
            make_plan(query, key, given)
    whole = given.view(len(given), -1, 1, given.shape[-1])
    flash_dmattn_func(query, key, key, **{name: whole})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "causal",
            r"flash_dmattn_func\(\) got an unexpected keyword .* 'causal': it is called is_",
        ),
        ("sm_scale", "it is called softmax_scale here"),
        ("attention_mask", "it is called attn_mask here"),
        ("return_softmax_lse", "it is called return_lse here"),
        ("alibi_slopes", "attn_bias takes a bias for each key"),
        ("g", "forgetting_bias makes an attn_bias and an attn_mask"),
        ("dropout_p", "there is no dropout"),
        ("need_weights", "return_attn_probs=True returns the probabilities"),
        ("nothing", r"got an unexpected keyword argument 'nothing'$"),
    ],
)
def test_names_of_other_packages_are_told_ours(name: str, text: str) -> None:
    tensors = inputs(Target("cpu", "cpu"))
    for function in (flash_dmattn_func, flash_dmattn_func_auto("cpu")):
        with pytest.raises(TypeError, match=text):
            function(*tensors, **{name: True})
    with pytest.raises(TypeError, match=r"window_size must be an integer, .*sliding_window\(left"):
        flash_dmattn_func(*tensors, None, torch.zeros(2, 1, 1, 23), window_size=(128, 0))  # type: ignore[arg-type]
    bounds = torch.tensor([0, 17], dtype=torch.int32)
    packed = [t[0] for t in tensors]
    with pytest.raises(TypeError, match=r"flash_dmattn_varlen_func\(\) got an unexpected keyword"):
        flash_dmattn_varlen_func(*packed, bounds, bounds, 17, 23, **{name: True})


QUERY, LOG_FORGET = torch.zeros(1, 5, 2, 8), torch.zeros(1, 2, 5)
CALLS: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
    "dynamic_mask": (dynamic_mask, (torch.zeros(1, 1, 1, 5), 2)),
    "make_plan": (make_plan, (QUERY, QUERY)),
    "flash_dmattn_func": (flash_dmattn_func, (QUERY,) * 3),
    "pair_bias_attention": (pair_bias_attention, (QUERY[None],) * 3),
    "attention_reference": (attention_reference, (QUERY,) * 3),
    "forgetting_bias": (forgetting_bias, (LOG_FORGET,)),
    "context_parallel_dmattn": (
        context_parallel_dmattn,
        (QUERY, QUERY, QUERY, torch.zeros(1, 1, 1, 5), 2),
    ),
}


@pytest.mark.parametrize(
    ("function", "name", "hint"),
    [
        ("dynamic_mask", "causal", "it is called is_causal here"),
        ("dynamic_mask", "attn_mask", "it is called attention_mask here"),
        ("dynamic_mask", "cu_seqlens", "it is called cu_seqlens_q here"),
        ("dynamic_mask", "softmax_scale", ""),
        ("dynamic_mask", "sliding_window", ""),
        ("make_plan", "causal", "it is called is_causal here"),
        ("make_plan", "block_mask", "it is called attn_mask here"),
        ("make_plan", "alibi_slopes", ""),
        ("flash_dmattn_func", "max_seqlen_k", "flash_dmattn_varlen_func takes it"),
        ("flash_dmattn_func", "block_table", "flash_dmattn_varlen_func takes it"),
        ("pair_bias_attention", "scale", "it is called softmax_scale here"),
        ("attention_reference", "is_causal", "it is called causal here"),
        ("attention_reference", "attn_bias", "it is called bias here"),
        ("attention_reference", "dropout_p", "there is no dropout of probabilities"),
        ("forgetting_bias", "mask", "it is called padding here"),
        ("forgetting_bias", "g", "it is called log_forget here"),
        ("context_parallel_dmattn", "process_group", "it is called group here"),
        ("context_parallel_dmattn", "nothing", ""),
    ],
)
def test_each_function_tells_its_own_names(function: str, name: str, hint: str) -> None:
    called, arguments = CALLS[function]
    text = rf"^{function}\(\) got an unexpected keyword argument '{name}'{hint and f': {hint}'}$"
    with pytest.raises(TypeError, match=text):
        called(*arguments, **{name: None})
    kinds = {p.kind for p in inspect.signature(called).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
