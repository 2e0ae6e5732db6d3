# SPDX-License-Identifier: BSD-3-Clause
"""Wrapping of transformers methods, each once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["wrap_once"]

_MARK = "knows_flash_dmattn"


def wrap_once(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a method by a wrapper, which gets the method as first argument. May be repeated.

    Args:
        owner: the class; nothing happens if it has no such method.
        name: of the method.
        wrapper: called with the method, then with the arguments of a call.
    """
    method = getattr(owner, name, None)
    if method is None or hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(method, *args, **kwargs)

    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)
