# SPDX-License-Identifier: BSD-3-Clause
"""Puts flash_dmattn where transformers' model tests ask for SDPA or FlashAttention."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import sys
import types
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AttentionInterface, PreTrainedModel, testing_utils

from flash_dmattn import integrations
from flash_dmattn.integrations.implementations import note_masks_of
from flash_dmattn.integrations.transformers_attention import (
    flash_dynamic_mask_attention_forward,
)

OURS = "flash_dmattn"
REPLACED = {"sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"}
DEFAULTS = "_TEXT_MODEL_TESTER_DEFAULTS"
# Models that do not list both SDPA and FlashAttention, although flash_dmattn serves them.
UNLISTED = (
    "align.Align",
    "bigbird_pegasus.BigBirdPegasus",
    "clap.Clap",
    "deepseek_v4.DeepseekV4",
    "doge.Doge",
    "gemma2.Gemma2",
    "gpt_oss.GptOss",
    "longt5.LongT5",
    "markuplm.MarkupLM",
    "mt5.MT5",
    "nllb_moe.NllbMoe",
    "pegasus_x.PegasusX",
    "speech_to_text.Speech2Text",
    "splinter.Splinter",
    "switch_transformers.SwitchTransformers",
    "t5.T5",
    "videoprism.VideoPrism",
)
calls = 0
# The replacement of SDPA and FlashAttention; eager attention shows whether a test passes by itself.
in_place = OURS


def install(files: Path) -> None:
    """Patch transformers in this process.

    Args:
        files: the folder with testing_utils.py of the checkout.
    """
    integrations.register(attention_dropout="skip")
    AttentionInterface.register(OURS, counted)
    if not hasattr(testing_utils, DEFAULTS):
        setattr(testing_utils, DEFAULTS, value_in(files / "testing_utils.py", DEFAULTS))
    for name in ("require_flash_attn", "require_torch_sdpa", "slow"):
        setattr(testing_utils, name, lambda test: test)
    if not torch.cuda.is_available():
        for name in ("require_torch_accelerator", "require_torch_gpu"):
            setattr(testing_utils, name, lambda test: test)
    pipelines = types.ModuleType(
        "tests.test_pipeline_mixin"
    )  # has many imports and no test of attention
    pipelines.PipelineTesterMixin = type("PipelineTesterMixin", (), {})
    sys.modules[pipelines.__name__] = pipelines
    PreTrainedModel._check_and_adjust_attn_implementation = replacing(
        PreTrainedModel._check_and_adjust_attn_implementation
    )
    if importlib.util.find_spec("accelerate") is None:
        load_on_one_device()
    for model in UNLISTED:
        folder, name = model.split(".")
        try:
            module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
        except ModuleNotFoundError:  # another version
            continue
        base: Any = getattr(module, f"{name}PreTrainedModel")
        derived: Any
        for derived in vars(module).values():
            if isinstance(derived, type) and issubclass(derived, base):
                note_masks_of(derived, derived.config_class)
        base._supports_sdpa = base._supports_flash_attn = True
        base._compatible_flash_implementations = None


@functools.wraps(flash_dynamic_mask_attention_forward)
def counted(*arguments: Any, **named: Any) -> Any:
    """Count the calls: a test without a call does not test flash_dmattn."""
    global calls
    if not torch.compiler.is_compiling():
        calls += 1
    return flash_dynamic_mask_attention_forward(*arguments, **named)


def replacing(choose: Any) -> Any:
    """Return transformers' choice of an implementation, with ours for the replaced ones."""

    @functools.wraps(choose)
    def chosen(
        model: Any, asked: str | None, is_init_check: bool = False, *arguments: Any, **named: Any
    ) -> Any:
        def choice(name: str | None) -> Any:
            return choose(model, name, is_init_check, *arguments, **named)

        if asked in REPLACED:
            if asked == "sdpa":
                choice("sdpa")  # raises for models without it
            return choice(in_place)
        found = choice(asked)
        if asked is None and found == "sdpa":
            try:
                return choice(in_place)
            except NotImplementedError:
                return found
        return found

    return chosen


def load_on_one_device() -> None:
    """Let from_pretrained handle device_map without accelerate."""
    load = PreTrainedModel.from_pretrained.__func__

    def from_pretrained(cls: Any, *arguments: Any, device_map: Any = None, **named: Any) -> Any:
        model = load(cls, *arguments, **named)
        is_device = isinstance(device_map, str | torch.device) and device_map != "auto"
        return model.to(device_map) if is_device else model

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)


def import_tests(name: str) -> None:
    """Import a test file of a version of transformers near the installed one.

    It may need packages and internals of transformers for unrelated tests; absent ones get
    placeholders. pytest reports an import that fails for another reason.
    """
    while True:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            package = str(error.name).partition(".")[0]
            if package in ("tests", "test_module", "transformers") or package in sys.modules:
                return
            sys.modules[package] = AbsentModule(package)
        except ImportError as error:
            pattern = r"cannot import name '(\w+)' from '(transformers\.(?!models)[\w.]+)'"
            found = re.match(pattern, str(error))
            if found is None:
                return
            setattr(sys.modules[found[2]], found[1], None)
        except Exception:
            return
        else:
            return


class Placeholder(Exception):  # noqa: N818
    """A placeholder from an absent package: it can be caught, and used as a decorator."""

    def __call__(self, test: Any) -> Any:
        return test


class AbsentModule(types.ModuleType):
    """A package that is not installed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = importlib.util.spec_from_loader(name, None)

    def __getattr__(self, name: str) -> type[Placeholder]:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder


def value_in(path: Path, name: str) -> Any:
    """Return the value that a file assigns to a name, without importing the file."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == name:
            return ast.literal_eval(node.value)
    raise LookupError(f"{path} of transformers beside {transformers.__version__} has no {name}")
