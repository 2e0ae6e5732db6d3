# SPDX-License-Identifier: BSD-3-Clause
"""Known failures of other projects' tests, with reasons; any other failure is a defect."""

from __future__ import annotations

import re
from typing import NamedTuple


class Accepted(NamedTuple):
    """Patterns of a failure: one of "suite::test", one of the error's type and text."""

    test: str
    error: str
    reason: str


ACCEPTED = (
    Accepted(
        "fa2::test_flash_attn_kvcache_paged_block_table_bounds",
        "DID NOT RAISE|NoCounterpartError: keys appended beyond the block_table",
        "that a paged cache is too short is not checked on a GPU, and appending is the caller's",
    ),
    Accepted(
        # With all weight on one key, the gradient of its value is a sum of output gradients. Plain
        # PyTorch and the reference compute the same float32 sum. Another order sometimes lands on
        # the other side of a tie, one unit in the last place away.
        r"fa2::test_flash_attn_splitkv\[seqlen_q=1, .*swap_sq_sk=True.* dtype=float16\]",
        r"assert \(dv - dv_ref\).* dV max diff: 0\.0[0-3]\d*;.* dV Pytorch max diff: 0\.0(;|$)",
        "a float16 sum over queries rounded to the neighbour of what another order rounds to",
    ),
    Accepted("fa[234]", "NoCounterpartError: head dimension", "head dimensions above 256"),
    Accepted(
        "fa4::test_flash_attn_varlen_cumsum_metadata_paths",
        "'NoneType' object has no attribute 'tile_count_semaphore'",
        "FlashAttention 4's scheduler metadata",
    ),
    Accepted(
        "fa3",
        r"OutOfMemoryError: .*Tried to allocate ([4-9]\d|\d{3,})\.\d+ GiB",
        "tests that ask for more memory than the GPU has",
    ),
    Accepted(
        "transformers",
        "NotImplementedError: .*computes attention in its own code and calls no registered",
        "models that compute attention in their own code, which apply_flash_dmattn refuses",
    ),
    Accepted(
        "transformers::deepseek_vl_hybrid/",
        "KeyError: 'flash_dmattn'",
        "SAM's attention comes from a table of classes, which has no registered functions",
    ),
    Accepted(
        # transformers 5.17 to 5.24: GptOssModel passes no position_ids to create_causal_mask.
        "transformers::gpt_oss/.*test_flash_attention_2_padding_matches_padding_free",
        "AssertionError: Tensor-likes are not close",
        "gpt-oss makes masks without position_ids, so that eager attention joins packed sequences",
    ),
    Accepted(
        # Python refuses the call itself: cu_seq_lens_q is both an argument and in its **kwargs.
        "transformers::qwen2_5_omni/.*test_flash_attention_2_padding_matches_padding_free.*fa_kwargs",
        "TypeError: .*got multiple values for keyword argument 'cu_seq_lens_q'",
        "Qwen 2.5 Omni passes cu_seq_lens_q twice to any flash attention",
    ),
    Accepted("fa[234]", "NoCounterpartError: dropout", "dropout of probabilities"),
    Accepted("fa[34]", "NoCounterpartError: qv", "second queries (qv)"),
    Accepted("fa[34]", "NoCounterpartError: fp8", "8-bit floats"),
    Accepted("fa4", "NoCounterpartError: arguments", "arguments that only FlashAttention 4 has"),
)


def reason_for(test: str, error: str) -> str | None:
    """Return why a failure is accepted, or None if it is not.

    Args:
        test: "suite::test" with its parameters.
        error: the type of the exception and its text.
    """
    for entry in ACCEPTED:
        if re.match(entry.test, test) and re.search(entry.error, error):
            return entry.reason
    return None
