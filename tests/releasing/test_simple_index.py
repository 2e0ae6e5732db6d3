# SPDX-License-Identifier: BSD-3-Clause
"""The package index: its refusals, its content, and installation by pip."""

from __future__ import annotations

import html.parser
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from release_files import make_sdist, make_wheel

from release.__main__ import main
from release.distributions import core_metadata, project_and_version, sha256
from release.index import download, files_of, flattened, write_index
from release.loopback import JSON_TYPE, local_release, serving
from release.project import ROOT, ReleaseError

PROJECT = "flash-dmattn"


def no_fetch(url: str) -> bytes:
    raise AssertionError(f"{url} was fetched")


def read_files(url: str) -> bytes:
    return Path(url.removeprefix("file://")).read_bytes()


def release_of(folder: Path, tag: str = "v2.0.0") -> dict[str, Any]:
    return local_release(folder, tag, f"file://{folder}")


def add_metadata(wheel: Path) -> Path:
    path = wheel.with_name(wheel.name + ".metadata")
    path.write_bytes(core_metadata(wheel))
    return path


class Links(html.parser.HTMLParser):
    """The attributes of a page's links, by their text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: dict[str, dict[str, str | None]] = {}
        self.open: dict[str, str | None] = {}
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open = dict(attrs) if tag == "a" else {}

    def handle_data(self, data: str) -> None:
        if self.open and data.strip():
            self.found[data] = self.open
            self.open = {}


def test_both_forms_say_the_same(tmp_path: Path) -> None:
    wheel, sdist = make_wheel(tmp_path / "v2"), make_sdist(tmp_path / "v2")
    metadata = add_metadata(wheel)
    write_index(files_of([release_of(tmp_path / "v2")], PROJECT, read_files), tmp_path / "site")

    page = Links((tmp_path / "site/simple/flash-dmattn/index.html").read_text()).found
    content = json.loads((tmp_path / "site/simple/flash-dmattn/index.json").read_text())
    assert set(page) == {wheel.name, sdist.name} == {file["filename"] for file in content["files"]}
    assert content["name"] == PROJECT
    assert content["versions"] == ["2.0.0"]
    for file in content["files"]:
        link = page[file["filename"]]
        assert link["href"] == f"{file['url']}#sha256={file['hashes']['sha256']}"
        assert file["hashes"] == {"sha256": sha256(tmp_path / "v2" / file["filename"])}
        assert file["size"] == (tmp_path / "v2" / file["filename"]).stat().st_size
        assert file["yanked"] is False
        assert "data-yanked" not in link
    (of_wheel,) = (f for f in content["files"] if f["filename"] == wheel.name)
    assert of_wheel["requires-python"] == page[wheel.name]["data-requires-python"] == ">=3.10"
    assert of_wheel["core-metadata"] == {"sha256": sha256(metadata)}
    assert "dist-info-metadata" not in of_wheel, "pip 23.0 fails on it"
    assert page[wheel.name]["data-core-metadata"] == f"sha256={sha256(metadata)}"
    assert "data-core-metadata" not in page[sdist.name]

    top = json.loads((tmp_path / "site/simple/index.json").read_text())
    assert top["projects"] == [{"name": PROJECT}]
    top_page = Links((tmp_path / "site/simple/index.html").read_text()).found
    assert top_page == {PROJECT: {"href": "flash-dmattn/"}}


def test_every_release_is_listed_but_no_draft(tmp_path: Path) -> None:
    releases = []
    for version in ("2.0.0", "2.1.0", "2.2.0"):
        make_wheel(tmp_path / version, version)
        releases.append(release_of(tmp_path / version, f"v{version}"))
    releases[2]["draft"] = True
    files = files_of(releases, PROJECT, no_fetch)
    assert [file.version for file in files] == ["2.0.0", "2.1.0"]


def test_packs_of_their_own_are_projects_of_their_own(tmp_path: Path) -> None:
    make_wheel(tmp_path / "v2")
    make_wheel(tmp_path / "v2", stem="flash_dmattn_cu13", machine="")
    write_index(files_of([release_of(tmp_path / "v2")], PROJECT, no_fetch), tmp_path / "site")
    top = json.loads((tmp_path / "site/simple/index.json").read_text())
    assert top["projects"] == [{"name": "flash-dmattn"}, {"name": "flash-dmattn-cu13"}]


def test_yanked_versions_say_why(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "v2")
    files = files_of(
        [release_of(tmp_path / "v2")], PROJECT, no_fetch, {"2.0.0": 'wrong "dbias" on sm80'}
    )
    write_index(files, tmp_path / "site")
    page = Links((tmp_path / "site/simple/flash-dmattn/index.html").read_text()).found
    assert page[wheel.name]["data-yanked"] == 'wrong "dbias" on sm80'
    content = json.loads((tmp_path / "site/simple/flash-dmattn/index.json").read_text())
    assert content["files"][0]["yanked"] == 'wrong "dbias" on sm80'


def test_an_index_is_never_added_to(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").touch()  # the documentation, which contains the index
    write_index([], tmp_path / "site")
    with pytest.raises(ReleaseError, match="has an index; it is made anew"):
        write_index([], tmp_path / "site")


def test_a_file_in_two_releases_is_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path / "v2")
    releases = [release_of(tmp_path / "v2"), release_of(tmp_path / "v2", "v2.0.0-again")]
    with pytest.raises(ReleaseError, match=r"whl is in two releases; a file must never be"):
        files_of(releases, PROJECT, no_fetch)


@pytest.mark.parametrize("digest", [None, "", "md5:00", "sha256:12"])
def test_a_file_without_a_hash_is_refused(tmp_path: Path, digest: str | None) -> None:
    make_wheel(tmp_path / "v2")
    release = release_of(tmp_path / "v2")
    release["assets"][0]["digest"] = digest
    with pytest.raises(ReleaseError, match="says no sha256 of flash_dmattn-2"):
        files_of([release], PROJECT, no_fetch)


def test_altered_metadata_is_refused(tmp_path: Path) -> None:
    metadata = add_metadata(make_wheel(tmp_path / "v2"))
    release = release_of(tmp_path / "v2")
    metadata.write_bytes(metadata.read_bytes() + b"Requires-Dist: something-else\n")
    with pytest.raises(ReleaseError, match="its release says otherwise"):
        files_of([release], PROJECT, read_files)


def test_metadata_of_another_version_is_refused(tmp_path: Path) -> None:
    add_metadata(make_wheel(tmp_path / "v2", metadata_version="2.0.1"))
    with pytest.raises(ReleaseError, match=r"the metadata of .* is of .*2\.0\.1"):
        files_of([release_of(tmp_path / "v2")], PROJECT, read_files)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path / "v2", stem="torch")
    with pytest.raises(ReleaseError, match="is not a distribution of flash-dmattn"):
        files_of([release_of(tmp_path / "v2")], PROJECT, no_fetch)


def test_a_yank_of_nothing_is_refused(tmp_path: Path) -> None:
    make_wheel(tmp_path / "v2")
    with pytest.raises(ReleaseError, match=r"to yank are in no release: 3\.0\.0"):
        files_of([release_of(tmp_path / "v2")], PROJECT, no_fetch, {"3.0.0": "why"})


@pytest.mark.parametrize("name", ["flash_dmattn.whl", "flash_dmattn-2.0.0.zip", "2.0.0.tar.gz"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(ReleaseError, match="is not named as a wheel or an sdist is"):
        project_and_version(name)


def test_pages_of_github_are_joined() -> None:
    assert flattened([[{"a": 1}], [{"b": 2}]]) == [{"a": 1}, {"b": 2}]
    assert flattened([{"a": 1}]) == [{"a": 1}]


def test_only_safe_addresses_are_fetched() -> None:
    with pytest.raises(ReleaseError, match="neither https nor this machine"):
        download("http://example.com/x.metadata")


def test_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_wheel(tmp_path / "v2", stem="torch")
    (tmp_path / "releases.json").write_text(json.dumps([release_of(tmp_path / "v2")]))
    arguments = ["--releases", str(tmp_path / "releases.json"), "--output", str(tmp_path / "site")]
    assert main(["index", *arguments]) == 1
    assert "release index: torch-2.0.0" in capsys.readouterr().err


def pip_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def test_pip_installs_from_it(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "served/files", machine="")
    add_metadata(wheel)
    make_wheel(tmp_path / "served/files", "2.1.0a1", machine="")  # ignored without --pre
    with serving(tmp_path / "served") as server:
        release = local_release(tmp_path / "served/files", "v2.0.0", f"{server.url}/files")
        (tmp_path / "releases.json").write_text(json.dumps([release]))
        index = ["--releases", str(tmp_path / "releases.json"), "--output"]
        assert main(["index", *index, str(tmp_path / "served/index")]) == 0
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--target"]
        subprocess.run(
            [*pip, str(tmp_path / "t"), f"--index-url={server.url}/index/simple/", PROJECT],
            env=pip_environment(),
            check=True,
        )
    assert "2.0.0" in (tmp_path / "t/flash_dmattn/__init__.py").read_text()
    pip_version = tuple(int(part) for part in importlib.metadata.version("pip").split(".")[:2])
    if pip_version >= (23, 2):  # the first version with the name of PEP 714
        assert f"/files/{wheel.name}.metadata" in server.requests


PAGE = (ROOT / "docs" / "install.md").read_text()
(INDEX,) = set(re.findall(r"https://\S+/simple/", PAGE))


def command_of_the_page(tool: str) -> str:
    """Return the page's line that installs the project by a tool."""
    (line,) = re.findall(rf"^({tool} .*https://.* {PROJECT})$", PAGE, re.MULTILINE)
    return str(line)


def block_of_the_page(language: str, content: str) -> str:
    """Return the page's block in a language that contains a text."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (block,) = [text for text in found if content in text]
    return str(block)


def assert_installs(words: list[str], folder: Path, pyproject: str = "") -> None:
    """Run a tool on an index with only a pre-release, and check that it installs that."""
    wheel = make_wheel(folder / "served/files", "2.0.0a1", machine="")
    with serving(folder / "served") as server:
        release = local_release(folder / "served/files", "v2.0.0a1", f"{server.url}/files")
        write_index(files_of([release], PROJECT, no_fetch), folder / "served")
        url = f"{server.url}/simple/"
        if pyproject:
            (folder / "pyproject.toml").write_text(pyproject.replace(INDEX, url))
        configured = {} if pyproject else {"UV_NO_CONFIG": "1"}
        command = [word.replace(INDEX, url) for word in words]
        done = subprocess.run(
            [sys.executable, "-m", *command, "--target", str(folder / "t")],
            cwd=folder,
            env={**pip_environment(), **configured, "UV_NO_CACHE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert "2.0.0a1" in (folder / "t/flash_dmattn/__init__.py").read_text()
    assert f"/files/{wheel.name}" in server.requests


@pytest.mark.parametrize("tool", ["pip", "uv"])
def test_the_lines_of_the_page_install_from_it(tool: str, tmp_path: Path) -> None:
    """The index may hold only pre-releases, and no other index is used."""
    assert_installs(command_of_the_page(tool).split(), tmp_path)


def test_a_project_of_uv_installs_from_it(tmp_path: Path) -> None:
    project = f'[project]\nname = "mine"\nversion = "0"\ndependencies = ["{PROJECT}"]\n\n'
    sources = block_of_the_page("toml", "tool.uv.sources")
    words = ["uv", "pip", "install", "--requirements", "pyproject.toml"]
    assert_installs(words, tmp_path, project + sources)


def test_an_image_runs_the_lines_of_pip() -> None:
    lines = block_of_the_page("dockerfile", PROJECT).replace("\\\n", "").splitlines()
    (run,) = [line.removeprefix("RUN ") for line in lines if line.startswith("RUN ")]
    needed, own = (re.sub(" +", " ", command.strip()) for command in run.split("&&"))
    assert own == command_of_the_page("pip")
    assert f"\n{needed}\n{own}\n" in PAGE


def test_server_speaks_json_to_those_who_ask(tmp_path: Path) -> None:
    make_wheel(tmp_path / "v2")
    write_index(files_of([release_of(tmp_path / "v2")], PROJECT, no_fetch), tmp_path / "site")
    with serving(tmp_path / "site") as server:
        url = f"{server.url}/simple/flash-dmattn/"
        for accepted, kind in ((JSON_TYPE, JSON_TYPE), ("text/html", "text/html")):
            request = urllib.request.Request(url, headers={"Accept": accepted})
            with urllib.request.urlopen(request) as response:
                assert response.headers.get_content_type() == kind
                assert b"flash_dmattn-2.0.0" in response.read()
