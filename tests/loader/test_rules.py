# SPDX-License-Identifier: BSD-3-Clause
import pytest

from flash_dmattn.loader.candidates import Candidate
from flash_dmattn.loader.facts import Device, Driver, Host, Situation, Torch
from flash_dmattn.loader.rules import Wishes, decide
from flash_dmattn.loader.targets import Targets
from flash_dmattn.loader.trace import Rule

ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
TARGETS = Targets(
    preference={
        "8.0": ("sm80",),
        "8.6": ("sm86", "sm80"),
        "8.7": ("sm80",),
        "8.9": ("sm89", "sm86", "sm80"),
        "9.0": ("sm90",),
        "10.0": ("sm100",),
        "10.3": ("sm100",),
        "12.0": ("sm120",),
        "12.1": ("sm120",),
    },
    record={
        "8.0": "run",
        "8.6": "run",
        "8.7": "run",
        "8.9": "tiles",
        "9.0": "run",
        "10.0": "run",
        "10.3": "run",
        "12.0": "run",
        "12.1": "none",
    },
    min_driver={"12": "525.60.13", "13": "580.65.06"},
)


def gpu_pack(major, sm, **changes):
    fields = {
        "name": f"cu{major}-{sm}",
        "path": f"/packs/cu{major}-{sm}.so",
        "source": "flash_dmattn",
        "device": "cuda",
        "machine": "x86_64",
        "cuda": {"12": "12.4", "13": "13.0"}.get(major, f"{major}.0"),
        "arch": sm,
        "version": "2.0.0a1",
        "abi_version": 1,
    }
    return Candidate(**{**fields, **changes})


def cpu_pack(**changes):
    fields = {"name": "cpu", "path": "/packs/cpu.so", "device": "cpu", "cuda": None, "arch": None}
    return gpu_pack("0", "sm0", **{**fields, **changes})


ALL_PACKS = [cpu_pack(), *(gpu_pack(major, arch) for major in ("12", "13") for arch in ARCHS)]


def situation(capability=None, driver=("580.65.06", "13.0"), torch="13.0", kind="cuda"):
    return Situation(
        package_version="2.0.0a1",
        abi_version=1,
        host=Host("x86_64", "glibc 2.35"),
        torch=Torch("2.11.0", torch),
        driver=None if driver is None else Driver(*driver),
        device=Device(kind, 0, "", capability),
    )


def accepted(candidates, where, wishes=None):
    trace = decide(where, candidates, wishes or Wishes(), TARGETS)
    return [entry.candidate.name for entry in trace.accepted()]


def refusal(candidate, where, wishes=None):
    (entry,) = decide(where, [candidate], wishes or Wishes(), TARGETS).entries
    return entry.rule, entry.reason


@pytest.mark.parametrize(
    ("capability", "archs"),
    [
        ("7.5", []),
        ("8.0", ["sm80"]),
        ("8.6", ["sm86", "sm80"]),
        ("8.7", ["sm80"]),
        ("8.9", ["sm89", "sm86", "sm80"]),
        ("9.0", ["sm90"]),
        ("10.0", ["sm100"]),
        ("10.3", ["sm100"]),
        ("12.0", ["sm120"]),
        ("12.1", ["sm120"]),
        ("13.0", []),
    ],
)
@pytest.mark.parametrize(("torch", "majors"), [("12.8", ["12", "13"]), ("13.0", ["13", "12"])])
def test_arch_counts_before_the_major_of_torch(capability, archs, torch, majors):
    found = accepted(ALL_PACKS, situation(capability, torch=torch), Wishes(untried="1"))
    assert found == [f"cu{major}-{arch}" for arch in archs for major in majors]


def test_a_better_arch_beats_the_same_major():
    packs = [gpu_pack("13", "sm80"), gpu_pack("12", "sm86")]
    assert accepted(packs, situation("8.6")) == ["cu12-sm86", "cu13-sm80"]


def test_without_cuda_in_torch_the_newer_major_is_first():
    packs = [gpu_pack("12", "sm90"), gpu_pack("13", "sm90")]
    assert accepted(packs, situation("9.0", torch=None)) == ["cu13-sm90", "cu12-sm90"]


def test_equals_stay_in_the_order_found():
    packs = [gpu_pack("13", "sm90", name="first"), gpu_pack("13", "sm90", name="second")]
    assert accepted(packs, situation("9.0")) == ["first", "second"]


def test_the_cpu_is_served_by_the_cpu_pack_alone():
    where = situation(kind="cpu", driver=None)
    assert accepted(ALL_PACKS, where) == ["cpu"]
    assert refusal(ALL_PACKS[1], where) == (Rule.DEVICE_KIND, "it is for cuda devices")


@pytest.mark.parametrize(
    ("driver", "majors"),
    [
        (("525.60.12", None), []),
        (("525.60.13", None), ["12"]),
        (("580.65.05", None), ["12"]),
        (("580.65.06", None), ["13", "12"]),
        (("1000.1", None), ["13", "12"]),
        (("470.256.02", "11.4"), []),
        (("535.54.03", "12.2"), ["12"]),
        # NVIDIA's forward-compatibility package: an old kernel driver with a newer CUDA.
        (("535.54.03", "13.0"), ["13", "12"]),
        ((None, "13.1"), ["13", "12"]),
        ((None, None), []),
    ],
)
def test_driver_floor(driver, majors):
    packs = [gpu_pack("13", "sm90"), gpu_pack("12", "sm90")]
    assert accepted(packs, situation("9.0", driver=driver)) == [f"cu{m}-sm90" for m in majors]


@pytest.mark.parametrize(
    ("driver", "archs"),
    [
        (("535.54.03", "12.2"), ["sm80"]),
        (("570.26", "12.8"), ["sm80"]),
        (("575.51.02", None), ["sm80"]),
        (("575.51.03", None), ["sm80", "sm120"]),
        (("575.51.03", "12.9"), ["sm80", "sm120"]),
        (("580.65.06", "13.0"), ["sm80", "sm120"]),
        # NVIDIA's forward-compatibility package.
        (("535.54.03", "13.0"), ["sm80", "sm120"]),
    ],
)
def test_driver_floor_of_an_arch(driver, archs):
    """A driver for CUDA 12 may lack support for a later GPU."""
    targets = TARGETS._replace(arch_driver={"sm120": ("575.51.03", "12.9")})
    served = {"sm80": "8.0", "sm120": "12.0"}
    found = [
        arch
        for arch, capability in served.items()
        for entry in decide(
            situation(capability, driver=driver), [gpu_pack("12", arch)], Wishes(), targets
        ).accepted()
    ]
    assert found == archs
    (entry,) = decide(
        situation("12.0", driver=("570.26", "12.8")), [gpu_pack("12", "sm120")], Wishes(), targets
    ).entries
    assert entry.reason == (
        "CUDA 12 code for sm120 needs NVIDIA driver 575.51.03 or newer, found 570.26 (CUDA 12.8)"
    )


REFUSALS = [
    (
        gpu_pack("13", "sm90"),
        situation("7.5"),
        Rule.CAPABILITY,
        "no pack supports compute capability 7.5; supported are 8.0, 8.6, 8.7, 8.9, 9.0, 10.0, "
        "10.3, 12.0, 12.1",
    ),
    (
        gpu_pack("13", "sm80"),
        situation("9.0"),
        Rule.CAPABILITY,
        "sm80 code does not run on compute capability 9.0",
    ),
    (
        gpu_pack("13", "sm80"),
        situation(None),
        Rule.CAPABILITY,
        "the NVIDIA driver shows no device cuda:0",
    ),
    (
        gpu_pack("13", "sm80"),
        situation(None, driver=None),
        Rule.CAPABILITY,
        "there is no NVIDIA driver",
    ),
    (
        gpu_pack("13", "sm90", machine="aarch64"),
        situation("9.0"),
        Rule.MACHINE,
        "it was built for aarch64, this machine is x86_64",
    ),
    (
        gpu_pack("13", "sm90"),
        situation("9.0", driver=("535.54.03", "12.2")),
        Rule.DRIVER,
        "CUDA 13 code for sm90 needs NVIDIA driver 580.65.06 or newer, found 535.54.03 (CUDA 12.2)",
    ),
    (
        gpu_pack("14", "sm90"),
        situation("9.0"),
        Rule.DRIVER,
        "CUDA 14 is unknown to this flash_dmattn",
    ),
    (
        gpu_pack("13", "sm90", abi_version=2),
        situation("9.0"),
        Rule.ABI_VERSION,
        "it has pack ABI 2, this flash_dmattn needs 1",
    ),
    (
        gpu_pack("13", "sm90", version="1.9"),
        situation("9.0"),
        Rule.VERSION,
        "it is of version 1.9, flash_dmattn is 2.0.0a1",
    ),
    (
        gpu_pack("13", "sm90", defect="the file is missing"),
        situation("9.0"),
        Rule.DEFECT,
        "the file is missing: /packs/cu13-sm90.so",
    ),
]


@pytest.mark.parametrize(("candidate", "where", "rule", "reason"), REFUSALS)
def test_refusals(candidate, where, rule, reason):
    assert refusal(candidate, where) == (rule, reason)


def test_forced_cuda_and_arch():
    wishes = Wishes(cuda="12", arch="80")
    packs = [gpu_pack(major, arch) for major in ("12", "13") for arch in ("sm86", "sm80")]
    assert accepted(packs, situation("8.6"), wishes) == ["cu12-sm80"]
    assert refusal(packs[2], situation("8.6"), wishes) == (
        Rule.FORCED,
        "FLASH_DMATTN_CUDA=12 asks for another CUDA",
    )
    assert refusal(packs[0], situation("8.6"), wishes) == (
        Rule.FORCED,
        "FLASH_DMATTN_ARCH=80 asks for another arch",
    )


def test_a_forced_arch_that_cannot_run_is_refused():
    trace = decide(situation("9.0"), ALL_PACKS, Wishes(arch="80"), TARGETS)
    assert trace.chosen is None
    assert trace.remedy == "unset FLASH_DMATTN_ARCH"


def test_forced_variables_leave_the_cpu_alone():
    where = situation(kind="cpu", driver=None)
    assert accepted(ALL_PACKS, where, Wishes(cuda="12", arch="80")) == ["cpu"]


def test_a_forced_file_is_the_only_one():
    wishes = Wishes(library_path="/dev.so")
    forced = gpu_pack("12", "sm80", name="dev", path="/dev.so", forced=True, version="1.9")
    trace = decide(situation("8.6"), [*ALL_PACKS, forced], wishes, TARGETS)
    (entry,) = trace.accepted()
    assert entry.candidate is forced
    assert str(entry) == (
        "dev from flash_dmattn: accepted: sm86 would suit the device better; built by CUDA 12, "
        "torch by CUDA 13; of version 1.9, flash_dmattn is 2.0.0a1"
    )
    reasons = [e.reason for e in trace.entries if e.candidate.name == "cu13-sm86"]
    assert reasons == ["FLASH_DMATTN_LIBRARY_PATH=/dev.so names another file"]


def test_a_forced_file_leaves_other_kinds_of_devices_alone():
    forced = gpu_pack("13", "sm90", forced=True)
    where = situation(kind="cpu", driver=None)
    assert accepted([cpu_pack(), forced], where, Wishes(library_path="x")) == ["cpu"]


def test_a_forced_file_that_cannot_run_is_refused_and_nothing_replaces_it():
    forced = gpu_pack("13", "sm80", forced=True)
    trace = decide(situation("9.0"), [*ALL_PACKS, forced], Wishes(library_path="x"), TARGETS)
    assert trace.chosen is None
    assert trace.remedy == "unset FLASH_DMATTN_LIBRARY_PATH"


def test_versions_are_not_compared_where_nothing_is_installed():
    where = situation(kind="cpu")
    where = Situation(None, 1, where.host, None, None, where.device)
    assert accepted([cpu_pack(version="1.0")], where) == ["cpu"]


def test_a_pack_that_never_ran_on_such_a_gpu_serves_who_asks_for_it():
    where, pack = situation("12.1"), gpu_pack("13", "sm120")
    rule, reason = refusal(pack, where)
    assert rule is Rule.UNTRIED
    assert reason == (
        "it was never run on compute capability 12.1; FLASH_DMATTN_UNTRIED=1 lets it serve"
    )
    assert decide(where, [pack], Wishes(), TARGETS).remedy == "export FLASH_DMATTN_UNTRIED=1"
    (entry,) = decide(where, [pack], Wishes(untried="1"), TARGETS).entries
    assert str(entry).endswith("accepted: never run on compute capability 12.1")


def test_who_names_a_file_has_asked_for_it():
    pack = gpu_pack("13", "sm120", forced=True)
    assert accepted([pack], situation("12.1")) == [pack.name]


def test_a_pack_whose_tiles_ran_elsewhere_serves_and_says_so():
    (entry,) = decide(situation("8.9"), [gpu_pack("13", "sm89")], Wishes(), TARGETS).entries
    assert "its tiles were run on GPUs of another compute capability only" in str(entry)
