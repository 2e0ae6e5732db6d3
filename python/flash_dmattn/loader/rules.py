# SPDX-License-Identifier: BSD-3-Clause
"""The rules by which a candidate is refused: rows of what is checked, the reason, and the fix."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import NamedTuple

from . import environment, messages, remedies
from .candidates import Candidate
from .facts import Situation
from .targets import Targets
from .trace import Refused, Rule

__all__ = ["Case", "Need", "Wishes", "notes", "refusal"]


class Wishes(NamedTuple):
    """What the environment asks for; "" where it asks for nothing."""

    library_path: str = ""
    cuda: str = ""
    arch: str = ""
    untried: bool = False

    @staticmethod
    def of(environ: Mapping[str, str] | None) -> Wishes:
        """Read the variables."""
        return Wishes(
            library_path=environment.get("FLASH_DMATTN_LIBRARY_PATH", environ),
            cuda=environment.get("FLASH_DMATTN_CUDA", environ),
            arch=environment.get("FLASH_DMATTN_ARCH", environ),
            untried=environment.get("FLASH_DMATTN_UNTRIED", environ) == "1",
        )


class Need(NamedTuple):
    """What a device needs of a pack.

    Attributes:
        facts: what is known of the machine.
        wishes: what variables ask for.
        targets: what packs can be built for.
        forced: a variable names a file, which may be for this device.
        majors: the CUDA majors of the packs that are here.
    """

    facts: Situation
    wishes: Wishes
    targets: Targets
    forced: bool
    majors: Set[str]

    @property
    def archs(self) -> tuple[str, ...]:
        """The archs whose code the device runs, the best first."""
        return self.targets.preference.get(self.facts.device.capability or "", ())

    @property
    def supported(self) -> str:
        """The compute capabilities for which packs can be built."""
        return ", ".join(self.targets.preference)

    @property
    def platform(self) -> str:
        """The platform of a torch whose cuda devices are not NVIDIA's; "" for others."""
        torch, device = self.facts.torch, self.facts.device
        return torch.platform if torch and torch.rocm and device.kind == "cuda" else ""

    @property
    def torch_major(self) -> str | None:
        """The CUDA major that torch was built by."""
        torch = self.facts.torch
        return torch.cuda.partition(".")[0] if torch and torch.cuda else None

    @property
    def fix_of_no_pack(self) -> str:
        """What to do if there is no pack of the device's kind."""
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
            return remedies.update_driver(
                min(here or known.values(), key=_numbers, default="525.60.13")
            )
        if not self.archs:
            return remedies.PLAIN_PYTORCH
        if not self.majors:
            return remedies.install_wheel(version)
        return remedies.build_for(self.archs[0], version)


class Case(NamedTuple):
    """One candidate for one device."""

    pack: Candidate
    need: Need

    @property
    def facts(self) -> Situation:
        """What is known of the machine."""
        return self.need.facts

    @property
    def runs_elsewhere(self) -> bool:
        """Whether it is code of an arch that the device does not run."""
        return self.pack.arch is not None and self.pack.arch not in self.need.archs

    @property
    def record(self) -> str:
        """Whether packs were run on the device's compute capability, as the table has it."""
        return self.need.targets.record.get(self.facts.device.capability or "", "")

    @property
    def floor(self) -> str | None:
        """The oldest driver that runs its CUDA major; None if the table does not know it."""
        return self.need.targets.min_driver.get(self.pack.cuda_major or "")

    @property
    def needs_driver(self) -> bool:
        """Whether there is a driver that must run it."""
        return self.pack.cuda_major is not None and self.facts.driver is not None

    @property
    def is_of_another_version(self) -> bool:
        """Whether it is not of this flash_dmattn, where it is known which one this is."""
        return self.facts.package_version not in (None, self.pack.version)

    @property
    def fix_of_file(self) -> str:
        """What to do about a file that is not what it should be."""
        if self.pack.forced:
            return remedies.unset("FLASH_DMATTN_LIBRARY_PATH")
        return remedies.reinstall(self.facts.package_version, self.pack.distribution)


class Row(NamedTuple):
    """A rule, whether it refuses a case, and the reason and the fix, in which the case is filled
    in.
    """

    rule: Rule
    refuses: Callable[[Case], object]
    reason: str
    fix: str


_FILE, _NO_PACK = "{case.fix_of_file}", "{need.fix_of_no_pack}"

# The first that refuses speaks.
ROWS = (
    Row(
        Rule.DEVICE_KIND,
        lambda c: c.pack.device not in (None, c.facts.device.kind),
        messages.DEVICE_KIND,
        _NO_PACK,
    ),
    Row(Rule.UNREADABLE, lambda c: c.pack.device is None, "{pack.defect}", _FILE),
    Row(
        Rule.CAPABILITY,
        lambda c: c.runs_elsewhere and c.need.platform,
        messages.NOT_NVIDIA,
        _NO_PACK,
    ),
    Row(
        Rule.CAPABILITY,
        lambda c: c.runs_elsewhere and c.facts.driver is None,
        messages.NO_DRIVER,
        _NO_PACK,
    ),
    Row(
        Rule.CAPABILITY,
        lambda c: c.runs_elsewhere and c.facts.device.capability is None,
        messages.NO_DEVICE,
        remedies.SHOW_GPUS,
    ),
    Row(
        Rule.CAPABILITY, lambda c: c.runs_elsewhere and c.need.archs, messages.WRONG_ARCH, _NO_PACK
    ),
    Row(Rule.CAPABILITY, lambda c: c.runs_elsewhere, messages.NO_ARCH, _NO_PACK),
    Row(
        Rule.MACHINE,
        lambda c: c.pack.machine not in (None, c.facts.host.machine),
        messages.WRONG_MACHINE,
        _FILE,
    ),
    Row(Rule.DRIVER, lambda c: c.needs_driver and c.floor is None, messages.UNKNOWN_CUDA, _FILE),
    Row(
        Rule.DRIVER,
        lambda c: c.needs_driver and not _driver_runs(c),
        messages.OLD_DRIVER,
        remedies.update_driver("{case.floor}"),
    ),
    Row(
        Rule.ABI_VERSION,
        lambda c: c.pack.abi_version != c.facts.abi_version,
        messages.WRONG_ABI,
        _FILE,
    ),
    # A file that a developer names may be of another build; equal ABI versions make that safe.
    Row(
        Rule.VERSION,
        lambda c: c.is_of_another_version and not c.pack.forced,
        messages.WRONG_VERSION,
        _FILE,
    ),
    Row(
        Rule.UNTRIED,
        lambda c: c.record == "none" and not c.need.wishes.untried and not c.pack.forced,
        messages.UNTRIED,
        remedies.TRY,
    ),
    Row(
        Rule.FORCED,
        lambda c: c.need.forced and not c.pack.forced,
        messages.OTHER_FILE,
        remedies.unset("FLASH_DMATTN_LIBRARY_PATH"),
    ),
    Row(
        Rule.FORCED,
        lambda c: c.need.wishes.cuda and c.pack.cuda_major not in (None, c.need.wishes.cuda),
        messages.OTHER_CUDA,
        remedies.unset("FLASH_DMATTN_CUDA"),
    ),
    Row(
        Rule.FORCED,
        lambda c: c.need.wishes.arch and c.pack.arch not in (None, f"sm{c.need.wishes.arch}"),
        messages.OTHER_ARCH,
        remedies.unset("FLASH_DMATTN_ARCH"),
    ),
    Row(Rule.DEFECT, lambda c: c.pack.defect, "{pack.defect}: {pack.path}", _FILE),
)


class Note(NamedTuple):
    """What is worth knowing of a candidate that can serve."""

    applies: Callable[[Case], object]
    text: str


NOTES = (
    Note(lambda c: c.record == "none", messages.NEVER_RUN),
    Note(lambda c: c.record == "tiles", messages.RUN_ELSEWHERE),
    Note(lambda c: c.need.archs and c.pack.arch != c.need.archs[0], messages.BETTER_ARCH),
    Note(
        lambda c: (
            c.pack.cuda_major and c.need.torch_major and c.pack.cuda_major != c.need.torch_major
        ),
        messages.OTHER_MAJOR,
    ),
    Note(lambda c: c.is_of_another_version, messages.OTHER_VERSION),
)


def refusal(case: Case) -> Refused | None:
    """Return the first refusal, or None if the candidate can serve the device."""
    for row in ROWS:
        if row.refuses(case):
            return Refused(row.rule, _filled(row.reason, case), _filled(row.fix, case))
    return None


def notes(case: Case) -> list[str]:
    """Return what is worth knowing of a candidate that can serve."""
    return [_filled(text, case) for applies, text in NOTES if applies(case)]


def _filled(text: str, case: Case) -> str:
    return text.format(case=case, pack=case.pack, need=case.need, facts=case.facts)


def _driver_runs(case: Case) -> bool:
    """Say whether the driver runs the candidate's CUDA major.

    What the driver's library says it runs decides: with NVIDIA's forward-compatibility package that
    is more than the version of the kernel driver tells.
    """
    driver, major, floor = case.facts.driver, case.pack.cuda_major, case.floor
    if driver is None or major is None or floor is None:
        return False
    if driver.cuda is not None:
        return _numbers(driver.cuda) >= (int(major),)
    return driver.version is not None and _numbers(driver.version) >= _numbers(floor)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
