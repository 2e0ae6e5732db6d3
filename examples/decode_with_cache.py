# SPDX-License-Identifier: BSD-3-Clause
"""Generate after a long prompt with a cache of keys, values and biases.

Shows that the tokens equal those of recomputing everything for each of them, and what the cache
saves.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from flash_dmattn import AttentionCache
from small_lm import DEVICE, LanguageModel, load_text, make_model, make_parser


@torch.inference_mode()
def main() -> None:
    parser = make_parser(__doc__)
    parser.set_defaults(window=128)
    parser.add_argument("--prompt", type=int, default=4096, help="bytes of the prompt")
    parser.add_argument("--tokens", type=int, default=24, help="bytes to generate")
    options = parser.parse_args()

    text, _ = load_text()
    prompt = text[None, : options.prompt].to(DEVICE)
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    model = make_model(options).to(dtype)
    # One cache for each layer. The length is known, so the memory is allocated once.
    longest = options.prompt + options.tokens
    caches = [AttentionCache(max_length=longest) for _ in range(options.layers)]

    started = time.perf_counter()
    logits = model(prompt, caches)
    print(f"Prompt of {options.prompt} bytes: {time.perf_counter() - started:.3f} s, on {DEVICE}")
    tokens, cached_seconds = generate(model, logits, options.tokens, caches)
    recomputed, full_seconds = generate_anew(model, prompt, tokens)
    ours, theirs = tokens[0].tolist(), recomputed.argmax(-1).tolist()
    print(f"A byte with the cache: {1e3 * cached_seconds:.1f} ms, each keeps {options.window} keys")
    print(f"A byte without:        {1e3 * full_seconds:.1f} ms")
    same = sum(a == b for a, b in zip(ours, theirs, strict=True))
    print(f"{same} of {options.tokens} bytes are the same")
    # In 16 bits two bytes may be almost equally likely: then either is correct.
    chosen = recomputed.gather(1, tokens.T).squeeze(1)
    behind = (recomputed.max(-1).values - chosen).max().item()
    assert behind <= 0.2 * recomputed.std().item()
    assert dtype != torch.float32 or ours == theirs
    print(repr(caches[0]))
    assert all(cache.length == longest for cache in caches)


def generate(
    model: LanguageModel, logits: Tensor, count: int, caches: list[AttentionCache]
) -> tuple[Tensor, float]:
    """Return the most likely bytes (1, count), and the seconds per byte."""
    tokens = []
    started = time.perf_counter()
    for _ in range(count):
        tokens.append(logits[:, -1].argmax(-1, keepdim=True))
        logits = model(tokens[-1], caches)
    generated = torch.cat(tokens, 1).cpu()  # waits for the device
    return generated.to(DEVICE), (time.perf_counter() - started) / count


def generate_anew(model: LanguageModel, prompt: Tensor, tokens: Tensor) -> tuple[Tensor, float]:
    """Return the logits (count, 256) for the choice of each byte, computed without a cache."""
    logits = []
    started = time.perf_counter()
    for count in range(tokens.shape[1]):
        logits.append(model(torch.cat([prompt, tokens[:, :count]], 1))[:, -1])
    every = torch.cat(logits).float().cpu()
    return every.to(DEVICE), (time.perf_counter() - started) / tokens.shape[1]


if __name__ == "__main__":
    main()
