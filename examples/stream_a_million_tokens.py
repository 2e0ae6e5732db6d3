# SPDX-License-Identifier: BSD-3-Clause
"""Read a text of any length in chunks, in constant memory.

Shows that chunks give the results of one pass, that reading eight times as much takes no more
memory, and that training along the stream learns, with gradients limited to a chunk.
"""

from __future__ import annotations

import resource
import time

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flash_dmattn import AttentionCache
from small_lm import DEVICE, LanguageModel, load_text, make_model, make_parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(window=256)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="bytes to read")
    parser.add_argument("--chunk", type=int, default=4096, help="bytes at a time")
    parser.add_argument("--steps", type=int, default=40, help="chunks to train on")
    options = parser.parse_args()

    text, _ = load_text()
    text = text.to(torch.uint8)
    model = make_model(options)
    check(model, text[None, : 3 * options.chunk], options.chunk)
    train(model, text, options.chunk, options.steps)
    model = model.to(torch.bfloat16) if DEVICE == "cuda" else model
    peaks = []
    for length in (options.tokens // 8, options.tokens):
        stream = text.repeat(-(-length // len(text)))[None, :length]
        started = time.perf_counter()
        caches, loss = read(model, stream, options.chunk)
        seconds = time.perf_counter() - started
        peaks.append(peak_bytes())
        print(f"{length} bytes in {seconds:.1f} s on {DEVICE}, {length / seconds:.0f} a second")
        print(f"  loss {loss:.3f}, peak {peaks[-1] / 1e6:.0f} MB, {caches[0]!r}")
    print(f"Eight times the length took {peaks[1] / peaks[0] - 1:+.1%} memory")
    assert all(cache.capacity == options.window for cache in caches)
    assert peaks[1] < 1.25 * peaks[0]


def check(model: LanguageModel, tokens: Tensor, chunk: int) -> None:
    """Assert that chunks give the logits of one pass."""
    caches = [AttentionCache() for _ in model.blocks]
    tokens = tokens.long().to(DEVICE)
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16, enabled=DEVICE == "cuda"):
        starts = range(0, tokens.shape[1], chunk)
        parts = [model(tokens[:, start : start + chunk], caches) for start in starts]
        whole = model(tokens)
    difference = (torch.cat(parts, 1) - whole).float().norm() / whole.float().norm()
    print(f"Logits of {len(parts)} chunks differ from those of one pass by {difference:.1e}")
    assert difference < (1e-4 if DEVICE == "cpu" else 5e-2)


def train(model: LanguageModel, text: Tensor, chunk: int, steps: int) -> None:
    """Train along the text. Text before a chunk is seen, but gets no gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    caches = [AttentionCache() for _ in model.blocks]
    losses = []
    for step in range(steps):
        start = step * chunk % (len(text) - chunk - 1)
        piece = text[None, start : start + chunk + 1].long().to(DEVICE)
        loss = model.loss(piece[:, :-1], piece[:, 1:], caches=caches)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for cache in caches:
            cache.detach()
        losses.append(loss.item())
    print(f"Loss {losses[0]:.3f} before and {losses[-1]:.3f} after {steps} chunks")
    assert losses[-1] < losses[0]


@torch.inference_mode()
def read(model: LanguageModel, stream: Tensor, chunk: int) -> tuple[list[AttentionCache], float]:
    """Return the caches after a stream, and the mean loss in nats per byte."""
    caches = [AttentionCache() for _ in model.blocks]
    total, before = torch.zeros((), device=DEVICE), None
    for start in range(0, stream.shape[1], chunk):
        tokens = stream[:, start : start + chunk].long().to(DEVICE)
        logits = model(tokens, caches).float()
        if before is not None:
            logits = torch.cat([before, logits], 1)
        guessed = logits[:, : tokens.shape[1] - 1 + (before is not None)]
        wanted = tokens[:, tokens.shape[1] - guessed.shape[1] :]
        total += cross_entropy(guessed.flatten(0, 1), wanted.flatten(), reduction="sum")
        before = logits[:, -1:].clone()
    return caches, total.item() / (stream.shape[1] - 1)


def peak_bytes() -> int:
    """Return the peak memory so far: of the GPU, or of the process."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
