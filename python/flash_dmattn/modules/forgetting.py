# SPDX-License-Identifier: BSD-3-Clause
"""Forgetting attention as a layer: projections, forget gates, and a cache of the remaining keys."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from .. import checks
from ..checks import flag
from ..forgetting import checked_prune, forgetting_attention, forgetting_bias
from ..forgetting_formula import bias_for_backend
from ..interface import flash_dmattn_func, flash_dmattn_varlen_func
from ..masks import IntervalMask
from ..selection import resolve_max_seqlen
from ..wrong_keywords import hide_unknown_keywords, refuse_keywords, with_keyword_hints
from .arguments import (
    check_backend,
    check_padding,
    check_parameter_dtype,
    check_positions,
    check_positive,
    checked_base,
    checked_heads,
    finite,
)
from .forgetting_cache import ForgettingCache
from .heads import normalize_and_rotate
from .projections import check_states, draw_parameters, project_to_heads

__all__ = ["ForgettingAttention"]


@with_keyword_hints
class ForgettingAttention(nn.Module):
    """Causal self-attention whose weights decay by learned forget gates.

    Each token has a gate for each KV head, ``sigmoid(f_proj(x))``. The score of query i and key j
    gets the logarithms of the gates j + 1 to i (FoX, arXiv:2503.02130). Keys that have decayed
    below ``prune`` are dropped, so time and memory follow the remaining keys.

    There is no position embedding by default, because decay distinguishes near from far keys.

    Gates start with half-lives spread over the heads: the weights of ``f_proj`` are small, and its
    biases let a key decay to one half in ``half_lives[0]`` tokens for the first head, in
    ``half_lives[1]`` for the last, and in geometric steps between.

    Except for ``f_proj`` and the norms, parameters have the names and shapes of a Llama layer's.
    Gates are summed in float64, whatever the dtype of the layer.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        num_gates: int | None = None,
        prune: float | None = -16.0,
        half_lives: tuple[float, float] = (8.0, 512.0),
        qk_norm: bool = True,
        rotary_base: float | None = None,
        softmax_scale: float | None = None,
        projection_bias: bool = False,
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
            num_gates: gates of a token, ``num_kv_heads`` (the default) or ``num_heads``.
            prune: drop a key for a query if the gates between them sum to less than this, as in
                `forgetting_bias`; None keeps every key. It may be changed later.
            half_lives: number of tokens in which the initial gates of the first and of the last
                head let a key decay to one half.
            qk_norm: normalize query and key of each head (RMS, arXiv:1910.07467).
            rotary_base: base of a rotary position embedding; None for none. D must be even.
            softmax_scale: multiplies the scores; ``D ** -0.5`` by default.
            projection_bias: give all projections an additive bias; ``f_proj`` always has one.
            norm_eps: added to the mean square in the norms.
            init_std: standard deviation of the initial weights.
            backend: as in `flash_dmattn_func`.
            device, dtype: of the parameters.

        Raises:
            TypeError: a size is not an integer, or half_lives is not a pair of numbers.
            ValueError: a size, number or name is invalid; the text gives the valid ones.
        """
        super().__init__()
        kv_heads, head_dim = checked_heads(embed_dim, num_heads, num_kv_heads, head_dim)
        gates = kv_heads if num_gates is None else num_gates
        check_positive(num_gates=gates)
        if gates not in (kv_heads, num_heads):
            raise ValueError(
                f"num_gates must be num_kv_heads={kv_heads} or num_heads={num_heads}, got {gates}"
            )
        rotary_base = None if rotary_base is None else checked_base(rotary_base, head_dim)
        softmax_scale = None if softmax_scale is None else finite("softmax_scale", softmax_scale)
        norm_eps = finite("norm_eps", norm_eps, minimum=0)
        init_std = finite("init_std", init_std, minimum=0)
        qk_norm, projection_bias = (
            flag("qk_norm", qk_norm),
            flag("projection_bias", projection_bias),
        )
        check_backend(backend)
        check_parameter_dtype(dtype)
        device = checks.device("device", device)
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_kv_heads = kv_heads
        self.head_dim = head_dim
        self.num_gates = gates
        self.prune = checked_prune(prune)
        self.half_lives = _checked_half_lives(half_lives)
        self.rotary_base = rotary_base
        self.softmax_scale = softmax_scale
        self.init_std = init_std
        self.backend = backend
        factory_kwargs: dict[str, Any] = {"device": device, "dtype": dtype}
        width, kv_width = num_heads * head_dim, kv_heads * head_dim
        self.q_proj = nn.Linear(embed_dim, width, projection_bias, **factory_kwargs)
        self.k_proj = nn.Linear(embed_dim, kv_width, projection_bias, **factory_kwargs)
        self.v_proj = nn.Linear(embed_dim, kv_width, projection_bias, **factory_kwargs)
        self.f_proj = nn.Linear(embed_dim, gates, **factory_kwargs)
        self.o_proj = nn.Linear(width, embed_dim, projection_bias, **factory_kwargs)
        self.q_norm = nn.RMSNorm(head_dim, norm_eps, **factory_kwargs) if qk_norm else None
        self.k_norm = nn.RMSNorm(head_dim, norm_eps, **factory_kwargs) if qk_norm else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weights from a normal distribution; set the gates' biases by the half-lives, other
        biases to 0, and norms to 1.
        """
        with torch.no_grad():
            draw_parameters(self, self.init_std)
            logits = [_logit_of_half_life(life) for life in self._half_life_of_each_gate()]
            self.f_proj.bias.copy_(torch.tensor(logits, dtype=torch.float64, device="cpu"))

    def extra_repr(self) -> str:
        """Show the settings that the projections do not show."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, num_gates={self.num_gates}, prune={self.prune}, "
            f"rotary_base={self.rotary_base}"
        )

    @hide_unknown_keywords
    def forward(
        self,
        hidden_states: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        position_ids: Tensor | None = None,
        cache: ForgettingCache | None = None,
        padding: Tensor | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Attend from each token of a batch to earlier tokens of its own sequence.

        Args:
            hidden_states: ``(B, N, embed_dim)``, of the parameters' dtype or under autocast; or
                packed sequences, ``(total, embed_dim)``, with ``cu_seqlens``.
            cu_seqlens: int32 ``(sequences + 1,)``: 0, then where each packed sequence ends.
            max_seqlen: at least the length of the longest packed sequence; by default read from the
                device, which synchronizes.
            position_ids: integers ``(N,)`` or ``(B, N)``, packed ``(total,)``, for a rotary
                embedding; by default counted in each sequence, starting at the cache's length.
            cache: of this layer; the tokens are appended to it, and attend to all that it holds.
                Gradients flow to the held tokens, unless `ForgettingCache.detach` is called.
            padding: bool ``(B, N)``, True is a token; others are never seen, and do not decay
                earlier tokens.

        Returns:
            A tensor of the shape of ``hidden_states``. A token that sees no key, such as padding on
            the left, gets zeros (and the bias of ``o_proj``).

        Raises:
            TypeError: an argument has the wrong type or dtype.
            ValueError: a shape does not fit, or arguments exclude each other; the text says how.
        """
        if unknown:
            refuse_keywords(ForgettingAttention.forward, unknown)
        self._check(hidden_states, cu_seqlens, position_ids, cache, padding)
        query, key, value = project_to_heads(self, hidden_states)
        query, key = normalize_and_rotate(self, query, key, position_ids, cu_seqlens, cache)
        log_forget = self.log_forget(hidden_states)
        if cache is None:
            out = self.attend(
                query,
                key,
                value,
                log_forget,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
                padding=padding,
            )
        else:
            out = cache.taken_in(
                key,
                value,
                log_forget,
                lambda *seen: self._attend(query, *seen),
                prune=self.prune,
                padding=padding,
            )
        result: Tensor = self.o_proj(out.flatten(-2))
        return result

    def log_forget(self, hidden_states: Tensor) -> Tensor:
        """Return the logarithms of the gates.

        Args:
            hidden_states: ``(B, N, embed_dim)``, or packed ``(total, embed_dim)``.

        Returns:
            ``(B, num_gates, N)``, or ``(num_gates, total)``, float32 (float64 for float64).
        """
        states = self.f_proj(hidden_states).transpose(-1, -2)
        # A gate's logits side by side, of whose derivative torch.compile expects the right strides.
        states = states.to(torch.promote_types(states.dtype, torch.float32)).contiguous()
        return logsigmoid(states)

    @hide_unknown_keywords
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        log_forget: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        padding: Tensor | None = None,
        **unknown: NoReturn,
    ) -> Tensor:
        """Compute the attention among the tokens. Subclasses may override this.

        Args:
            query, key, value: ``(B, N, heads, D)``, packed ``(total, heads, D)``.
            log_forget: of `log_forget`.
            cu_seqlens, max_seqlen, padding: as in `forward`.
        """
        if unknown:
            refuse_keywords(ForgettingAttention.attend, unknown)
        if cu_seqlens is None:
            return forgetting_attention(
                query,
                key,
                value,
                log_forget,
                self.prune,
                padding=padding,
                softmax_scale=self.softmax_scale,
                backend=self.backend,
            )
        bias, mask = forgetting_bias(log_forget, self.prune, cu_seqlens, padding=padding)
        keys = resolve_max_seqlen("max_seqlen", max_seqlen, cu_seqlens)
        bounds = (cu_seqlens, cu_seqlens, keys, keys)
        return self._attend(query, key, value, bias, mask, bounds)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        bias: Tensor,
        mask: IntervalMask | None,
        bounds: tuple[Tensor, Tensor, int, int] | None = None,
    ) -> Tensor:
        settings: dict[str, Any] = {
            "attn_mask": mask,
            "attn_bias": bias_for_backend(self.backend, bias),
            "softmax_scale": self.softmax_scale,
            "is_causal": True,
            "backend": self.backend,
        }
        if bounds is None:
            out = flash_dmattn_func(query, key, value, **settings)
        else:
            out = flash_dmattn_varlen_func(query, key, value, *bounds, **settings)
        assert isinstance(out, Tensor)
        return out

    def _half_life_of_each_gate(self) -> list[float]:
        shortest, longest_life = self.half_lives
        if self.num_gates == 1:
            return [math.sqrt(shortest * longest_life)]
        ratio = longest_life / shortest
        last = self.num_gates - 1
        return [shortest * ratio ** (gate / last) for gate in range(self.num_gates)]

    def _check(
        self,
        hidden_states: Tensor,
        cu_seqlens: Tensor | None,
        position_ids: Tensor | None,
        cache: ForgettingCache | None,
        padding: Tensor | None,
    ) -> None:
        check_states(self, hidden_states, cu_seqlens)
        if cache is not None:
            if not isinstance(cache, ForgettingCache):
                checks.refuse_type("cache", "a ForgettingCache or None", cache)
            if cu_seqlens is not None:
                raise ValueError("cache cannot be combined with cu_seqlens; pad the sequences")
        if padding is not None:
            check_padding(padding, hidden_states, cu_seqlens)
        if position_ids is not None:
            check_positions(position_ids, hidden_states)


def _logit_of_half_life(tokens: float) -> float:
    """Return x such that ``sigmoid(x) ** tokens`` is one half."""
    return -math.log(math.expm1(math.log(2) / tokens))


def _checked_half_lives(half_lives: Any) -> tuple[float, float]:
    if not isinstance(half_lives, (tuple, list)) or len(half_lives) != 2:
        raise TypeError(f"half_lives must be a pair of numbers, got {checks.described(half_lives)}")
    shortest, longest_life = (finite("half_lives", life) for life in half_lives)
    if not 0 < shortest <= longest_life:
        raise ValueError(
            f"half_lives must be positive and not fall, got {shortest} and {longest_life}"
        )
    return shortest, longest_life
