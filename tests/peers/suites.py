# SPDX-License-Identifier: BSD-3-Clause
"""The tests that run from each repository, and how they are copied from a checkout."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

# Replacements that make a suite's tensors on the CPU where there is no GPU.
ON_A_CPU = {
    'device = "cuda"': 'device = "cpu"',
    'device="cuda"': 'device="cpu"',
    'device, dtype = "cuda",': 'device, dtype = "cpu",',
    'torch.device("cuda")': 'torch.device("cpu")',
    "if torch.cuda.is_available():": "if True:",
}
# Tests that take a CPU minutes, or that test for defects of GPUs only.
FOR_A_GPU = ("race", "deterministic", "cumsum_metadata")


@dataclasses.dataclass(frozen=True)
class Suite:
    """A file of parametrized tests.

    Args:
        name: in reports.
        test: the file relative to a checkout; it also identifies the checkout.
        shims: modules of `peers.shims`, whose `install` makes what the file imports.
        helpers: other files of the checkout that it imports.
        left_out: tests that are not drawn, and why.
        edits: passages that are replaced.
        packages: that it imports, beside torch and pytest.
    """

    name: str
    test: str
    shims: tuple[str, ...]
    helpers: tuple[str, ...] = ()
    left_out: dict[str, str] = dataclasses.field(default_factory=dict)
    edits: dict[str, str] = dataclasses.field(default_factory=dict)
    packages: tuple[str, ...] = ("einops",)

    def copy(self, checkout: Path, folder: Path, *, on_gpu: bool) -> None:
        """Copy the files from a checkout into a folder with the suite's name."""
        target = folder / self.name
        target.mkdir()
        for helper in self.helpers:
            shutil.copy(checkout / helper, target)
        text = (checkout / self.test).read_text()
        for passage, other in (self.edits if on_gpu else self.edits | ON_A_CPU).items():
            text = text.replace(passage, other)
        (target / "suite.py").write_text(text)


_NO_FUNCTION_OF_C = "calls a C++ function of the library itself"
SUITES = (
    Suite(
        "fa2",
        "tests/test_flash_attn.py",
        ("flash_attention_2",),
        ("flash_attn/bert_padding.py",),
        {
            "test_flash_attn_varlen_paged_kv_num_splits": _NO_FUNCTION_OF_C,
            "test_flash_attn_generator_arg_must_be_none": _NO_FUNCTION_OF_C,
        },
    ),
    Suite(
        "fa3",
        "hopper/test_flash_attn.py",
        ("flash_attention_2", "flash_attention_3"),
        ("hopper/padding.py", "hopper/test_util.py", "flash_attn/bert_padding.py"),
        {
            "test_flash3_bw_compatibility": _NO_FUNCTION_OF_C,
            "test_flash_attn_combine": _NO_FUNCTION_OF_C,
        },
        {
            # Values of 512 are refused, which would end the test before its usual ones.
            "[256, 512, d] if d <= 64 else": "[256, d] if d < 64 else",
            # The race test fills the memory, which processes share; now as many calls as in fa2.
            "torch.empty(70 * 1024 ** 3": "torch.empty(1024 ** 2",
            "for i in range(1000):": "for i in range(250):",
        },
    ),
    Suite(
        "fa4",
        "tests/cute/test_flash_attn.py",
        ("flash_attention_2", "flash_attention_4"),
        ("flash_attn/cute/testing.py", "flash_attn/bert_padding.py"),
        {
            "test_flash_attn_invalid_head_dim": "head dimensions that flash_dmattn has",
            "test_flash_attn_bwd_preallocated_outputs": "calls a private function",
        },
        {'if IS_SM90:\n        pytest.skip("SM90 uses a different kernel path")': "pass"},
    ),
    Suite(
        "fa4_varlen",
        "tests/cute/test_flash_attn_varlen.py",
        ("flash_attention_2", "flash_attention_4"),
        ("flash_attn/cute/testing.py", "flash_attn/bert_padding.py"),
    ),
    Suite(
        "deepspeed",
        "tests/unit/ops/deepspeed4science/test_DS4Sci_EvoformerAttention.py",
        ("evoformer",),
        packages=(),
    ),
    Suite(
        "cuequivariance",
        "cuequivariance_torch/tests/primitives/triangle_test.py",
        ("triangle",),
        left_out={
            "test_triangle_multiplicative_update": "not attention",
            "test_attention_pair_bias": "a layer that flash_dmattn does not have",
        },
        packages=(),
    ),
)
# transformers' models are tested by unittest classes, which pytest runs: `peers.models`.
MODELS = "transformers"
MODELS_PACKAGES = ("parameterized",)
MODELS_KNOWN_BY = "tests/test_modeling_common.py"
MODELS_FOLDER = "tests/models"
MODELS_FILES = f"{MODELS_FOLDER}/*/test_modeling_*.py"


def suites_of(checkout: Path) -> list[Suite]:
    """Return the suites whose files are in a checkout."""
    return [suite for suite in SUITES if (checkout / suite.test).is_file()]


def has_models(checkout: Path) -> bool:
    """Return whether a checkout is of transformers."""
    return (checkout / MODELS_KNOWN_BY).is_file()


def copy_models(checkout: Path, folder: Path) -> None:
    """Copy the model tests and the file with their defaults into a folder."""
    target = folder / MODELS
    for part in ("tests", "utils/test_module"):
        shutil.copytree(checkout / part, target / part, ignore=shutil.ignore_patterns("fixtures"))
    shutil.copy(checkout / "src" / "transformers" / "testing_utils.py", target)
