# SPDX-License-Identifier: BSD-3-Clause
"""Which candidates can serve a device, and which is the best: pure functions of facts.

A candidate is refused by the first of these rules that it breaks (`Rule` has them in this order):

1. it is for the kind of the device, if that is known;
2. its source can be read;
3. its arch runs on the device's compute capability, as targets.json declares;
4. it was built for the host's architecture;
5. the driver runs its CUDA major;
6. its pack ABI and
7. its version are those of this flash_dmattn;
8. it is what FLASH_DMATTN_LIBRARY_PATH, FLASH_DMATTN_CUDA and FLASH_DMATTN_ARCH ask for;
9. its file is there.

The accepted ones are ranked by

1. the file that FLASH_DMATTN_LIBRARY_PATH names, then
2. the place of its arch in the device's preference, then
3. torch's CUDA major before the other one, and without torch's the newer before the older, then
4. the order in which they were found: flash_dmattn's own packs first.

The arch counts for more than the CUDA major, because code made for another arch is slower on every
call, while packs of either major work under torch of either major.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import remedies
from .candidates import Candidate
from .facts import Driver, Situation
from .targets import Targets
from .trace import Accepted, Entry, Refused, Rule, Trace, Verdict

__all__ = ["Wishes", "decide"]


@dataclass(frozen=True)
class Wishes:
    """What the environment asks for; "" where it asks for nothing."""

    library_path: str = ""
    cuda: str = ""
    arch: str = ""


def decide(
    situation: Situation,
    candidates: Sequence[Candidate],
    wishes: Wishes,
    targets: Targets | None,
) -> Trace:
    """Judge and rank candidates for one device.

    ``targets`` may be None for devices other than GPUs.
    """
    # A forced file for another kind of device leaves this device alone.
    forced = any(c.forced and c.device in (situation.device.kind, None) for c in candidates)
    judge = _Judge(situation, wishes, targets, forced)
    entries = [Entry(candidate, judge.verdict(candidate)) for candidate in candidates]
    accepted = [entry for entry in entries if isinstance(entry.verdict, Accepted)]
    accepted.sort(key=lambda entry: judge.rank(entry.candidate))
    refused = [entry for entry in entries if isinstance(entry.verdict, Refused)]
    return Trace(situation, (*accepted, *refused), judge.missing_pack_remedy())


class _Judge:
    def __init__(
        self, situation: Situation, wishes: Wishes, targets: Targets | None, forced: bool
    ) -> None:
        self.situation = situation
        self.wishes = wishes
        self.forced = forced
        capability = situation.device.capability
        preference = targets.preference if targets is not None else {}
        self.archs = preference.get(capability, ()) if capability is not None else ()
        self.capabilities = tuple(preference)
        self.min_driver = targets.min_driver if targets is not None else {}

    def verdict(self, candidate: Candidate) -> Verdict:
        """Return the first refusal, or the acceptance."""
        checks = (
            self._device_kind,
            self._source,
            self._capability,
            self._host,
            self._driver,
            self._abi_version,
            self._version,
            self._wishes,
            self._file,
        )
        for check in checks:
            refused = check(candidate)
            if refused is not None:
                return refused
        return Accepted(self._note(candidate))

    def rank(self, candidate: Candidate) -> tuple[bool, int, bool, int]:
        """Return a key by which the best candidate sorts first."""
        arch = self.archs.index(candidate.arch) if candidate.arch in self.archs else 0
        major = candidate.cuda_major or "0"
        return not candidate.forced, arch, major != self._torch_major(), -int(major)

    def missing_pack_remedy(self) -> str:
        """Return what to do if there is no pack of the device's kind."""
        kind, version = self.situation.device.kind, self.situation.package_version
        if kind == "cpu":
            return remedies.reinstall(version)
        if kind == "cuda" and self.situation.driver is None:
            return remedies.update_driver(self._oldest_driver())
        if self.archs:
            return remedies.build(self.archs[0], version)
        return remedies.plain_pytorch()

    def _source(self, candidate: Candidate) -> Refused | None:
        if candidate.device is not None:
            return None
        return Refused(Rule.UNREADABLE, candidate.defect, self._replace_file(candidate))

    def _device_kind(self, candidate: Candidate) -> Refused | None:
        if candidate.device in (None, self.situation.device.kind):
            return None
        reason = f"it is for {candidate.device} devices"
        return Refused(Rule.DEVICE_KIND, reason, self.missing_pack_remedy())

    def _capability(self, candidate: Candidate) -> Refused | None:
        capability = self.situation.device.capability
        if candidate.arch is None or candidate.arch in self.archs:
            return None
        if self.situation.driver is None:
            reason = "there is no NVIDIA driver"
        elif capability is None:
            reason = f"the NVIDIA driver shows no device {self.situation.device}"
        elif self.archs:
            reason = f"{candidate.arch} code does not run on compute capability {capability}"
        else:
            reason = (
                f"no pack supports compute capability {capability}; supported are "
                f"{', '.join(self.capabilities)}"
            )
        return Refused(Rule.CAPABILITY, reason, self.missing_pack_remedy())

    def _host(self, candidate: Candidate) -> Refused | None:
        machine = self.situation.host.machine
        if candidate.machine in (None, machine):
            return None
        reason = f"it was built for {candidate.machine}, this machine is {machine}"
        return Refused(Rule.MACHINE, reason, self._replace_file(candidate))

    def _driver(self, candidate: Candidate) -> Refused | None:
        major, driver = candidate.cuda_major, self.situation.driver
        if major is None or driver is None:
            return None
        floor = self.min_driver.get(major)
        if floor is None:
            reason = f"CUDA {major} is unknown to this flash_dmattn"
            return Refused(Rule.DRIVER, reason, self._replace_file(candidate))
        if _runs(driver, major, floor):
            return None
        reason = f"CUDA {major} needs NVIDIA driver {floor} or newer, found {driver}"
        return Refused(Rule.DRIVER, reason, remedies.update_driver(floor))

    def _abi_version(self, candidate: Candidate) -> Refused | None:
        wanted = self.situation.abi_version
        if candidate.abi_version == wanted:
            return None
        reason = f"it has pack ABI {candidate.abi_version}, this flash_dmattn needs {wanted}"
        return Refused(Rule.ABI_VERSION, reason, self._replace_file(candidate))

    def _version(self, candidate: Candidate) -> Refused | None:
        wanted = self.situation.package_version
        # A file that a developer names may be of another build; equal ABI versions make that safe.
        if candidate.forced or wanted is None or candidate.version == wanted:
            return None
        reason = f"it is of version {candidate.version}, flash_dmattn is {wanted}"
        return Refused(Rule.VERSION, reason, self._replace_file(candidate))

    def _wishes(self, candidate: Candidate) -> Refused | None:
        wishes = self.wishes
        if self.forced and not candidate.forced:
            reason = f"FLASH_DMATTN_LIBRARY_PATH={wishes.library_path} names another file"
            return Refused(Rule.FORCED, reason, remedies.unset("FLASH_DMATTN_LIBRARY_PATH"))
        if wishes.cuda and candidate.cuda_major not in (None, wishes.cuda):
            reason = f"FLASH_DMATTN_CUDA={wishes.cuda} asks for another CUDA"
            return Refused(Rule.FORCED, reason, remedies.unset("FLASH_DMATTN_CUDA"))
        if wishes.arch and candidate.arch not in (None, f"sm{wishes.arch}"):
            reason = f"FLASH_DMATTN_ARCH={wishes.arch} asks for another arch"
            return Refused(Rule.FORCED, reason, remedies.unset("FLASH_DMATTN_ARCH"))
        return None

    def _file(self, candidate: Candidate) -> Refused | None:
        if not candidate.defect:
            return None
        reason = f"{candidate.defect}: {candidate.path}"
        return Refused(Rule.DEFECT, reason, self._replace_file(candidate))

    def _replace_file(self, candidate: Candidate) -> str:
        if candidate.forced:
            return remedies.unset("FLASH_DMATTN_LIBRARY_PATH")
        return remedies.reinstall(self.situation.package_version, candidate.distribution)

    def _note(self, candidate: Candidate) -> str:
        notes = []
        version, major, torch_major = (
            self.situation.package_version,
            candidate.cuda_major,
            self._torch_major(),
        )
        if self.archs and candidate.arch != self.archs[0]:
            notes.append(f"{self.archs[0]} would suit the device better")
        if major and torch_major and major != torch_major:
            notes.append(f"built by CUDA {major}, torch by CUDA {torch_major}")
        if version is not None and candidate.version != version:
            notes.append(f"of version {candidate.version}, flash_dmattn is {version}")
        return "; ".join(notes)

    def _torch_major(self) -> str | None:
        torch = self.situation.torch
        return None if torch is None or torch.cuda is None else torch.cuda.partition(".")[0]

    def _oldest_driver(self) -> str:
        return min(self.min_driver.values(), key=_numbers, default="525.60.13")


def _runs(driver: Driver, major: str, floor: str) -> bool:
    """Say whether a driver runs code of a CUDA major.

    What the driver's library says it runs decides: with NVIDIA's forward-compatibility package that
    is more than the version of the kernel driver tells.
    """
    if driver.cuda is not None:
        return _numbers(driver.cuda) >= (int(major),)
    return driver.version is not None and _numbers(driver.version) >= _numbers(floor)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
