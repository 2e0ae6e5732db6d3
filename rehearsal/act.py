# SPDX-License-Identifier: BSD-3-Clause
"""Runs a workflow with act, and collects the results of its jobs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from release.project import ReleaseError

# A job that calls a workflow, and the file that it calls.
CALLER = re.compile(r"^  ([\w-]+):\n(?:    .*\n|\n)*?    uses: \./\.github/workflows/(\S+)", re.M)
JOB = re.compile(r"^  ([\w-]+):$", re.M)
LINES_OF_A_FAILURE = 60
# Prefixes of local variables that no runner has.
OURS = ("FDM_", "FLASH_DMATTN_", "PYTHON", "VIRTUAL_ENV")


class JobsError(ReleaseError):
    """A failed run: the failed jobs, named as in `Run.results`, and their output."""

    def __init__(self, text: str, jobs: Collection[tuple[str, str]], lines: Sequence[str]) -> None:
        super().__init__(text)
        self.jobs = set(jobs)
        self.lines = list(lines)


@dataclass
class Run:
    """One run of a workflow.

    Attributes:
        log: the file for all output.
        results: success or failure of each job, by its caller and its id, such as
            ``("wheels", "packs")``; the jobs of a matrix count as one.
        lines: the output of each job, by its full name.
        failed: the output of the failed jobs.
    """

    log: Path
    results: dict[tuple[str, str], str] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)

    def note(self, event: Mapping[str, Any]) -> None:
        """Process one event of act's log."""
        text = str(event.get("msg", "")).rstrip()
        if text.startswith("LocalRepositoryCache"):
            return
        job = event.get("job", "")
        with self.log.open("a") as stream:
            stream.write(f"[{job}] {text}\n")
        self.lines.setdefault(job, []).append(text)
        if result := event.get("jobResult"):
            caller = job.split("/")[0]
            key = (caller, event["jobID"])
            # If one job of a matrix fails, the matrix fails.
            if self.results.get(key) != "failure":
                self.results[key] = result
            print(f"   {result:8} {job}", flush=True)
            if result != "success":
                self.failed += self.lines[job]
                print("\n".join(self.lines[job][-LINES_OF_A_FAILURE:]), flush=True)


@dataclass(frozen=True)
class Act:
    """The configuration of act.

    Attributes:
        program: the executable.
        repository: the checkout whose workflows run.
        options: the options of every run.
        variables: environment variables in addition to this process's.
    """

    program: Path
    repository: Path
    options: Sequence[str]
    variables: Mapping[str, str]

    def run(
        self,
        workflow: str,
        event: str,
        payload: Mapping[str, Any],
        skipped: Collection[str] = (),
        job: str | None = None,
    ) -> None:
        """Run a workflow; check that all jobs of it and of the workflows that it calls pass.

        Args:
            workflow: the file's stem.
            event: such as push.
            payload: the payload of the event.
            skipped: ids of jobs that need not run.
            job: run only this job and its dependencies.

        Raises:
            JobsError: a job failed or did not run.
        """
        logs = self.repository.parent / "logs"
        logs.mkdir(exist_ok=True)
        told = logs / f"{workflow}.event.json"
        told.write_text(json.dumps(payload))
        run = Run(logs / f"{workflow}.log")
        command = [str(self.program), event, "--json", "--eventpath", str(told), *self.options]
        command += ["--workflows", f".github/workflows/{workflow}.yml"]
        command += ["--job", job] if job else []
        started = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=self.repository,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                run.note(parsed(line))
        seconds = time.monotonic() - started
        print(f"   {workflow}: {seconds:.0f} s, all output in {run.log}", flush=True)
        wanted = [
            key
            for key in expected(self.repository, workflow)
            if not set(key) & set(skipped) and (job in (None, key[0]) or key == (workflow, job))
        ]
        bad = [key for key, result in run.results.items() if result != "success"]
        absent = ["/".join(key) for key in wanted if key not in run.results]
        if bad or absent or process.returncode:
            failed = ["/".join(key) for key in bad]
            raise JobsError(
                f"{workflow}: act ended with {process.returncode}; failed: "
                f"{', '.join(failed) or 'none'}; did not run: {', '.join(absent) or 'none'}",
                bad,
                run.failed,
            )

    def environment(self) -> dict[str, str]:
        """Return the environment of the jobs, without this project's local variables."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        return {**kept, **self.variables}


def parsed(line: str) -> dict[str, Any]:
    """Parse a line of act's log; a line that is no JSON object becomes a message."""
    try:
        event = json.loads(line)
    except ValueError:
        event = None
    return event if isinstance(event, dict) else {"msg": line}


def expected(repository: Path, workflow: str) -> Iterator[tuple[str, str]]:
    """Yield each job's caller, or the workflow's own name, and the job's id."""
    folder = repository / ".github" / "workflows"
    text = (folder / f"{workflow}.yml").read_text()
    called = dict(CALLER.findall(jobs_of(text)))
    for job in JOB.findall(jobs_of(text)):
        if job not in called:
            yield workflow, job
            continue
        for inner in JOB.findall(jobs_of((folder / called[job]).read_text())):
            yield job, inner


def jobs_of(text: str) -> str:
    """Return the jobs section of a workflow, which is its last section."""
    return text.partition("\njobs:\n")[2]
