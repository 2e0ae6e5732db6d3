# SPDX-License-Identifier: BSD-3-Clause
"""Dynamic mask attention as a layer: projections, a bias learned from the values, and a window."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from .. import checks
from ..arguments import to_4d
from ..checks import flag, is_one_of
from ..interface import flash_dmattn_func, flash_dmattn_varlen_func
from ..masks import IntervalMask
from ..record import KeyCounts
from ..reference import per_query_head
from ..selection import (
    keeps_all,
    key_counts,
    refuse_without_window,
    resolve_max_seqlen,
    without_nan,
)
from ..state.chunks import described_call
from ..wrong_keywords import hide_unknown_keywords, refuse_keywords, with_keyword_hints
from .arguments import (
    check_backend,
    check_bias_form,
    check_keys,
    check_padding,
    check_parameter_dtype,
    check_positions,
    check_positive,
    checked_base,
    checked_heads,
    finite,
)
from .cache import AttentionCache
from .fusing import fused_step
from .heads import normalize_and_rotate
from .projections import check_states, draw_parameters, project_to_heads

__all__ = ["DynamicMaskAttention"]


@with_keyword_hints
class DynamicMaskAttention(nn.Module):
    """Self-attention of each query to the last keys, and to those others with the largest bias.

    The bias of a key is learned from its value vector, one number for each KV head:

        bias = A * softplus(dt_proj(V))             bias_form="softplus"
        bias = exp(A * softplus(dt_proj(V)))        bias_form="exp"

    It is added to the scaled scores, through which it learns. It also selects the kept keys; no
    gradient flows through the selection. The second form is that of "Trainable Dynamic Mask Sparse
    Attention" (arXiv:2508.02124) and of the Doge models in transformers. The first is its
    logarithm. It keeps the same keys, cannot overflow, and the models of flash-dmattn 1.2.2 use it.

    Defaults are those of the Doge models, except where noted:

    * RMS norm of query and key, rotary base 10000, projections without a bias, weights drawn from a
      normal distribution with standard deviation 0.02.
    * 1024 keys by bias besides the last 1024, which learns better than Doge's 2048 by bias alone:
      ``window_size=2048, keep_last=0``.
    * bias_form is "softplus", because a large A makes "exp" infinite. Doge's weights need "exp".
    * A starts as small random numbers, as in flash-dmattn 1.2.2. Doge starts at 0: then all biases
      are equal, and the first keys are kept.
    * No dropout of probabilities; Doge's is 0, too.

    Parameters have the names and shapes of a Doge layer's, whose state dict can be loaded. Except
    for ``A``, ``dt_proj`` and the norms they are also those of a Llama layer. softplus, exp and the
    rotation are computed in float32 (float64 for float64). The bias stays float32, because many
    keys would tie in 16 bits.
    """

    keep_last: int = 0  # for layers that were pickled without the attribute
    keep_first: int = 0

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        window_size: int | None = 1024,
        keep_last: int | None = None,
        keep_first: int = 0,
        is_causal: bool = True,
        bias_form: str = "softplus",
        qk_norm: bool = True,
        rotary_base: float | None = 10000.0,
        softcap: float = 0.0,
        softmax_scale: float | None = None,
        projection_bias: bool = False,
        sink: bool = False,
        norm_eps: float = 1e-6,
        init_std: float = 0.02,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a layer with random weights.

        Args:
            embed_dim: width of the input and the output.
            num_heads: H, number of query heads.
            num_kv_heads: Hk, number of key and value heads, a divisor of H. H by default.
            head_dim: D, from 1 to 256. ``embed_dim / num_heads`` by default.
            window_size: number of keys that a query keeps of those that it sees. None, or at least
                as many as there are keys, keeps all.
            keep_last, keep_first: also keep this many of the last and first tokens that a query
                sees. The window then selects among the others, and may be 0. A causal layer's
                keep_last defaults to ``window_size``. Doge's weights need ``keep_last=0``.
            is_causal: a query sees itself and earlier tokens. Otherwise all queries keep the same
                keys.
            bias_form: "softplus" or "exp", see above.
            qk_norm: normalize query and key of each head (RMS, arXiv:1910.07467) before the
                rotation.
            rotary_base: base of the rotary position embedding; None for none. D must be even.
            softcap: if positive, scores become ``softcap * tanh(score / softcap)``.
            softmax_scale: multiplies the scores; ``D ** -0.5`` by default.
            projection_bias: give all projections an additive bias.
            sink: give each head a learned score ``sink``, ``(H,)``, that takes a share of each
                row's softmax and has no value. Doge weights do not have it.
            norm_eps: added to the mean square in the norms.
            init_std: standard deviation of the initial weights.
            backend: as in `flash_dmattn_func`.
            device, dtype: of the parameters.

        Raises:
            TypeError: a size is not an integer.
            ValueError: a size, number or name is invalid; the text gives the valid ones.
        """
        super().__init__()
        kv_heads, head_dim = checked_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        is_causal = flag("is_causal", is_causal)
        if keep_last is None:
            keep_last = window_size if is_causal and window_size is not None else 0
        if window_size is None:
            refuse_without_window(keep_last, keep_first)
        elif not key_counts(window_size, keep_last, keep_first).keeps_first_or_last:
            check_positive(window_size=window_size)
        elif not is_causal:
            refuse_without_window(keep_last, keep_first, "with is_causal=False")
        check_bias_form(bias_form)
        rotary_base = None if rotary_base is None else checked_base(rotary_base, head_dim)
        softcap = finite("softcap", softcap, minimum=0)
        softmax_scale = None if softmax_scale is None else finite("softmax_scale", softmax_scale)
        norm_eps = finite("norm_eps", norm_eps, minimum=0)
        init_std = finite("init_std", init_std, minimum=0)
        qk_norm = flag("qk_norm", qk_norm)
        projection_bias, sink = flag("projection_bias", projection_bias), flag("sink", sink)
        check_backend(backend)
        check_parameter_dtype(dtype)
        device = checks.device("device", device)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self.window_size = window_size
        self.keep_last = keep_last
        self.keep_first = keep_first
        self.is_causal = is_causal
        self.bias_form = bias_form
        self.rotary_base = rotary_base
        self.softcap = softcap
        self.softmax_scale = softmax_scale
        self.init_std = init_std
        self.backend = backend
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        width, kv_width = num_heads * head_dim, kv_heads * head_dim
        self.q_proj = nn.Linear(embed_dim, width, projection_bias, **factory_kwargs)
        self.k_proj = nn.Linear(embed_dim, kv_width, projection_bias, **factory_kwargs)
        self.v_proj = nn.Linear(embed_dim, kv_width, projection_bias, **factory_kwargs)
        self.A = nn.Parameter(torch.empty(kv_heads, **factory_kwargs))
        self.dt_proj = nn.Linear(kv_width, kv_heads, projection_bias, **factory_kwargs)
        self.o_proj = nn.Linear(width, embed_dim, projection_bias, **factory_kwargs)
        self.q_norm = nn.RMSNorm(head_dim, norm_eps, **factory_kwargs) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, norm_eps, **factory_kwargs) if qk_norm else None
        self.sink = nn.Parameter(torch.empty(num_heads, **factory_kwargs)) if sink else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights, A and sink from a normal distribution; set biases to 0 and norms to 1."""
        with torch.no_grad():
            draw_parameters(self, self.init_std)
            nn.init.normal_(self.A, std=self.init_std)
            if self.sink is not None:
                nn.init.normal_(self.sink, std=self.init_std)

    def extra_repr(self) -> str:
        """Show the settings that the projections do not show."""
        keep_counts = {"keep_last": self.keep_last, "keep_first": self.keep_first}
        kept = "".join(f"{name}={count}, " for name, count in keep_counts.items() if count)
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, window_size={self.window_size}, {kept}"
            f"is_causal={self.is_causal}, bias_form={self.bias_form!r}, "
            f"rotary_base={self.rotary_base}, softcap={self.softcap}, "
            f"sink={self.sink is not None}"
        )

    @hide_unknown_keywords
    def forward(
        self,
        hidden_states: Tensor,
        attn_mask: Tensor | IntervalMask | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        position_ids: Tensor | None = None,
        cache: AttentionCache | None = None,
        padding: Tensor | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Attend from each token of a batch to the tokens of its own sequence.

        Args:
            hidden_states: ``(B, N, embed_dim)``, of the parameters' dtype or under autocast; or
                packed sequences, ``(total, embed_dim)``, with ``cu_seqlens``.
            attn_mask: what can be seen besides causality; the window selects within it. As in
                `flash_dmattn_func`, with K keys, including those of the cache: bool ``(B, K)`` for
                padding, any other boolean form, or an `IntervalMask`. With a window that drops keys
                an `IntervalMask` is converted to a boolean mask, of O(N x K) memory. With
                ``cu_seqlens`` as in `flash_dmattn_varlen_func`, boolean if a window drops keys.
            cu_seqlens: int32 ``(sequences + 1,)``: 0, then where each packed sequence ends.
            max_seqlen: at least the length of the longest packed sequence; by default read from the
                device, which synchronizes.
            position_ids: integers ``(N,)`` or ``(B, N)``, packed ``(total,)``, for the rotary
                embedding; by default counted in each sequence, starting at the cache's length.
            cache: of this layer; the tokens are appended to it, and attend to all that it holds.
                With a window it keeps the keys that later tokens can see, with their gradients.
            padding: bool ``(B, N)``, of these tokens only, True is a token; others are never seen,
                not even by later calls with the cache.

        Returns:
            A tensor of the shape of ``hidden_states``. A token that sees no key, such as padding on
            the left, gets zeros (and the bias of ``o_proj``).

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: a shape does not fit, or arguments exclude each other; the text says how.
        """
        if unknown:
            refuse_keywords(DynamicMaskAttention.forward, unknown)
        excluded = attn_mask, position_ids, cu_seqlens, padding
        step = fused_step(self, DynamicMaskAttention, hidden_states, cache, *excluded)
        if step is not None:
            assert cache is not None
            assert cache.kept is not None
            return step(self, hidden_states, cache.kept)
        self._check(hidden_states, attn_mask, cu_seqlens, position_ids, cache, padding)
        query, key, value = project_to_heads(self, hidden_states)
        bias = self.key_bias(value)
        query, key = normalize_and_rotate(self, query, key, position_ids, cu_seqlens, cache)
        counts = self._counts()
        # A bias of -inf marks padding. A token with such a bias gets NaN: it counts for keep_last
        # and keep_first, but is not kept.
        is_marked = counts.keeps_first_or_last and not (cache is None and padding is None)
        if is_marked:
            bias = bias.masked_fill(bias == -torch.inf, torch.nan)
        keeps_window = cache is not None and cache.keeps_window(self.window_size, attn_mask)
        if keeps_window and isinstance(attn_mask, Tensor):
            new = attn_mask[:, attn_mask.shape[1] - hidden_states.shape[1] :]
            padding, attn_mask = new if padding is None else new & padding, None
        if padding is not None:
            bias = bias.masked_fill(~padding[:, None, None], -torch.inf)

        def attend(key: Tensor, value: Tensor, bias: Tensor) -> Tensor:
            mask = attn_mask
            if is_marked and bias.shape[3] > counts.total:
                mask = _mask_marked_padding(attn_mask, query, bias)
            return self.attend(
                query, key, value, bias, mask, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen
            )

        if cache is None:
            out = attend(key, value, bias)
        else:
            settings = self.softmax_scale, self.softcap, self.backend, counts
            call = described_call(query, self.sink, settings)
            kept_counts = counts if keeps_window else None
            out = cache.taken_in(
                key, value, bias, attend, call, counts=kept_counts, backend=self.backend
            )
        result: Tensor = self.o_proj(out.flatten(-2))
        return result

    def key_bias(self, value: Tensor) -> Tensor:
        """Return the bias of each key.

        Args:
            value: ``(B, N, Hk, D)``, or packed ``(total, Hk, D)``.

        Returns:
            ``(B, Hk, 1, N)``, or ``(Hk, 1, total)``, float32 (float64 for float64).
        """
        states = self.dt_proj(value.flatten(-2)).transpose(-1, -2)
        # Makes each head's biases contiguous. This also avoids a gradient of softplus whose strides
        # differ from its input's; torch.compile (torch 2.13) assumes wrong strides for it.
        states = states.to(torch.promote_types(states.dtype, torch.float32)).contiguous()
        bias = self.A.unsqueeze(-1) * softplus(states)
        if self.bias_form == "exp":
            bias = bias.exp()
        return bias.unsqueeze(-2)

    @hide_unknown_keywords
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        attn_mask: Tensor | IntervalMask | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Compute the attention between the projections. Subclasses may override this.

        Args:
            query: ``(B, N, H, D)``, or packed ``(total, H, D)``.
            key, value: ``(B, K, Hk, D)``, or packed ``(total, Hk, D)``.
            bias: ``(B, Hk, 1, K)``, or packed ``(Hk, 1, total)``.
            attn_mask, cu_seqlens, max_seqlen: as in `forward`.

        Returns:
            A tensor of query's shape.
        """
        if unknown:
            refuse_keywords(DynamicMaskAttention.attend, unknown)
        settings: dict[str, Any] = {
            "attn_mask": attn_mask,
            "attn_bias": bias,
            "softmax_scale": self.softmax_scale,
            "is_causal": self.is_causal,
            "softcap": self.softcap,
            "sink": self.sink,
            "backend": self.backend,
        }
        if cu_seqlens is None:
            keys = key.shape[1]
        else:
            keys = resolve_max_seqlen("max_seqlen", max_seqlen, cu_seqlens)
        if self.window_size is not None:
            counts = self._counts()
            selects = {
                "window_size": self.window_size,
                "keep_last": self.keep_last,
                "keep_first": self.keep_first,
            }
            if not isinstance(attn_mask, IntervalMask):
                settings |= selects
            elif keeps_all(counts, keys):
                settings["attn_bias"] = without_nan(bias)
            else:
                settings |= selects
                if cu_seqlens is None:
                    # Makes the kept keys independent of the form of the mask.
                    settings["attn_mask"] = attn_mask.to_bool(query.shape[1])
        if cu_seqlens is None:
            out = flash_dmattn_func(query, key, value, **settings)
        else:
            bounds = (cu_seqlens, cu_seqlens, keys, keys)
            out = flash_dmattn_varlen_func(query, key, value, *bounds, **settings)
        assert isinstance(out, Tensor)
        return out

    def _counts(self) -> KeyCounts:
        if self.window_size is None:
            return KeyCounts()
        return KeyCounts(self.window_size, self.keep_last, self.keep_first)

    def _check(
        self,
        hidden_states: Tensor,
        attn_mask: Tensor | IntervalMask | None,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        cache: AttentionCache | None,
        padding: Tensor | None,
    ) -> None:
        check_states(self, hidden_states, cu_seqlens)
        if isinstance(attn_mask, Tensor) and attn_mask.dtype != torch.bool:
            raise TypeError(
                f"attn_mask must have dtype torch.bool (True can be seen), got {attn_mask.dtype}"
            )
        if cache is not None:
            if not isinstance(cache, AttentionCache):
                checks.refuse_type("cache", "an AttentionCache or None", cache)
            if cu_seqlens is not None:
                raise ValueError("cache cannot be combined with cu_seqlens; pad the sequences")
            if not self.is_causal:
                raise ValueError("cache needs is_causal=True: earlier tokens see no later ones")
        if isinstance(attn_mask, (Tensor, IntervalMask)) and cu_seqlens is None:
            held = 0 if cache is None else cache.known_length
            if held is not None:
                check_keys(attn_mask, hidden_states.shape[1], held)
        if padding is not None:
            check_padding(padding, hidden_states, cu_seqlens)
        if position_ids is not None:
            check_positions(position_ids, hidden_states)


def _mask_marked_padding(
    attn_mask: Tensor | IntervalMask | None, query: Tensor, bias: Tensor
) -> Tensor:
    """Return a mask without the keys that a bias of -inf marks as padding."""
    seen = bias.detach() != -torch.inf
    if attn_mask is None:
        return seen
    if isinstance(attn_mask, IntervalMask):
        attn_mask = attn_mask.to_bool(query.shape[1])
    (batch, _, heads, _), (_, kv_heads, _, keys) = query.shape, seen.shape
    sizes = {"batch": batch, "heads": heads, "kv_heads": kv_heads, "keys": keys}
    attn_mask = to_4d("attn_mask", attn_mask, **sizes)
    of_batch, of_heads = attn_mask.shape[:2]
    if not (is_one_of(of_batch, 1, batch) and is_one_of(of_heads, 1, kv_heads, heads)):
        return attn_mask  # which attention refuses
    return attn_mask & (per_query_head(seen, heads, kv_heads) if of_heads == heads else seen)
