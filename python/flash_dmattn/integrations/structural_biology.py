# SPDX-License-Identifier: BSD-3-Clause
"""The attention functions of structural biology, with the arguments that its models use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from flash_dmattn import checks
from flash_dmattn.arguments import autocast_dtype
from flash_dmattn.checks import flag
from flash_dmattn.pair_bias import pair_bias_attention

__all__ = ["backend_of", "evoformer_attention", "triangle_attention"]

# The score of a masked key. It has an effect only if all keys are masked.
_MASKED = -1e9
# Elements of scores in memory at a time, to find the largest.
_ELEMENTS_AT_ONCE = 1 << 24


def triangle_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    scale: float | None = None,
    return_aux: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Compute ``cuequivariance_torch.triangle_attention``, also on CPUs.

    All lengths follow the same rule, and D is from 1 to 256. A row whose keys are all masked gives
    the mean of its values, as in the original, where masked scores become -1e9. float32 tensors on
    a GPU are computed by ``backend="triton"``, in products of float32 without TF32.

    Args:
        q: ``(B, N, H, Q, D)``; if B is 1 it may be omitted, also below.
        k, v: ``(B, N, H, K, D)``.
        bias: ``(B, 1, H, Q, K)``, added to the scaled scores.
        mask: ``(B, N, 1, 1, K)``, nonzero for present keys.
        scale: of the scores; ``D ** -0.5`` by default.
        return_aux: also return the log-sum-exp and the largest of each row's scores.

    Returns:
        ``(B, N, H, Q, D)``; with return_aux also two float32 ``(B, N, H, Q)``, which have no
        gradient. The largest score is computed by plain PyTorch, in row chunks.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_dmattn_func`.
    """
    return_aux = flag("return_aux", return_aux)
    q, k, v, bias = (
        _to_5d(name, tensor) for name, tensor in (("q", q), ("k", k), ("v", v), ("bias", bias))
    )
    keys = k.shape[3] if bias.shape[4] == 1 else bias.shape[4]
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[:2] != q.shape[:2] or tensor.shape[3] != keys:
            raise ValueError(
                f"{name} must have shape (B, N, H, K, D), with B, N = {tuple(q.shape[:2])} as q "
                f"and K={keys} as bias, got {tuple(tensor.shape)}"
            )
    bias = _of_scores("bias", bias, q)
    kept = None if mask is None else _to_5d("mask", mask) != 0
    found = pair_bias_attention(
        q.transpose(2, 3),
        k.transpose(2, 3),
        v.transpose(2, 3),
        attn_mask=kept,
        attn_bias=bias,
        softmax_scale=scale,
        return_lse=return_aux,
        backend=backend_of(q),
    )
    out, lse = found if isinstance(found, tuple) else (found, None)
    out = out.transpose(2, 3)
    if kept is not None and k.shape[3]:
        any_kept = kept.any(-1, keepdim=True)
        out = torch.where(any_kept, out, v.mean(3, keepdim=True))
    if lse is None:
        return out
    with torch.no_grad():
        return out, *_aux(q, k, bias, kept, scale, lse.detach())


def evoformer_attention(
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    biases: Sequence[Tensor | None],
) -> Tensor:
    """Compute DeepSpeed's ``DS4Sci_EvoformerAttention``, also on CPUs, for any length.

    float32 tensors on a GPU are computed as by `triangle_attention`.

    Args:
        Q, K, V: ``(B, N, S, H, D)``.
        biases: a sequence of at most two, each may be None: of the keys ``(B, N, 1, 1, S)``, and of
            the pairs ``(B, 1, H, S, S)``. Both are differentiable. The sequence is not modified.

    Returns:
        ``(B, N, S, H, D)``.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `flash_dmattn_func`.
    """
    if not _is_sequence(biases):
        wanted = "a sequence of at most two tensors, such as [of_keys, of_pairs]"
        checks.refuse_type("biases", wanted, biases)
    tensors = list(biases)
    if len(tensors) > 2:
        raise ValueError(f"biases must be at most two tensors, got {len(tensors)}")
    of_keys, of_pairs = (*tensors, None, None)[:2]
    checks.tensor("Q", Q)
    if Q.dim() != 5:
        raise ValueError(f"Q must have shape (B, N, S, H, D), got {tuple(Q.shape)}")
    for name, tensor in (("K", K), ("V", V)):
        if checks.tensor(name, tensor).dim() != 5 or tensor.shape[:3] != Q.shape[:3]:
            raise ValueError(
                f"{name} must have shape (B, N, S, H, D), with B, N, S = {tuple(Q.shape[:3])} as "
                f"Q, got {tuple(tensor.shape)}"
            )
    outer, inner, length, heads, _ = Q.shape
    shapes = ((outer, inner, 1, 1, length), (outer, 1, heads, length, length))
    for number, (bias, shape) in enumerate(zip((of_keys, of_pairs), shapes, strict=True)):
        if bias is None:
            continue
        checks.tensor(f"biases[{number}]", bias)
        if tuple(bias.shape) != shape:
            raise ValueError(
                f"biases[{number}] must have shape {shape}, got {tuple(bias.shape)}; biases are "
                "[of keys, of pairs], and each may be None"
            )
    of_keys, of_pairs = (
        None if bias is None else _of_scores(f"biases[{number}]", bias, Q)
        for number, bias in enumerate((of_keys, of_pairs))
    )
    out = pair_bias_attention(Q, K, V, attn_bias=of_pairs, key_bias=of_keys, backend=backend_of(Q))
    assert isinstance(out, Tensor)
    return out


def _is_sequence(biases: object) -> bool:
    """Say whether these are numbered, as those of a deque or an nn.ParameterList are, too."""
    if isinstance(biases, (Tensor, str, bytes, Mapping)):
        return False
    return all(hasattr(type(biases), name) for name in ("__len__", "__getitem__"))


def backend_of(query: Tensor) -> str | None:
    """Return the backend: triton for float32 on a GPU, which no kernel pack computes."""
    is_float32 = query.dtype == torch.float32 and autocast_dtype(query) is None
    return "triton" if is_float32 and query.is_cuda else None


def _of_scores(name: str, bias: Tensor, query: Tensor) -> Tensor:
    """Return a bias in query's dtype or float32."""
    if bias.dtype == torch.bool or bias.is_complex():
        raise TypeError(f"{name} must hold real numbers, got {bias.dtype}")
    return bias if bias.dtype in (query.dtype, torch.float32) else bias.to(torch.float32)


def _to_5d(name: str, tensor: Tensor) -> Tensor:
    checks.tensor(name, tensor)
    if tensor.dim() not in (4, 5):
        raise ValueError(
            f"{name} must have five dimensions, or four where the batch is 1, got "
            f"{tuple(tensor.shape)}"
        )
    return tensor.unsqueeze(0) if tensor.dim() == 4 else tensor


def _aux(
    q: Tensor, k: Tensor, bias: Tensor, kept: Tensor | None, scale: float | None, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return lse and the largest score of each row, with masked scores of -1e9."""
    queries, keys = q.shape[3], k.shape[3]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    largest = torch.empty_like(lse)
    if keys == 0:
        return lse, largest.fill_(_MASKED)
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, lse.numel() // max(1, queries) * keys))
    for begin in range(0, queries, rows):
        part = slice(begin, begin + rows)
        scores = q[:, :, :, part].float() @ k.float().transpose(-1, -2) * factor
        scores = scores + bias[:, :, :, part]
        if kept is not None:
            scores = scores.masked_fill(~kept, _MASKED)
        largest[:, :, :, part] = scores.amax(-1)
    if kept is not None:
        lse = torch.where(kept.any(-1), lse, _MASKED)
    return lse, largest
