# SPDX-License-Identifier: BSD-3-Clause
"""The torch.library operators that autograd, torch.compile, torch.export and profilers see.

They are defined on a Library instead of by torch.library.custom_op, whose wrappers cost several
times as much per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import dispatch_state

library = torch.library.Library("flash_dmattn", "DEF")  # type: ignore[no-untyped-call]


def define(
    name: str, schema: tuple[str, str], implementation: Callable[..., Any], fake: Callable[..., Any]
) -> None:
    """Define an operator by its arguments and results, its implementation and its fake kernel."""
    definition = f"{name}({schema[0]}) -> {schema[1]}"
    library.define(definition, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flash_dmattn::{name}", fake, lib=library)
    dispatch_state.watch_kernels(library)


def without_negation(argument: Any) -> Any:
    """Resolve a lazy negation, which a data pointer and strides do not represent."""
    if isinstance(argument, Tensor) and argument.is_neg():
        return argument.resolve_neg()
    return argument


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return a function's apply without the checks for functorch.

    The callers have done these checks by `dispatch_state.is_idle`. The autograd engine then also
    calls backward without looking up the function.
    """
    if node := getattr(function, "_backward_cls", None):  # the node class is private
        node.apply = function.backward
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
