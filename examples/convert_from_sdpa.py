# SPDX-License-Identifier: BSD-3-Clause
"""Turn a model trained with scaled_dot_product_attention into one with dynamic mask attention.

Shows that the converted model first computes the same outputs and gradients; that it continues to
learn, now with a bias; and what a window then costs in loss, before and after a few steps.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from flash_dmattn import DynamicMaskAttention
from small_lm import DEVICE, Block, LanguageModel, load_text, make_parser, random_pieces

HEADS, KV_HEADS = 4, 2


class SdpaAttention(nn.Module):
    """Causal grouped-query attention in a common form, which is to be converted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head_dim = width // HEADS
        kv_width = KV_HEADS * self.head_dim
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_width, bias=False)
        self.v_proj = nn.Linear(width, kv_width, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        key, value = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
        projected: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return projected


def convert(model: LanguageModel, width: int) -> tuple[LanguageModel, list[DynamicMaskAttention]]:
    """Return a copy and its new attention layers, without a window and with biases of 0."""
    model, layers = copy.deepcopy(model), []
    for block in model.blocks:
        assert isinstance(block, Block)
        # The old layer has no norms of query and key, and no rotation.
        layer = DynamicMaskAttention(
            width, HEADS, KV_HEADS, window_size=None, qk_norm=False, rotary_base=None
        ).to(DEVICE)
        missing, unexpected = layer.load_state_dict(block.attention.state_dict(), strict=False)
        assert (sorted(missing), unexpected) == (["A", "dt_proj.weight"], [])
        nn.init.zeros_(layer.A)  # bias = A * softplus(...) = 0: nothing changes yet
        block.attention = layer
        layers.append(layer)
    return model, layers


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="training steps of each stage")
    parser.add_argument("--context", type=int, default=192, help="bytes in a sequence")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    text, held_out = load_text()
    test = random_pieces(held_out, 16, options.context)

    def train(model: LanguageModel) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        for _ in range(options.steps):
            optimizer.zero_grad()
            model.loss(*random_pieces(text, 4, options.context)).backward()
            optimizer.step()

    def report(title: str, model: LanguageModel) -> float:
        with torch.no_grad():
            loss = model.loss(*test).item()
        print(f"{title:44} held-out loss {loss:.4f}")
        return loss

    attentions: list[nn.Module] = [SdpaAttention(options.width) for _ in range(options.layers)]
    sdpa = LanguageModel(attentions, options.width).to(DEVICE)
    train(sdpa)
    before = report("SDPA", sdpa)
    dma, layers = convert(sdpa, options.width)
    after = report("converted: no bias yet, no window", dma)
    largest = largest_difference(sdpa, dma, test)
    print(f"Gradients differ by {largest:.1e} of their norm at most")
    tolerance = 1e-5 if DEVICE == "cpu" else 2e-2
    assert abs(after - before) < tolerance
    assert largest < 100 * tolerance

    train(dma)
    learned = report("trained on, the bias learns too", dma)
    assert learned < after
    assert all(layer.A.abs().max() > 0 for layer in layers)
    for layer in layers:
        layer.window_size = options.window
    cut = report(f"a window of {options.window} of {options.context} keys", dma)
    train(dma)
    tuned = report("the same, trained on", dma)
    print(f"The window cost {cut - learned:+.4f}, and {tuned - learned:+.4f} after training")
    assert tuned < cut


def largest_difference(
    one: LanguageModel, other: LanguageModel, batch: tuple[Tensor, Tensor]
) -> float:
    """Return the largest relative difference of the gradients of common parameters."""
    names = [name for name, _ in one.named_parameters()]
    found = []
    for model in (one, other):
        parameters = dict(model.named_parameters())
        found.append(torch.autograd.grad(model.loss(*batch), [parameters[n] for n in names]))
    return max(float((b - a).norm() / a.norm()) for a, b in zip(*found, strict=True))


if __name__ == "__main__":
    main()
