# SPDX-License-Identifier: BSD-3-Clause
"""Choosing a portable backend by argument, variable or function, and the messages without it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

import flash_dmattn
from flash_dmattn import backends, flash_dmattn_func, flash_dmattn_func_auto
from flash_dmattn.backends import portable
from support import rand_bool, randn, simple_problem

REASON = "its library is too old: pip install --upgrade it"


@pytest.fixture(params=portable.NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Return each portable backend's name."""
    chosen: str = request.param
    return chosen


@pytest.fixture
def _unavailable(monkeypatch: pytest.MonkeyPatch, make_loader: Callable[[], object]):
    make_loader()
    module = SimpleNamespace(why_unavailable=lambda device_type: REASON)
    monkeypatch.setattr(portable, "_module", lambda name: module)


def call(**options: object) -> torch.Tensor:
    problem = simple_problem()
    return flash_dmattn_func(problem.query, problem.key, problem.value, **options)


@pytest.mark.usefixtures("_unavailable")
def test_what_is_said_where_it_cannot_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match = rf"backend '{name}' is not available here: {REASON}. "
    with pytest.raises(RuntimeError, match=f"{match}backend=None follows the device"):
        call(backend=name)
    with pytest.raises(RuntimeError, match=f"{match}backend=None follows the device"):
        flash_dmattn_func_auto(name)
    monkeypatch.setenv("FLASH_DMATTN_BACKEND", name)
    with pytest.raises(RuntimeError, match=f"{match}FLASH_DMATTN_BACKEND=auto follows the device"):
        call()
    assert not backends.is_available(name)
    assert name not in flash_dmattn.get_available_backends()


@pytest.mark.usefixtures("_unavailable")
def test_functions_and_flags_where_it_cannot_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attribute in (f"{name}_dmattn_func", f"{name.upper()}_AVAILABLE"):
        # They are looked up only once, maybe before this test.
        monkeypatch.delitem(vars(flash_dmattn), attribute, raising=False)
    try:
        assert getattr(flash_dmattn, f"{name}_dmattn_func") is None
        assert getattr(flash_dmattn, f"{name.upper()}_AVAILABLE") is False
    finally:
        vars(flash_dmattn).pop(f"{name}_dmattn_func", None)
        vars(flash_dmattn).pop(f"{name.upper()}_AVAILABLE", None)


def test_a_library_that_does_not_import_is_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, make_loader: Callable[[], object]
) -> None:
    make_loader()

    def fail(name: str) -> None:
        raise ModuleNotFoundError("No module named 'its_library'")

    monkeypatch.setattr(portable, "_module", fail)
    with pytest.raises(RuntimeError, match=r"not available here: No module named 'its_library'\."):
        call(backend=name)


def test_it_is_loaded_once_for_all_calls(
    name: str, monkeypatch: pytest.MonkeyPatch, make_loader: Callable[[], object]
) -> None:
    make_loader()

    class Backend:
        pass

    module = SimpleNamespace(why_unavailable=lambda device_type: None)
    setattr(module, portable._TABLE[name].class_name, Backend)
    monkeypatch.setattr(portable, "_module", lambda name: module)
    cpu = torch.device("cpu")
    first = backends.select_backend(cpu, name)
    monkeypatch.setenv("FLASH_DMATTN_BACKEND", name)
    assert backends.select_backend(cpu, name) is first
    assert isinstance(first, Backend)
    by_variable = backends.select_backend(cpu, "auto")
    assert isinstance(by_variable, Backend)
    assert backends.select_backend(cpu, "auto") is by_variable
    assert backends.select_backend(torch.device("meta"), name).name == "reference"


def test_flags_and_functions_agree(name: str) -> None:
    available = name in flash_dmattn.get_available_backends()
    function = getattr(flash_dmattn, f"{name}_dmattn_func")
    assert getattr(flash_dmattn, f"{name.upper()}_AVAILABLE") is available
    assert (function is not None) is available
    if function is None:
        return
    bound, plain = (inspect.signature(f).parameters for f in (function, flash_dmattn_func))
    assert list(bound) == list(plain)
    differ = [n for n in plain if bound[n] != plain[n]]
    assert differ == ["backend"]
    assert bound["backend"].default == name


def test_functions_of_backends_are_interchangeable() -> None:
    problem = simple_problem()
    arguments = [problem.query, problem.key, problem.value, rand_bool(2, 1, 1, 23)]
    arguments += [randn(2, 2, 1, 23), 0.3, True, 4.0]
    want = flash_dmattn_func_auto("reference")(*arguments)
    served = [n for n in backends.available_backends() if _serves_cpu(n)]
    assert {"cpu", "reference"} <= set(served)
    for each in served:
        got = flash_dmattn_func_auto(each)(*arguments)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5, msg=each)


def _serves_cpu(name: str) -> bool:
    if name in portable.NAMES:
        return portable.why_unavailable(name, "cpu") is None
    return name != "cuda"
