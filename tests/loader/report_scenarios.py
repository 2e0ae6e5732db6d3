# SPDX-License-Identifier: BSD-3-Clause
"""The output of ``python -m flash_dmattn``."""

import sys
import warnings

import pytest
from scenarios import Scenarios

from flash_dmattn.backends import portable
from flash_dmattn.loader import candidates, verify
from flash_dmattn.loader.facts import Device, Torch
from flash_dmattn.loader.report import make_report, render

SCENARIOS = Scenarios()


def report_of(installation, **environ):
    report = make_report(installation.loader(), environ)
    report["versions"] = dict.fromkeys(report["versions"], "1.0")
    report["host"]["system"] = "Linux"
    return render(report)


@SCENARIOS.add
def report_of_a_bad_value(installation):
    installation.write("cpu")
    installation.environ.update(FLASH_DMATTN_LOG="loud", FLASH_DMATTN_LOGG="info")
    return report_of(installation, **installation.environ)


@SCENARIOS.add
def report_of_rocm(installation):
    installation.write("cpu", "cu13-sm90")
    installation.facts.torch_ = Torch("2.11.0", None, rocm="6.4.43484")
    installation.facts.devices = (Device("cuda", 0),)
    return report_of(installation)


@SCENARIOS.add
def report_of_xpu(installation):
    installation.write("cpu", "cu13-sm90")
    installation.facts.torch_ = Torch("2.11.0", None, xpu="20250101")
    installation.facts.devices = (Device("xpu", 0),)
    return report_of(installation)


@SCENARIOS.add
def reports_of_what_a_variable_names(installation):
    installation.write("cpu")
    installation.facts.devices = (Device("xpu", 0),)
    texts = [report_of(installation, FLASH_DMATTN_BACKEND=name) for name in ("cpu", "reference")]
    # triton's answer depends on the machine, so it is replaced.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "why_unavailable", lambda name, kind: f"no {name} on {kind}")
        texts.append(report_of(installation, FLASH_DMATTN_BACKEND="triton"))
        patch.setitem(sys.modules, "flash_dmattn.backends.portable", None)
        texts.append(report_of(installation, FLASH_DMATTN_BACKEND="flex"))
    return "\n\n".join(texts)


@SCENARIOS.add
def report_with_a_warning(installation):
    installation.set_up("cpu", "cu12-sm90", "cu13-sm90", gpu="9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").write_text("garbage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a report warns only in its text
        return report_of(installation)


@SCENARIOS.add
def verification(installation):
    folder = installation.root / "files"
    folder.mkdir()
    rows = []
    for name in ("whole", "changed", "resized", "gone", "folder"):
        (folder / name).write_text(name)
        size = len(name) + (name == "resized")
        digest = verify.hashlib.sha256(b"whole").hexdigest()
        rows.append(verify.Recorded(str(folder / name), "RECORD", "sha256", digest, size))
    (folder / "gone").unlink()
    (folder / "folder").unlink()
    (folder / "folder").mkdir()
    rows[-1] = verify.Recorded(rows[-1].path, "RECORD", "sha256", "", None)
    (folder / "unrecorded").touch()
    found = [
        candidates.Candidate("new", str(folder / "unrecorded"), "flash_dmattn", device="cpu"),
        *candidates.manifest_candidates(folder / "nothing", "flash_dmattn"),
    ]
    return verify.render(verify.verify(found, lambda distribution: rows))
