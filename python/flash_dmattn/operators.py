# SPDX-License-Identifier: BSD-3-Clause
"""The torch.library operators: what autograd, torch.compile, torch.export and profilers see.

They are defined on a Library rather than by torch.library.custom_op, whose wrappers cost several
times as much a call.
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
    """Define an operator by its arguments and results, what computes it, and what sizes them."""
    definition = f"{name}({schema[0]}) -> {schema[1]}"
    library.define(definition, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    library.impl(name, implementation, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"flash_dmattn::{name}", fake, lib=library)
    dispatch_state.watch_kernels(library)


def without_negation(argument: Any) -> Any:
    """Resolve a lazy negation, which pointers and strides do not tell."""
    if isinstance(argument, Tensor) and argument.is_neg():
        return argument.resolve_neg()
    return argument


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return the apply of a function without its questions about functorch, which
    `dispatch_state.is_idle` has answered for its callers.

    The engine calls its backward without a look for the function, which is known.
    """
    if node := getattr(function, "_backward_cls", None):  # the class of nodes is not public
        node.apply = function.backward
    apply: Callable[..., Any] = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply
