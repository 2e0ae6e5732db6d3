# SPDX-License-Identifier: BSD-3-Clause
"""Train on documents of different lengths, packed one after another without padding.

Shows that documents do not see each other, that loss and gradients equal those of a padded batch,
and that such a batch would be mostly padding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from small_lm import DEVICE, LanguageModel, load_text, make_model, make_parser

NO_TARGET = -100  # target of a document's last byte, and of padding


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--documents", type=int, default=12, help="documents in a batch")
    parser.add_argument("--longest", type=int, default=512, help="bytes of the longest document")
    options = parser.parse_args()

    text, _ = load_text()
    model = make_model(options)
    documents = random_documents(text, options.documents, options.longest)
    tokens, targets, packing = pack(documents, options.longest)
    padded = options.documents * max(map(len, documents))
    print(
        f"{len(documents)} documents, {len(tokens)} bytes; padded they would be {padded}, "
        f"{1 - len(tokens) / padded:.0%} of it padding"
    )
    check_separation(model, documents, options.longest)
    check_padded_batch(model, documents, options.longest)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    first = last = model.loss(tokens, targets, **packing).item()
    for step in range(options.steps):
        batch = random_documents(text, options.documents, options.longest)
        tokens, targets, packing = pack(batch, options.longest)
        loss = model.loss(tokens, targets, **packing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        last = loss.item()
        if step % max(1, options.steps // 6) == 0:
            print(f"step {step:4}  loss {last:.3f}")
    print(f"Loss {first:.3f} before, {last:.3f} after {options.steps} steps")
    assert last < first - 0.5, "nothing was learned: train it longer"


def random_documents(text: Tensor, count: int, longest: int) -> list[Tensor]:
    """Return pieces of a text, few of them long and most of them short."""
    lengths = (2 + (longest - 2) * torch.rand(count) ** 3).long().tolist()
    starts = torch.randint(len(text) - longest, (count,)).tolist()
    return [text[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def pack(documents: list[Tensor], longest: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return packed bytes, their targets, and the packing arguments of the attention layers."""
    ends = torch.tensor([0, *map(len, documents)]).cumsum(0)
    targets = [torch.cat([d[1:], d.new_tensor([NO_TARGET])]) for d in documents]
    # max_seqlen is a known upper bound, so nothing is read from the device.
    packing = {"cu_seqlens": ends.to(DEVICE, torch.int32), "max_seqlen": longest}
    return torch.cat(documents).to(DEVICE), torch.cat(targets).to(DEVICE), packing


@torch.no_grad()
def check_separation(model: LanguageModel, documents: list[Tensor], longest: int) -> None:
    """Assert that a change of the first document changes nothing in the others."""
    tokens, _, packing = pack(documents, longest)
    changed, _, _ = pack([(documents[0] + 1) % 256, *documents[1:]], longest)
    own = len(documents[0])
    with torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        logits, others = (model(t, **packing) for t in (tokens, changed))
    assert torch.equal(logits[own:], others[own:])
    assert not torch.equal(logits[:own], others[:own])
    print("Other bytes in the first document change no logit of the others")


def check_padded_batch(model: LanguageModel, documents: list[Tensor], longest: int) -> None:
    """Assert that loss and gradients equal those of the same documents, padded."""
    tokens, targets, packing = pack(documents, longest)
    rows = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True).to(DEVICE)
    lengths = torch.tensor([len(d) for d in documents], device=DEVICE)
    mask = torch.arange(rows.shape[1], device=DEVICE) < lengths[:, None]
    row_targets = torch.full_like(rows, NO_TARGET).masked_scatter(mask, targets)

    parameters = list(model.parameters())
    packed_loss = model.loss(tokens, targets, **packing)
    padded_loss = model.loss(rows, row_targets, attn_mask=mask)
    pairs = zip(
        torch.autograd.grad(packed_loss, parameters),
        torch.autograd.grad(padded_loss, parameters),
        strict=True,
    )
    difference = max(((a - b).norm() / (b.norm() + 1e-6)).item() for a, b in pairs)
    print(
        f"Packed loss {packed_loss.item():.6f}, padded {padded_loss.item():.6f}; "
        f"gradients differ by {difference:.1e} of their norm at most"
    )
    # In 16 bits rounding decides between keys of almost equal bias.
    loss_tolerance, tolerance = (1e-5, 1e-3) if DEVICE == "cpu" else (1e-2, 0.2)
    assert abs(packed_loss.item() - padded_loss.item()) < loss_tolerance
    assert difference < tolerance


if __name__ == "__main__":
    main()
