# SPDX-License-Identifier: BSD-3-Clause
"""Every explanation of the loader, compared with its stored text in messages/.

FDM_WRITE_MESSAGES=1 rewrites the stored texts for review.
"""

import ast
import inspect
import os
import re
from pathlib import Path

import file_scenarios
import machine_scenarios
import pytest
import report_scenarios

import flash_dmattn
from flash_dmattn.loader import (
    candidates,
    elf,
    errors,
    macho,
    messages,
    pe,
    remedies,
    resolver,
    rules,
    targets,
    verify,
)
from release.project import pyproject_value

STORED = Path(__file__).parent / "messages"
MODULES = (machine_scenarios, file_scenarios, report_scenarios)
SCENARIOS = {name: text for module in MODULES for name, text in module.SCENARIOS.items()}


@pytest.mark.parametrize("name", SCENARIOS)
def test_text(installation, name):
    text = SCENARIOS[name](installation).replace(str(installation.root.parent), "<folder>") + "\n"
    text = text.replace(pyproject_value("Documentation"), "<pages>/")
    text = text.replace(pyproject_value("Source"), "<repository>")
    path = STORED / f"{name}.txt"
    if os.environ.get("FDM_WRITE_MESSAGES") == "1":
        path.write_text(text)
        pytest.fail("written anew, not compared")
    assert text == path.read_text()


def stored_texts() -> str:
    return "\n".join(path.read_text() for path in sorted(STORED.glob("*.txt")))


def test_no_scenario_hides_another():
    assert len(SCENARIOS) == sum(len(module.SCENARIOS) for module in MODULES)


def test_no_stored_text_is_left_over():
    assert {path.stem for path in STORED.glob("*.txt")} == set(SCENARIOS)


@pytest.mark.parametrize("name", messages.catalogue())
def test_every_text_has_a_stored_example(name):
    parts = re.split(r"\{[^{}]+\}", messages.catalogue()[name])
    assert re.search(".+?".join(map(re.escape, parts)), stored_texts()), messages.catalogue()[name]


def test_every_text_of_the_core_has_a_stored_example():
    source = (Path(__file__).parents[2] / "cpp" / "core" / "library.cpp").read_text()
    calls = re.findall(r"refuse\(path_?, (.*?)\);", source, re.DOTALL)
    assert len(calls) >= 7
    for call in calls:
        literals = re.findall(r'"((?:[^"\\]|\\.)*)"', call)
        if literals:
            assert max(literals, key=len) in stored_texts(), call
    opening = (Path(__file__).parents[2] / "cpp" / "core" / "shared_library.cpp").read_text()
    assert '"dlopen failed: "' in opening
    assert "dlopen failed: " in stored_texts()


@pytest.mark.parametrize(
    "command",
    [
        remedies.build_for("sm90", "2.0"),
        remedies.build_for("sm90", None),
        remedies.install_wheel("2.0"),
        remedies.reinstall("2.0"),
        remedies.reinstall("2.0", "flash-dmattn-cu13"),
        remedies.reinstall(None),
        remedies.INSTALL_BACKEND,
    ],
)
def test_every_command_that_is_offered_is_one_of_pip(command):
    assert command.startswith("python -m pip install ")
    if " flash-dmattn" in command:
        assert f"--index-url {pyproject_value('Documentation')}simple/ " in command


def test_nobody_is_told_to_take_the_name_from_the_public_index():
    """Another project owns the name there: commands must name the project's index or a file."""
    sources = [path for folder in flash_dmattn.__path__ for path in Path(folder).rglob("*.py")]
    assert Path(remedies.__file__) in sources
    command = re.compile(r"pip install [^\n]*flash[-_]dmattn")
    assert [str(path) for path in sources if command.search(path.read_text())] == []
    assert command.search("pip install 'flash-dmattn[torch]'")
    for text in stored_texts().splitlines():
        if found := command.search(text):
            assert "--index-url <pages>/simple/ " in found[0] or "/releases/download/" in found[0]


@pytest.mark.parametrize(
    "module", [candidates, elf, errors, macho, pe, resolver, rules, targets, verify]
)
def test_no_text_stands_outside_of_the_catalogue(module):
    """A sentence is a literal with two spaces; docstrings and log formats do not reach users."""
    tree = ast.parse(inspect.getsource(module))
    exempt = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            exempt.add(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == "logger":
                exempt.update(node.args)
    sentences = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node not in exempt
        and node.value.strip().count(" ") >= 2
    ]
    assert sentences == []


def test_a_distribution_without_a_record_has_nothing_to_verify():
    assert list(verify.records_of("no-such-distribution")) == []
