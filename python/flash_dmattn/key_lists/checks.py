# SPDX-License-Identifier: BSD-3-Clause
"""Rules for the list arguments. The core has the rules for all other arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from flash_dmattn.backends.shapes import check_attention
from flash_dmattn.checks import is_one_of
from flash_dmattn.record import KeyListInputs

# A latent cache of 512 columns plus 64 rotated ones.
MAX_LISTED_HEAD_DIM = 576
_BIASES = (torch.float16, torch.bfloat16, torch.float32)


def check_key_lists(inputs: KeyListInputs) -> None:
    """Raise TypeError or ValueError with the argument, its value and the allowed values."""
    check_attention(
        inputs.without_lists(),
        read_lengths=inputs.query.device.type == "cpu",
        allows_other_value_dim=True,
        max_head_dim=MAX_LISTED_HEAD_DIM,
    )
    indices, index_bias, bias = inputs.indices, inputs.index_bias, inputs.bias
    heads, kv_heads = inputs.query.shape[-2], inputs.key.shape[-2]
    if indices.dtype != torch.int32:
        raise TypeError(
            f"key_indices must have dtype torch.int32, got {indices.dtype}; "
            "key_indices.to(torch.int32) is one"
        )
    _check_shape("key_indices", indices, {"Hk": kv_heads}, inputs)
    if index_bias is not None:
        if index_bias.dtype not in (*_BIASES, inputs.query.dtype):
            raise TypeError(
                "index_bias must have dtype torch.float16, torch.bfloat16 or torch.float32, got "
                f"{index_bias.dtype}"
            )
        sizes = {"H": heads, "Hk": kv_heads}
        _check_shape("index_bias", index_bias, sizes, inputs, indices.shape[-1])
    if bias is not None and bias.shape[-2] != 1:
        raise ValueError(
            "attn_bias must be the same for every query with key_indices, such as "
            f"(B, {{H|Hk|1}}, 1, K) or packed ({{H|Hk|1}}, 1, total_k), got {tuple(bias.shape)}; "
            "index_bias has one for each listed key of each query"
        )


def _check_shape(
    name: str,
    tensor: Tensor,
    heads: dict[str, int],
    inputs: KeyListInputs,
    length: int | None = None,
) -> None:
    """Raise ValueError unless a tensor has a list of the given length for each query."""
    batch: tuple[int, ...] = () if inputs.packed else (inputs.query.shape[0],)
    queries = inputs.query.shape[0 if inputs.packed else 1]
    shape = tuple(tensor.shape)
    if (
        len(shape) == len(batch) + 3
        and shape[:-3] == batch
        and is_one_of(shape[-3], 1, *heads.values())
        and shape[-2] == queries
        and (length is None or length == shape[-1])
    ):
        return
    choice = "|".join(map(str, dict.fromkeys((*heads.values(), 1))))
    form = f"{{{'|'.join(heads)}|1}}, {'total_q' if inputs.packed else 'Q'}, k"
    sizes = f"{{{choice}}}, {queries}, {'any k' if length is None else length}"
    if batch:
        form, sizes = f"B, {form}", f"{batch[0]}, {sizes}"
    raise ValueError(f"{name} must have shape ({form}) = ({sizes}), got {shape}")
