# SPDX-License-Identifier: BSD-3-Clause
"""Which candidates can serve a device, and which is the best, as pure functions of facts.

The first of `ROWS` that a candidate violates refuses it. The accepted candidates are ranked by

1. the file that FLASH_DMATTN_LIBRARY_PATH names, then
2. the position of the arch in the device's preference, then
3. torch's CUDA major first, otherwise the newer CUDA major first, then
4. the order in which they were found: flash_dmattn's own packs first.

Of two packs with the same name, for example a distribution's and flash_dmattn's own, this ranks the
first found one first. So installing another pack never replaces flash_dmattn's own.

The arch has priority over the CUDA major, because code for another arch is slower in every call,
while packs of either major work under torch of either major.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from . import environment, remedies
from . import messages as say
from .candidates import Candidate
from .facts import Driver, Situation
from .targets import Targets
from .trace import Entry, Rule, Trace


class Wishes(NamedTuple):
    """What the environment requests; "" or "0" for no request."""

    library_path: str = ""
    cuda: str = ""
    arch: str = ""
    untried: str = "0"

    @staticmethod
    def of(environ: Mapping[str, str] | None) -> Wishes:
        """Read the variables."""
        names = (f"{environment.PREFIX}{field.upper()}" for field in Wishes._fields)
        return Wishes(*(environment.get(name, environ) for name in names))


class Need(NamedTuple):
    """What a device needs from a pack."""

    facts: Situation
    wishes: Wishes
    targets: Targets
    forced: bool  # a variable names a file, which may be for this device
    majors: Set[str]  # CUDA majors of the packs that are present

    @property
    def archs(self) -> tuple[str, ...]:
        """The archs whose code the device runs, in order of preference."""
        return self.targets.preference.get(self.facts.device.capability or "", ())

    @property
    def supported(self) -> str:
        """The compute capabilities for which packs can be built."""
        return ", ".join(self.targets.preference)

    @property
    def platform(self) -> str:
        """The platform of a torch whose cuda devices are not NVIDIA's; "" for other devices."""
        torch = self.facts.torch
        return torch.platform if torch and torch.rocm and self.facts.device.kind == "cuda" else ""

    @property
    def torch_major(self) -> str | None:
        """The CUDA major that torch is built with."""
        torch = self.facts.torch
        return torch.cuda.partition(".")[0] if torch and torch.cuda else None

    @property
    def fix_of_no_pack(self) -> str:
        """The remedy if there is no pack of the device's kind."""
        version, kind = self.facts.package_version, self.facts.device.kind
        if kind == "cpu":
            return remedies.reinstall(version)
        if self.platform:
            return remedies.PORTABLE
        if kind == "xpu":
            return remedies.TRITON
        if kind == "cuda" and self.facts.driver is None:
            known = self.targets.min_driver
            here = [floor for major, floor in known.items() if major in self.majors]
            floors = here or [*known.values()] or ["525.60.13"]
            return remedies.update_driver(min(floors, key=_numbers))
        if not self.archs:
            return remedies.PLAIN_PYTORCH
        if not self.majors:
            return remedies.install_wheel(version)
        return remedies.build_for(self.archs[0], version)


class Case(NamedTuple):
    """One candidate for one device."""

    pack: Candidate
    need: Need
    facts: Situation

    @property
    def runs_elsewhere(self) -> bool:
        """Whether it is code for an arch that the device does not run."""
        return self.pack.arch is not None and self.pack.arch not in self.need.archs

    @property
    def record(self) -> str:
        """The table's record of pack runs on the device's compute capability."""
        return self.need.targets.record.get(self.facts.device.capability or "", "")

    @property
    def is_wished(self) -> bool:
        """Whether a variable requests it, or requests untried packs."""
        return self.need.wishes.untried == "1" or self.pack.forced

    @property
    def is_untried(self) -> bool:
        """Whether no GPU of this capability has run its kernels, and no variable requests it."""
        return self.record == "none" and not self.is_wished

    @property
    def needs_trial(self) -> bool:
        """Whether its self-test must pass on the device before it serves."""
        return self.record == "self-test" and not self.is_wished

    @property
    def floor(self) -> str | None:
        """The oldest driver that runs its CUDA major and its arch; None if the table does not have
        the major.
        """
        floor = self.need.targets.min_driver.get(self.pack.cuda_major or "")
        arch, _ = self.need.targets.arch_driver.get(self.pack.arch or "", ("", ""))
        return max(floor, arch, key=_numbers) if floor else None

    @property
    def needed_cuda(self) -> str:
        """The oldest CUDA whose driver runs it: its major, or the first that supports its arch."""
        _, first = self.need.targets.arch_driver.get(self.pack.arch or "", ("", ""))
        return max(self.pack.cuda_major or "", first, key=_numbers)

    @property
    def needs_driver(self) -> bool:
        """Whether it is a GPU pack and there is a driver to check."""
        return self.pack.cuda_major is not None and self.facts.driver is not None

    @property
    def driver_is_old(self) -> bool:
        """Whether the driver does not run the candidate's CUDA major, or its arch.

        The driver library's CUDA version takes precedence: with NVIDIA's forward-compatibility
        package it is newer than the version of the kernel driver implies.
        """
        driver = self.facts.driver or Driver(None, None)
        runs, needed = driver.cuda, self.floor and self.needed_cuda
        if runs is None:
            runs, needed = driver.version, self.floor
        return runs is None or needed is None or _numbers(runs) < _numbers(needed)

    @property
    def is_of_another_version(self) -> bool:
        """Whether it differs from this flash_dmattn's version, if that is known."""
        return self.facts.package_version not in (None, self.pack.version)

    @property
    def fix_of_file(self) -> str:
        """The remedy for a wrong or damaged file."""
        if self.pack.forced:
            return remedies.unset("FLASH_DMATTN_LIBRARY_PATH")
        return remedies.reinstall(self.facts.package_version, self.pack.distribution)

    def filled(self, text: str) -> str:
        """Return a text with the fields in braces filled in."""
        return text.format(case=self, pack=self.pack, need=self.need, facts=self.facts)


_FILE, _NO_PACK = "{case.fix_of_file}", "{need.fix_of_no_pack}"
_UPDATE = remedies.update_driver("{case.floor}")
_UNSET = remedies.unset("FLASH_DMATTN_{}")
Check = Callable[[Case], object]

# Rule, predicate that refuses a case, reason, and remedy. The first that refuses is reported.
ROWS: tuple[tuple[Rule, Check, str, str], ...] = (
    (
        Rule.DEVICE_KIND,
        lambda c: c.pack.device not in (None, c.facts.device.kind),
        say.DEVICE_KIND,
        _NO_PACK,
    ),
    (Rule.UNREADABLE, lambda c: c.pack.device is None, "{pack.defect}", _FILE),
    (Rule.CAPABILITY, lambda c: c.runs_elsewhere and c.need.platform, say.NOT_NVIDIA, _NO_PACK),
    (Rule.CAPABILITY, lambda c: c.runs_elsewhere and not c.facts.driver, say.NO_DRIVER, _NO_PACK),
    (
        Rule.CAPABILITY,
        lambda c: c.runs_elsewhere and c.facts.device.capability is None,
        say.NO_DEVICE,
        remedies.SHOW_GPUS,
    ),
    (Rule.CAPABILITY, lambda c: c.runs_elsewhere and c.need.archs, say.WRONG_ARCH, _NO_PACK),
    (Rule.CAPABILITY, lambda c: c.runs_elsewhere, say.NO_ARCH, _NO_PACK),
    (
        Rule.MACHINE,
        lambda c: c.pack.machine not in (None, c.facts.host.machine),
        say.WRONG_MACHINE,
        _FILE,
    ),
    (Rule.DRIVER, lambda c: c.needs_driver and c.floor is None, say.UNKNOWN_CUDA, _FILE),
    (Rule.DRIVER, lambda c: c.needs_driver and c.driver_is_old, say.OLD_DRIVER, _UPDATE),
    (Rule.ABI_VERSION, lambda c: c.pack.abi_version != c.facts.abi_version, say.WRONG_ABI, _FILE),
    # A file that a developer names may be of another build; equal ABI versions make it safe.
    (
        Rule.VERSION,
        lambda c: c.is_of_another_version and not c.pack.forced,
        say.WRONG_VERSION,
        _FILE,
    ),
    (Rule.UNTRIED, lambda c: c.is_untried, say.UNTRIED, remedies.TRY),
    (
        Rule.FORCED,
        lambda c: c.need.forced and not c.pack.forced,
        say.OTHER_FILE,
        _UNSET.format("LIBRARY_PATH"),
    ),
    (
        Rule.FORCED,
        lambda c: c.pack.cuda and c.need.wishes.cuda not in ("", c.pack.cuda_major),
        say.OTHER_CUDA,
        _UNSET.format("CUDA"),
    ),
    (
        Rule.FORCED,
        lambda c: c.pack.arch and c.need.wishes.arch not in ("", c.pack.arch.removeprefix("sm")),
        say.OTHER_ARCH,
        _UNSET.format("ARCH"),
    ),
    (Rule.DEFECT, lambda c: c.pack.defect, "{pack.defect}: {pack.path}", _FILE),
)

# Notes on candidates that can serve.
NOTES: tuple[tuple[Check, str], ...] = (
    (lambda c: c.record == "none" or (c.record == "self-test" and c.is_wished), say.NEVER_RUN),
    (lambda c: c.needs_trial, say.TRIAL_FIRST),
    (lambda c: c.record == "tiles", say.RUN_ELSEWHERE),
    (lambda c: c.need.archs and c.pack.arch != c.need.archs[0], say.BETTER_ARCH),
    (
        lambda c: (
            c.pack.cuda_major and c.need.torch_major and c.pack.cuda_major != c.need.torch_major
        ),
        say.OTHER_MAJOR,
    ),
    (lambda c: c.is_of_another_version, say.OTHER_VERSION),
)


def decide(
    situation: Situation,
    candidates: Sequence[Candidate],
    wishes: Wishes,
    targets: Targets | None,
) -> Trace:
    """Judge and rank candidates for one device.

    ``targets`` may be None for devices other than GPUs.
    """
    # A forced file for another kind of device does not affect this device.
    forced = any(c.forced and c.device in (situation.device.kind, None) for c in candidates)
    majors = {c.cuda_major for c in candidates if c.device == "cuda" and c.cuda_major}
    need = Need(situation, wishes, targets or Targets({}, {}, {}), forced, majors)
    entries = [_judge(Case(pack, need, situation), order) for order, pack in enumerate(candidates)]
    accepted = sorted((entry for entry in entries if not entry.rule), key=lambda e: e.rank)
    refused = [entry for entry in entries if entry.rule]
    return Trace(situation, (*_note_same_names(accepted), *refused), need.fix_of_no_pack)


def _judge(case: Case, order: int) -> Entry:
    pack, archs = case.pack, case.need.archs
    arch = archs.index(pack.arch) if pack.arch in archs else 0
    major = pack.cuda_major or ""
    newest_first = -int(major) if major.isdigit() else 0
    rank = (not pack.forced, arch, major != case.need.torch_major, newest_first, order)
    for rule, refuses, reason, fix in ROWS:
        if refuses(case):
            return Entry(pack, rank, rule, case.filled(reason), case.filled(fix))
    notes = "; ".join(case.filled(text) for applies, text in NOTES if applies(case))
    return Entry(pack, rank, None, notes, trial=case.needs_trial)


def _note_same_names(accepted: Sequence[Entry]) -> list[Entry]:
    """Add to each accepted candidate a note if one of the same name precedes it."""
    first: dict[str, Candidate] = {}
    result = []
    for entry in accepted:
        winner = first.setdefault(entry.candidate.name, entry.candidate)
        note = "" if winner is entry.candidate else say.SAME_NAME.format(source=winner.source)
        result.append(entry._replace(reason="; ".join(filter(None, (entry.reason, note)))))
    return result


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
