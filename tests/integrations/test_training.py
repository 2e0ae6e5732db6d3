# SPDX-License-Identifier: BSD-3-Clause
"""Training in practice: activation checkpointing, the compiler, several processes, copies."""

from __future__ import annotations

import copy
import io
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed_calls.ranks import leave_group

from .tiny_models import inputs_of, padding, results, tiny_model, tokens


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in got.items():
        torch.testing.assert_close(tensor, want[name], atol=1e-5, rtol=1e-3, msg=name)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family, way", [("doge", "applied"), ("llama", "named")])
def test_gradient_checkpointing(family: str, way: str, reentrant: bool) -> None:
    model = tiny_model(family, way).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    assert_same(results(model, inputs_of("left")), results(tiny_model(family), inputs_of("left")))


@pytest.mark.parametrize("family, way", [("doge", "applied"), ("llama", "named")])
def test_compiled_as_one_graph(family: str, way: str) -> None:
    torch._dynamo.reset()
    model = tiny_model(family, way, layers=1)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager_decomp_partition")
    out = compiled(tokens(), use_cache=False).logits
    out.square().mean().backward()
    eager = tiny_model(family, layers=1)
    want = eager(tokens(), use_cache=False).logits
    want.square().mean().backward()
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)
    for (name, got), expected in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(got.grad, expected.grad, atol=1e-5, rtol=1e-3, msg=name)


def train_in_one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    gradients = gradients_of_one_of_two(rank)
    torch.save(gradients, Path(folder) / f"gradients{rank}")
    leave_group()


def gradients_of_one_of_two(rank: int) -> list[Tensor | None]:
    """Train in parallel and delete the parallel module.

    It must not outlive the call that destroys the process group: as the group's last owner it would
    destroy it while it holds the GIL. A thread of gloo may wait for the GIL: a deadlock.
    """
    model = tiny_model("doge", "applied")
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    own = tokens(4)[2 * rank : 2 * rank + 2]
    parallel(own, labels=own, use_cache=False).loss.backward()
    return [p.grad for p in model.parameters()]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=train_in_one_of_two, args=(rank, str(tmp_path))) for rank in (0, 1)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    model = tiny_model("doge")
    model(tokens(4), labels=tokens(4), use_cache=False).loss.backward()
    for rank in (0, 1):
        gradients = torch.load(tmp_path / f"gradients{rank}")
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True):
            torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-3, msg=name)


def test_a_changed_model_can_be_copied_and_saved(tmp_path: Path) -> None:
    model = tiny_model("doge", "applied").eval()
    want = model(tokens()).logits
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(tokens()).logits, want)
    file = io.BytesIO()
    torch.save(twin, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(tokens()).logits, want)
    twin.save_pretrained(tmp_path)
    loaded: Any = type(twin).from_pretrained(tmp_path, attn_implementation="eager").eval()
    mask = padding("right").bool()
    plain = loaded(tokens(), attention_mask=padding("right")).logits[mask]
    torch.testing.assert_close(
        twin(tokens(), attention_mask=padding("right")).logits[mask], plain, atol=1e-5, rtol=1e-4
    )
