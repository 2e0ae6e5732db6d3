# SPDX-License-Identifier: BSD-3-Clause
"""Train a small language model with dynamic mask attention.

Shows that the model learns from the few keys that each query keeps, and that the bias, which
selects these keys, learns with it.
"""

from __future__ import annotations

import torch

from small_lm import (
    DEVICE,
    LanguageModel,
    entropy,
    load_text,
    make_model,
    make_parser,
    random_pieces,
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=80, help="training steps")
    parser.add_argument("--context", type=int, default=256, help="bytes in a sequence")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    options = parser.parse_args()

    text, held_out = load_text()
    model = make_model(options)
    before = {name: weights.detach().clone() for name, weights in model.named_parameters()}
    test = random_pieces(held_out, 16, options.context)
    print(f"Each of {options.context} queries keeps {options.window} keys at most, on {DEVICE}")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        loss = model.loss(*random_pieces(text, options.batch, options.context))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, options.steps // 6) == 0:
            print(f"step {step:4}  loss {loss.item():.3f}")

    with torch.no_grad():
        learned = model.loss(*test).item()
    frequencies = entropy(held_out)
    print(f"Held-out loss {learned:.3f}; byte frequencies alone give {frequencies:.3f}")
    assert learned < frequencies, "the model uses no context: train it longer"
    print_moves(model, before)


def print_moves(model: LanguageModel, before: dict[str, torch.Tensor]) -> None:
    """Print how far training has moved the parameters of the bias, and assert that it has."""
    for name, weights in model.named_parameters():
        if name.endswith((".A", "dt_proj.weight")):
            moved = (weights - before[name]).norm() / before[name].norm()
            print(f"{name} moved by {moved:.0%} of its norm")
            assert moved > 0


if __name__ == "__main__":
    main()
