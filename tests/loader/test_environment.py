# SPDX-License-Identifier: BSD-3-Clause
import json
import warnings
from pathlib import Path

import pytest

from docs_tools.blocks import blocks
from flash_dmattn.loader import environment

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", environment.ENVIRONMENT)
def test_unset_and_empty_give_the_default(name):
    default = environment.ENVIRONMENT[name].default
    assert environment.get(name, {}) == default
    assert environment.get(name, {name: ""}) == default


@pytest.mark.parametrize(
    ("name", "value"),
    [(v.name, value) for v in environment.ENVIRONMENT.values() for value in v.values],
)
def test_every_declared_value_is_allowed(name, value):
    assert environment.get(name, {name: f" {value} "}) == value


def test_a_path_is_free():
    assert environment.get("FLASH_DMATTN_LIBRARY_PATH", {"FLASH_DMATTN_LIBRARY_PATH": "/x"}) == "/x"


def test_the_process_environment_is_read(monkeypatch):
    monkeypatch.setenv("FLASH_DMATTN_CUDA", "12")
    assert environment.get("FLASH_DMATTN_CUDA") == "12"


def test_what_is_given_follows_the_process_environment(monkeypatch):
    name = "FLASH_DMATTN_CUDA"
    monkeypatch.delenv(name, raising=False)
    assert not environment.is_given(name)
    monkeypatch.setenv(name, "12")
    assert environment.is_given(name)
    monkeypatch.setattr(environment, "_encoded", None)
    assert environment.is_given(name)
    monkeypatch.delenv(name)
    assert not environment.is_given(name)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "FLASH_DMATTN_BACKEND",
            "refrence",
            "FLASH_DMATTN_BACKEND must be one of auto, cuda, cpu, triton, flex, reference, got "
            "'refrence'. Did you mean 'reference'?",
        ),
        (
            "FLASH_DMATTN_ARCH",
            "sm90",
            "FLASH_DMATTN_ARCH must be one of 80, 86, 89, 90, 100, 110, 120, got 'sm90'. "
            "Did you mean '90'?",
        ),
        (
            "FLASH_DMATTN_FALLBACK",
            "xyz",
            "FLASH_DMATTN_FALLBACK must be one of warn, error, got 'xyz'.",
        ),
    ],
)
def test_bad_value(name, value, message):
    with pytest.raises(environment.InvalidVariableError) as caught:
        environment.get(name, {name: value})
    assert str(caught.value) == message


def test_a_name_outside_the_table_is_a_defect_of_the_caller():
    with pytest.raises(KeyError):
        environment.get("FLASH_DMATTN_ARCHS")


def test_unknown_names_warn_with_the_nearest():
    environ = {"FLASH_DMATTN_ARHC": "80", "FLASH_DMATTN_LOG": "info", "OTHER": "1"}
    with pytest.warns(environment.UnknownVariableWarning) as caught:
        environment.check_unknown(environ)
    assert [str(w.message) for w in caught] == [
        "unknown environment variable FLASH_DMATTN_ARHC. Did you mean 'FLASH_DMATTN_ARCH'?"
    ]


def test_known_names_do_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        environment.check_unknown(dict.fromkeys(environment.ENVIRONMENT, "anything"))


def test_bad_values_and_unknown_names_are_listed():
    environ = {"FLASH_DMATTN_CUDA": "11", "FLASH_DMATTN_LGO": "off", "FLASH_DMATTN_ARCH": "80"}
    assert environment.invalid(environ) == ["FLASH_DMATTN_CUDA must be one of 12, 13, got '11'."]
    assert environment.unknown(environ) == [
        "unknown environment variable FLASH_DMATTN_LGO. Did you mean 'FLASH_DMATTN_LOG'?"
    ]


@pytest.mark.parametrize("name", [v.name for v in environment.ENVIRONMENT.values() if v.values])
def test_a_bad_value_of_any_variable_is_found(name):
    environment.check_values({name: ""})
    with pytest.raises(environment.InvalidVariableError, match=f"^{name} must be one of "):
        environment.check_values({name: "cup"})


@pytest.mark.parametrize(
    ("wanted", "level", "allowed"),
    [
        ("avx512", "avx2", "auto, baseline, avx2"),
        ("avx2", "baseline", "auto, baseline"),
        ("avx2", "neon", "auto"),
    ],
)
def test_a_level_that_the_cpu_lacks(wanted, level, allowed):
    with pytest.raises(environment.InvalidVariableError) as caught:
        environment.check_cpu_simd(level, {"FLASH_DMATTN_CPU_SIMD": wanted})
    assert str(caught.value) == (
        f"FLASH_DMATTN_CPU_SIMD must be one of {allowed}, which this CPU has, got {wanted!r}."
    )
    for fine in ("", "auto", level):
        if fine != "neon":
            environment.check_cpu_simd(level, {"FLASH_DMATTN_CPU_SIMD": fine})


def test_archs_and_majors_are_those_of_the_target_table():
    targets = json.loads((ROOT / "cmake" / "targets.json").read_text())
    archs = tuple(name.removeprefix("sm") for name in targets["archs"])
    assert environment.ENVIRONMENT["FLASH_DMATTN_ARCH"].values == archs
    assert environment.ENVIRONMENT["FLASH_DMATTN_CUDA"].values == tuple(targets["cuda"])


def test_documentation_has_the_table():
    page = (ROOT / "docs" / "environment.md").read_text()
    rows = [row.split(" | ") for row in blocks(page)["variables"].splitlines()[2:]]
    assert [tuple(cells[:3]) for cells in rows] == [
        (
            f"| `{variable.name}`",
            ", ".join(f"`{value}`" for value in variable.values) or "a path",
            f"`{variable.default}`" if variable.default else "not set",
        )
        for variable in environment.ENVIRONMENT.values()
    ]
    assert all(len(cells) == 4 and len(cells[3]) > 20 for cells in rows)  # and a description
