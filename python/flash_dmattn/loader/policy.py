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

Of two packs with one name, such as a distribution's and flash_dmattn's own, the first found thus
goes first; a pack from elsewhere never replaces flash_dmattn's own by being installed.

The arch counts for more than the CUDA major, because code made for another arch is slower on every
call, while packs of either major work under torch of either major.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from . import messages, remedies
from .candidates import Candidate
from .facts import Driver, Situation
from .targets import Targets
from .trace import Accepted, Entry, Rank, Refused, Rule, Trace, Verdict

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
    majors = {c.cuda_major for c in candidates if c.device == "cuda" and c.cuda_major}
    judge = _Judge(situation, wishes, targets, forced, majors)
    accepted: list[tuple[Rank, Entry]] = []
    refused = []
    for place, candidate in enumerate(candidates):
        verdict = judge.verdict(candidate)
        if isinstance(verdict, Accepted):
            rank = judge.rank(candidate, place)
            accepted.append((rank, Entry(candidate, verdict, rank)))
        elif verdict.rule is Rule.DEFECT:  # it would have served, had its file been there
            refused.append(Entry(candidate, verdict, judge.rank(candidate, place)))
        else:
            refused.append(Entry(candidate, verdict))
    accepted.sort(key=lambda pair: pair[0])
    entries = _with_names_told_apart([entry for _, entry in accepted])
    return Trace(situation, (*entries, *refused), judge.missing_pack_remedy())


def _with_names_told_apart(accepted: Sequence[Entry]) -> list[Entry]:
    """Say of each accepted candidate which one of the same name goes before it."""
    first: dict[str, Candidate] = {}
    result = []
    for entry in accepted:
        winner = first.setdefault(entry.candidate.name, entry.candidate)
        if winner is not entry.candidate and isinstance(entry.verdict, Accepted):
            note = messages.SAME_NAME.format(source=winner.source)
            verdict = Accepted("; ".join(filter(None, (entry.verdict.note, note))))
            entry = replace(entry, verdict=verdict)
        result.append(entry)
    return result


class _Judge:
    def __init__(
        self,
        situation: Situation,
        wishes: Wishes,
        targets: Targets | None,
        forced: bool,
        majors: Set[str],
    ) -> None:
        self.situation = situation
        self.wishes = wishes
        self.forced = forced
        self.majors = majors
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

    def rank(self, candidate: Candidate, place: int) -> Rank:
        """Return a key by which the best candidate sorts first."""
        arch = self.archs.index(candidate.arch) if candidate.arch in self.archs else 0
        major = candidate.cuda_major or "0"
        return not candidate.forced, arch, major != self._torch_major(), -int(major), place

    def missing_pack_remedy(self) -> str:
        """Return what to do if there is no pack of the device's kind."""
        kind, version = self.situation.device.kind, self.situation.package_version
        if kind == "cpu":
            return remedies.reinstall(version)
        if self._rocm():
            return remedies.portable()
        if kind == "cuda" and self.situation.driver is None:
            return remedies.update_driver(self._oldest_driver())
        if not self.archs:
            return remedies.plain_pytorch()
        if not self.majors:
            return remedies.install_wheel(version)
        return remedies.build(self.archs[0], version)

    def _source(self, candidate: Candidate) -> Refused | None:
        if candidate.device is not None:
            return None
        return Refused(Rule.UNREADABLE, candidate.defect, self._replace_file(candidate))

    def _device_kind(self, candidate: Candidate) -> Refused | None:
        if candidate.device in (None, self.situation.device.kind):
            return None
        reason = messages.DEVICE_KIND.format(device=candidate.device)
        return Refused(Rule.DEVICE_KIND, reason, self.missing_pack_remedy())

    def _capability(self, candidate: Candidate) -> Refused | None:
        capability = self.situation.device.capability
        if candidate.arch is None or candidate.arch in self.archs:
            return None
        if self._rocm():
            reason = messages.NOT_NVIDIA.format(platform=self._rocm())
        elif self.situation.driver is None:
            reason = messages.NO_DRIVER
        elif capability is None:
            reason = messages.NO_DEVICE.format(device=self.situation.device)
            return Refused(Rule.CAPABILITY, reason, remedies.show_gpus())
        elif self.archs:
            reason = messages.WRONG_ARCH.format(arch=candidate.arch, capability=capability)
        else:
            supported = ", ".join(self.capabilities)
            reason = messages.NO_ARCH.format(capability=capability, supported=supported)
        return Refused(Rule.CAPABILITY, reason, self.missing_pack_remedy())

    def _host(self, candidate: Candidate) -> Refused | None:
        machine = self.situation.host.machine
        if candidate.machine in (None, machine):
            return None
        reason = messages.WRONG_MACHINE.format(built=candidate.machine, machine=machine)
        return Refused(Rule.MACHINE, reason, self._replace_file(candidate))

    def _driver(self, candidate: Candidate) -> Refused | None:
        major, driver = candidate.cuda_major, self.situation.driver
        if major is None or driver is None:
            return None
        floor = self.min_driver.get(major)
        if floor is None:
            reason = messages.UNKNOWN_CUDA.format(major=major)
            return Refused(Rule.DRIVER, reason, self._replace_file(candidate))
        if _runs(driver, major, floor):
            return None
        reason = messages.OLD_DRIVER.format(major=major, floor=floor, driver=driver)
        return Refused(Rule.DRIVER, reason, remedies.update_driver(floor))

    def _abi_version(self, candidate: Candidate) -> Refused | None:
        wanted = self.situation.abi_version
        if candidate.abi_version == wanted:
            return None
        reason = messages.WRONG_ABI.format(found=candidate.abi_version, wanted=wanted)
        return Refused(Rule.ABI_VERSION, reason, self._replace_file(candidate))

    def _version(self, candidate: Candidate) -> Refused | None:
        wanted = self.situation.package_version
        # A file that a developer names may be of another build; equal ABI versions make that safe.
        if candidate.forced or wanted is None or candidate.version == wanted:
            return None
        reason = messages.WRONG_VERSION.format(found=candidate.version, wanted=wanted)
        return Refused(Rule.VERSION, reason, self._replace_file(candidate))

    def _wishes(self, candidate: Candidate) -> Refused | None:
        wishes = self.wishes
        if self.forced and not candidate.forced:
            reason = messages.OTHER_FILE.format(path=wishes.library_path)
            return Refused(Rule.FORCED, reason, remedies.unset("FLASH_DMATTN_LIBRARY_PATH"))
        if wishes.cuda and candidate.cuda_major not in (None, wishes.cuda):
            reason = messages.OTHER_CUDA.format(major=wishes.cuda)
            return Refused(Rule.FORCED, reason, remedies.unset("FLASH_DMATTN_CUDA"))
        if wishes.arch and candidate.arch not in (None, f"sm{wishes.arch}"):
            reason = messages.OTHER_ARCH.format(arch=wishes.arch)
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
            notes.append(messages.BETTER_ARCH.format(arch=self.archs[0]))
        if major and torch_major and major != torch_major:
            notes.append(messages.OTHER_MAJOR.format(major=major, torch=torch_major))
        if version is not None and candidate.version != version:
            notes.append(messages.OTHER_VERSION.format(found=candidate.version, wanted=version))
        return "; ".join(notes)

    def _torch_major(self) -> str | None:
        torch = self.situation.torch
        return None if torch is None or torch.cuda is None else torch.cuda.partition(".")[0]

    def _rocm(self) -> str:
        """Return the platform of a torch whose cuda devices are not NVIDIA's; "" for others."""
        torch, kind = self.situation.torch, self.situation.device.kind
        return torch.platform if torch is not None and torch.rocm and kind == "cuda" else ""

    def _oldest_driver(self) -> str:
        """Return the oldest driver that runs a pack which is here, or any where none is."""
        known = self.min_driver
        here = [floor for major, floor in known.items() if major in self.majors]
        return min(here or known.values(), key=_numbers, default="525.60.13")


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
