# SPDX-License-Identifier: BSD-3-Clause
"""What ``python -m flash_dmattn`` shows."""

import warnings

from scenarios import Scenarios

from flash_dmattn.loader import candidates, verify
from flash_dmattn.loader.report import make_report, render

SCENARIOS = Scenarios()


@SCENARIOS.add
def report_with_a_warning(installation):
    installation.write("cpu", "cu12-sm90", "cu13-sm90")
    installation.gpus("9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").write_text("garbage")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a report warns in its text alone
        report = make_report(installation.loader(), {})
    report["versions"] = dict.fromkeys(report["versions"], "1.0")
    report["host"]["system"] = "Linux"
    return render(report)


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
