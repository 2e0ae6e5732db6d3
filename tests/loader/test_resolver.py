# SPDX-License-Identifier: BSD-3-Clause
import logging
import threading
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from flash_dmattn.loader import FallbackWarning, Loader, NoPackError, remedies
from flash_dmattn.loader.environment import InvalidVariableError, UnknownVariableWarning
from flash_dmattn.loader.facts import Host


def names(trace):
    return [(e.candidate.name, "refused" if e.rule else "accepted") for e in trace.entries]


def reason(trace, name):
    return next(e.reason for e in trace.entries if e.candidate.name == name)


def test_nothing_is_looked_up_before_the_first_use(installation):
    installation.write("cpu")
    loader = installation.loader()
    assert installation.opened == []
    loader.pack_for("cpu")
    assert [Path(path).name for path in installation.opened] == ["libflash_dmattn_cpu.so"]


def test_each_device_is_decided_once(installation):
    installation.write("cpu", "cu13-sm90")
    installation.gpus("9.0", "9.0")
    loader = installation.loader()
    packs = [loader.pack_for("cuda", index) for index in (0, 1, 0)]
    assert packs[0] is packs[1] is packs[2]
    assert len(installation.opened) == 1
    assert loader.trace_for("cuda", 0) is loader.trace_for("cuda", 0)


def test_no_index_means_the_current_gpu_and_the_only_cpu(installation):
    installation.write("cpu", "cu13-sm80", "cu13-sm90")
    installation.gpus("8.0", "9.0")
    installation.facts.current = 1
    loader = installation.loader()
    assert loader.pack_for("cuda").name == "cu13-sm90"
    assert loader.pack_for("cpu") is loader.pack_for("cpu", 0)


def test_gpus_of_different_kinds(installation):
    installation.write("cpu", "cu12-sm80", "cu12-sm86", "cu12-sm90", "cu13-sm90")
    installation.gpus("9.0", "8.6", "8.9", "8.7", "7.5", "10.3")
    installation.environ["FLASH_DMATTN_UNTRIED"] = "1"
    installation.use_torch("13.0")
    loader = installation.loader()
    chosen = [loader.trace_for("cuda", index).chosen for index in range(6)]
    assert [c and c.name for c in chosen] == [
        "cu13-sm90",
        "cu12-sm86",
        "cu12-sm86",
        "cu12-sm80",
        None,
        None,
    ]


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        ("7.5", None),
        ("8.0", "cu13-sm80"),
        ("8.6", "cu13-sm86"),
        ("8.7", "cu13-sm80"),
        ("8.9", "cu13-sm89"),
        ("9.0", "cu13-sm90"),
        ("10.0", "cu13-sm100"),
        ("10.3", "cu13-sm100"),
        ("12.0", "cu13-sm120"),
        ("12.1", "cu13-sm120"),
    ],
)
def test_the_declared_table_serves_every_capability(installation, capability, name):
    installation.write(*(f"cu13-sm{arch}" for arch in (80, 86, 89, 90, 100, 120)))
    installation.gpus(capability)
    installation.environ["FLASH_DMATTN_UNTRIED"] = "1"
    chosen = installation.loader().trace_for("cuda", 0).chosen
    assert (chosen and chosen.name) == name


def test_a_missing_file_is_passed_over(installation):
    installation.set_up("cu12-sm90", "cu13-sm90", gpu="9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").unlink()
    loader = installation.loader()
    with pytest.warns(FallbackWarning, match="cu12-sm90 on cuda:0"):
        assert loader.pack_for("cuda", 0).name == "cu12-sm90"
    assert reason(loader.trace_for("cuda", 0), "cu13-sm90").startswith("the file is missing: ")


def test_a_corrupt_file_is_passed_over(installation):
    installation.set_up("cu12-sm90", "cu13-sm90", gpu="9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").write_text("\x7fELF garbage")
    loader = installation.loader()
    with pytest.warns(FallbackWarning, match="cu12-sm90 on cuda:0"):
        assert loader.pack_for("cuda", 0).name == "cu12-sm90"
    trace = loader.trace_for("cuda", 0)
    assert names(trace) == [("cu12-sm90", "accepted"), ("cu13-sm90", "refused")]
    assert reason(trace, "cu13-sm90").startswith("it cannot be opened: ")


def test_a_file_that_is_not_what_its_manifest_says_is_passed_over(installation):
    installation.set_up("cu12-sm90", "cu13-sm90", gpu="9.0")
    sm90, cu12 = (
        installation.packs / f"libflash_dmattn_{name}.so" for name in ("cu13_sm90", "cu12_sm90")
    )
    sm90.write_text(cu12.read_text().replace('"arch": 90', '"arch": 80'))
    loader = installation.loader()
    with pytest.warns(FallbackWarning, match="cu12-sm90 on cuda:0"):
        assert loader.pack_for("cuda", 0).name == "cu12-sm90"
    assert reason(loader.trace_for("cuda", 0), "cu13-sm90") == (
        "its manifest says CUDA 13.0, the file says 12.4; "
        "its manifest says arch sm90, the file says sm80"
    )


def test_the_warning_of_a_damaged_pack_comes_once_for_each_device(installation):
    installation.write("cu12-sm90", "cu13-sm90")
    installation.gpus("9.0", "9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").unlink()
    loader = installation.loader()
    for index in (0, 1):
        with pytest.warns(FallbackWarning, match=f"on cuda:{index} "):
            loader.pack_for("cuda", index)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.pack_for("cuda", 0)
        loader.trace_for("cuda", 1)


def test_a_warning_that_is_made_an_error_stays_one(installation):
    installation.set_up("cu12-sm90", "cu13-sm90", gpu="9.0")
    (installation.packs / "libflash_dmattn_cu13_sm90.so").unlink()
    loader = installation.loader()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with pytest.raises(FallbackWarning):
                loader.pack_for("cuda", 0)


@pytest.mark.parametrize("content", [None, "garbage"])
def test_damage_of_a_pack_that_would_not_be_taken_is_no_matter(installation, content):
    installation.set_up("cu12-sm90", "cu13-sm90", gpu="9.0")
    installation.environ["FLASH_DMATTN_FALLBACK"] = "error"
    path = installation.packs / "libflash_dmattn_cu12_sm90.so"
    path.unlink() if content is None else path.write_text(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = installation.loader()
        assert loader.pack_for("cuda", 0).name == "cu13-sm90"
    assert loader.trace_for("cuda", 0).passed_over == ()


@pytest.mark.parametrize("content", [None, "garbage"])
def test_nothing_replaces_a_damaged_pack_where_fallbacks_are_errors(installation, content):
    installation.set_up("cu12-sm90", "cu13-sm90", gpu="9.0")
    installation.environ["FLASH_DMATTN_FALLBACK"] = "error"
    path = installation.packs / "libflash_dmattn_cu13_sm90.so"
    path.unlink() if content is None else path.write_text(content)
    loader = installation.loader()
    with pytest.raises(NoPackError, match="FALLBACK=error lets nothing replace cu13-sm90"):
        loader.pack_for("cuda", 0)
    assert loader.trace_for("cuda", 0).pack is None


def test_two_distributions(installation):
    installation.write("cpu")
    installation.distribute("flash-dmattn-cu12", "cu12-sm90")
    installation.distribute("flash-dmattn-cu13", "cu13-sm90", version="1.9")
    installation.gpus("9.0")
    installation.use_torch("13.0")
    loader = installation.loader()
    assert loader.pack_for("cuda", 0).name == "cu12-sm90"
    trace = loader.trace_for("cuda", 0)
    assert "cu13-sm90 from flash-dmattn-cu13 1.9: refused: it is of version 1.9" in str(trace)
    assert "cu12-sm90 from flash-dmattn-cu12 2.0.0a1: accepted: built by CUDA 12" in str(trace)


def test_flash_dmattns_own_pack_goes_before_one_of_the_same_name(installation):
    installation.distribute("a-site", "cpu")
    installation.write("cpu")
    loader = installation.loader()
    loader.pack_for("cpu")
    assert installation.opened == [str(installation.packs / "libflash_dmattn_cpu.so")]
    assert "flash_dmattn has a pack of the same name, which goes first" in str(
        loader.trace_for("cpu")
    )


def test_a_distributions_pack_serves_where_the_own_one_is_damaged(installation):
    folder = installation.distribute("a-site", "cpu")
    installation.write("cpu")
    (installation.packs / "libflash_dmattn_cpu.so").write_text("garbage")
    loader = installation.loader()
    with pytest.warns(FallbackWarning):
        assert loader.pack_for("cpu").path == str(folder / "libflash_dmattn_cpu.so")


def test_distributions_with_equal_packs_are_in_order_of_their_names(installation):
    for name in ("site-b", "site-a"):
        installation.distribute(name, "cpu")
    entries = installation.loader().trace_for("cpu").entries
    assert [entry.candidate.distribution for entry in entries] == ["site-a", "site-b"]


def test_a_folder_that_is_found_twice_counts_once(installation):
    installation.write("cpu")
    installation.add_entry_point("again", lambda: installation.packs)
    (installation.root.parent / "link").symlink_to(installation.packs)
    installation.add_entry_point("linked", lambda: installation.root.parent / "link")
    (entry,) = installation.loader().trace_for("cpu").entries
    assert entry.candidate.source == "flash_dmattn"


def test_a_named_file_that_is_an_installed_one_is_listed_once(installation):
    installation.write("cpu")
    path = str(installation.packs / "libflash_dmattn_cpu.so")
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = path
    (entry,) = installation.loader().trace_for("cpu").entries
    assert entry.candidate.forced


def test_an_entry_point_may_be_a_module(installation, tmp_path):
    directory = installation.distribute("one", "cu13-sm90")
    package, module = ModuleType("package"), ModuleType("module")
    package.__path__ = [str(directory)]
    module.__file__ = str(directory / "__init__.py")
    installation.gpus("9.0")
    for target in (package, module, str(directory), directory / "manifest.json"):
        installation.entry_points.clear()
        installation.add_entry_point("one", lambda target=target: target)
        assert installation.loader().pack_for("cuda", 0).name == "cu13-sm90"


def test_entry_points_that_fail_do_not_take_the_others_down(installation):
    def broken():
        raise AttributeError("no such thing")

    installation.write("cpu")
    installation.add_entry_point("broken", broken)
    installation.add_entry_point("number", lambda: 3)
    loader = installation.loader()
    assert loader.pack_for("cpu").name == "cpu"
    found = str(loader.trace_for("cpu"))
    assert (
        "broken from broken 2.0.0a1: refused: its entry point cannot be loaded: "
        "AttributeError: no such thing" in found
    )
    assert "TypeError: it must give a module or a path, got int" in found


@pytest.mark.parametrize(
    ("content", "defect"),
    [
        ("{", "the manifest cannot be used: Expecting property name"),
        ('{"schema": 2}', "the manifest cannot be used: schema 2, but this flash_dmattn reads 1"),
        ('{"schema": 1}', "the manifest cannot be used: it lacks 'packs'"),
        ("[]", "the manifest cannot be used: list indices must be integers"),
    ],
)
def test_an_unusable_manifest_is_a_reason(installation, content, defect):
    installation.write("cpu")
    (installation.packs / "manifest.json").write_text(content)
    with pytest.raises(NoPackError) as caught:
        installation.loader().pack_for("cpu")
    assert defect in str(caught.value)
    assert str(caught.value).endswith("fix: " + remedies.reinstall("2.0.0a1"))


def test_a_named_file_serves_its_kind_of_device(installation, tmp_path):
    installation.write("cpu", "cu13-sm90")
    other = installation.distribute("dev", "cu12-sm90", version="1.0")
    installation.entry_points.clear()
    path = other / "libflash_dmattn_cu12_sm90.so"
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = str(path)
    installation.gpus("9.0")
    loader = installation.loader()
    assert loader.pack_for("cuda", 0).path == str(path)
    assert loader.pack_for("cpu").name == "cpu"


@pytest.mark.parametrize("content", [None, "garbage"])
def test_nothing_replaces_a_named_file_that_is_unusable(installation, tmp_path, content):
    installation.write("cpu")
    path = tmp_path / "dev.so"
    if content is not None:
        path.write_text(content)
    installation.environ["FLASH_DMATTN_LIBRARY_PATH"] = str(path)
    with pytest.raises(NoPackError) as caught:
        installation.loader().pack_for("cpu")
    assert str(caught.value).endswith("fix: unset FLASH_DMATTN_LIBRARY_PATH")


def test_without_a_core_a_named_file_is_listed_with_the_reason(installation):
    def opening(path):
        raise ImportError("no core")

    path = installation.root / "dev.so"
    path.touch()
    environ = {"FLASH_DMATTN_LIBRARY_PATH": str(path)}
    directories = [installation.root]
    loader = Loader(installation.facts, opening, lambda: 1, lambda: directories, list, environ)
    (candidate,) = loader.candidates()
    assert candidate.defect == "it cannot be opened: no core"


def test_a_bad_value_raises_but_not_in_a_trace(installation):
    installation.write("cpu")
    installation.environ["FLASH_DMATTN_ARCH"] = "sm90"
    loader = installation.loader()
    with pytest.raises(InvalidVariableError, match="FLASH_DMATTN_ARCH must be one of"):
        loader.pack_for("cpu")
    trace = loader.trace_for("cpu")
    assert trace.problem is not None
    assert trace.remedy == "unset FLASH_DMATTN_ARCH"


def test_unknown_variables_warn_once(installation):
    installation.write("cpu")
    installation.environ["FLASH_DMATTN_LOGS"] = "info"
    loader = installation.loader()
    with pytest.warns(UnknownVariableWarning, match="Did you mean 'FLASH_DMATTN_LOG'"):
        loader.pack_for("cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.pack_for("cpu")


def test_failures_are_remembered_too(installation):
    loader = installation.loader()
    traces = set()
    for _ in range(2):
        with pytest.raises(NoPackError) as caught:
            loader.pack_for("cpu")
        traces.add(id(caught.value.trace))
    assert len(traces) == 1


def test_many_threads_open_once(installation):
    installation.write("cpu")
    loader = installation.loader()
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(loader.pack_for("cpu"))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(pack) for pack in found}) == 1
    assert len(installation.opened) == 1


def test_another_machine(installation):
    installation.write("cpu")
    installation.facts.host_ = Host("aarch64", "glibc 2.35")
    assert (
        reason(installation.loader().trace_for("cpu"), "cpu")
        == "it was built for x86_64, this machine is aarch64"
    )


@pytest.fixture
def quiet_logger():
    logger = logging.getLogger("flash_dmattn.loader")
    before = logger.level, list(logger.handlers)
    logger.handlers.clear()
    yield logger
    logger.handlers[:] = before[1]
    logger.setLevel(before[0])


@pytest.mark.parametrize(
    ("level", "trace", "facts"), [("off", 0, 0), ("info", 1, 0), ("debug", 1, 1)]
)
def test_log_prints_to_stderr(installation, quiet_logger, capsys, level, trace, facts):
    installation.write("cpu")
    installation.environ["FLASH_DMATTN_LOG"] = level
    installation.loader().pack_for("cpu")
    printed = capsys.readouterr().err
    assert printed.count("cpu from flash_dmattn: accepted") == trace
    assert printed.count("facts: Situation(") == facts
