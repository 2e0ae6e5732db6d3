# SPDX-License-Identifier: BSD-3-Clause
"""Entry points that ask the loader, threads that race, and forks at the worst moment.

Code that may hang runs in a thread or a child with a time limit of seconds.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from flash_dmattn import backends, loader
from flash_dmattn.loader import FallbackWarning, NoPackError, nvidia
from flash_dmattn.loader.facts import Device, Machine, Torch
from pack_files import real_pack

PATIENCE = 20  # seconds
forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")


def in_time(function):
    """Return a function's result, or fail if it hangs."""
    found = []

    def run():
        try:
            found.append((True, function()))
        except BaseException as error:
            found.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert found, "it hangs"
    done, result = found[0]
    if not done:
        raise result
    return result


def in_a_child(function):
    """Run a function in a forked process; return its exit code, 0 if it returns true."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE)  # ends a hanging child
        code = 1
        try:
            code = 0 if function() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- entry points that ask


@pytest.mark.parametrize("ask", ["pack_for", "trace_for", "candidates"])
def test_an_entry_point_may_ask_the_loader(installation, ask):
    installation.write("cpu")
    directory = installation.distribute("foreign", "cpu")
    installation.entry_points.clear()
    answers = []

    def load():
        arguments = () if ask == "candidates" else ("cpu",)
        answers.append(getattr(loader, ask)(*arguments))
        return directory

    installation.add_entry_point("foreign", load)
    loader = installation.loader()
    pack = in_time(lambda: loader.pack_for("cpu"))
    assert pack.name == "cpu"
    assert len(answers) == 1
    if ask == "pack_for":
        assert answers == [pack]
    # The entry point's packs are found all the same, and no decision is made without it.
    assert "cpu from foreign" in str(loader.trace_for("cpu"))


def test_what_an_entry_point_asks_is_not_remembered(installation):
    """An entry point's packs are unknown while it loads, and serve afterwards."""
    directory = installation.distribute("foreign", "cu13-sm90")
    installation.entry_points.clear()
    installation.gpus("9.0")
    refusals = []

    def load():
        with pytest.raises(NoPackError) as caught:
            loader.pack_for("cuda", 0)
        refusals.append(str(caught.value))
        return directory

    installation.add_entry_point("foreign", load)
    loader = installation.loader()
    assert in_time(lambda: loader.pack_for("cuda", 0)).name == "cu13-sm90"
    assert "found:\n  nothing" in refusals[0]
    assert loader.pack_for("cuda", 0).name == "cu13-sm90"


def test_an_entry_point_that_fails_after_asking_leaves_no_trace_of_it(installation):
    installation.write("cpu")

    def load():
        loader.pack_for("cpu")
        raise AttributeError("no such thing")

    installation.add_entry_point("foreign", load)
    loader = installation.loader()
    in_time(lambda: loader.pack_for("cpu"))
    assert "AttributeError: no such thing" in str(loader.trace_for("cpu"))


def test_a_module_that_computes_while_it_is_imported(tmp_path):
    """A real distribution, whose module calls the real loader."""
    (tmp_path / "foreign_packs.py").write_text(
        "from flash_dmattn import loader\nPACK = loader.pack_for('cpu')\n"
    )
    info = tmp_path / "foreign_packs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: foreign-packs\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[flash_dmattn.packs]\nforeign = foreign_packs\n")
    code = (
        "from flash_dmattn import loader\n"
        "pack = loader.pack_for('cpu')\n"
        "import foreign_packs\n"
        "print(foreign_packs.PACK is pack, 'foreign-packs 1' in str(loader.trace_for('cpu')))"
    )
    for first in ("", "import foreign_packs\n"):
        done = subprocess.run(
            [sys.executable, "-c", first + code],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        assert done.stdout == "True True\n", done.stderr


def test_a_log_handler_may_ask_the_loader(installation):
    installation.write("cpu")
    loader, answers = installation.loader(), []

    class Asking(logging.Handler):
        def emit(self, record):
            answers.append(loader.pack_for("cpu"))

    logger, handler = logging.getLogger("flash_dmattn.loader"), Asking()
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel("DEBUG")
    try:
        pack = in_time(lambda: loader.pack_for("cpu"))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
    assert answers
    assert all(answer is pack for answer in answers)


@pytest.mark.usefixtures("with_fallbacks")
def test_what_computes_while_an_entry_point_is_loaded_is_not_remembered(make_loader, installation):
    """The entry point calls flash_dmattn and provides the only pack for the device."""
    import torch

    folder, early = real_pack().parent, []

    def choose():
        return backends.select_backend(torch.device("cpu"), "auto").name

    def load():
        with pytest.warns(FallbackWarning, match="in plain PyTorch"):
            early.append(choose())
        return folder

    installation.add_entry_point("foreign", load)
    make_loader(directories=list, entry_points=lambda: installation.entry_points)
    assert in_time(lambda: loader.pack_for("cpu")).name == "cpu"
    assert early == ["reference"]
    assert choose() == "cpu"


# --- threads


def test_an_entry_point_that_waits_for_another_thread_which_asks(installation):
    """Like an import that waits for the module's lock, which the other thread holds."""
    installation.write("cpu")
    other_asks, other_done, found = threading.Event(), threading.Event(), []

    def other():
        other_asks.wait(PATIENCE)
        found.append(loader.pack_for("cpu"))
        other_done.set()

    def load():
        if threading.current_thread() is not thread:
            other_asks.set()
            assert other_done.wait(PATIENCE), "the other thread hangs"
        return installation.packs

    installation.add_entry_point("foreign", load)
    loader, thread = installation.loader(), threading.Thread(target=other, daemon=True)
    thread.start()
    begin = time.monotonic()
    assert in_time(lambda: loader.pack_for("cpu")) is found[0]
    assert time.monotonic() - begin < PATIENCE / 2


def test_threads_that_race_get_one_result(installation):
    installation.write("cpu")
    barrier = threading.Barrier(8)
    directories = [installation.distribute(f"foreign-{i}", "cu13-sm90") for i in range(8)]
    installation.entry_points.clear()
    installation.gpus("9.0")

    def load():
        """Return another folder to each thread."""
        directory = directories.pop()
        time.sleep(0.01)
        return directory

    installation.add_entry_point("foreign", load)
    loader, found = installation.loader(), []

    def ask():
        barrier.wait()
        found.append((loader.pack_for("cuda", 0), loader.trace_for("cuda", 0)))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert len(found) == 8
    assert len({(id(pack), id(trace)) for pack, trace in found}) == 1
    assert found[0][0] is loader.pack_for("cuda", 0)
    assert len(installation.opened) == 1


# --- forks


def forked_while(held_in, asking, loader):
    """Fork while a thread is held inside of the loader, and ask in the child."""
    held, go_on = held_in
    thread = threading.Thread(target=asking, daemon=True)
    thread.start()
    assert held.wait(PATIENCE)
    try:
        return in_a_child(lambda: (loader.after_fork(), loader.pack_for("cpu").name)[1] == "cpu")
    finally:
        go_on.set()
        thread.join(PATIENCE)


@forks
@pytest.mark.parametrize("place", ["open_pack", "entry_point"])
def test_a_fork_while_another_thread_is_in_the_loader(installation, place):
    installation.write("cpu")
    held, go_on = threading.Event(), threading.Event()

    def hold():
        if threading.current_thread() is not threading.main_thread():
            held.set()
            go_on.wait(PATIENCE)

    if place == "entry_point":
        installation.add_entry_point("foreign", lambda: (hold(), installation.packs)[1])
    loader = installation.loader()
    if place == "open_pack":
        really_open = loader._open_pack
        loader._open_pack = lambda path: (hold(), really_open(path))[1]
    asking = lambda: loader.pack_for("cpu")  # noqa: E731
    assert forked_while((held, go_on), asking, loader) == 0
    assert in_time(asking).name == "cpu"


@forks
def test_the_loader_of_the_process_is_reset_in_a_child():
    """Also without a call of after_fork: a thread that the child lacks holds the lock."""
    held, go_on = threading.Event(), threading.Event()

    def hold():
        with loader.default_loader._lock:
            held.set()
            go_on.wait(PATIENCE)

    thread = threading.Thread(target=hold, daemon=True)
    thread.start()
    assert held.wait(PATIENCE)
    try:
        assert in_a_child(lambda: loader.trace_for("no such device").chosen is None) == 0
    finally:
        go_on.set()
        thread.join(PATIENCE)


@forks
def test_a_child_forgets_the_gpus_and_keeps_the_cpu(installation):
    installation.set_up("cpu", "cu13-sm90", gpu="9.0")
    loader = installation.loader()
    cpu, gpu = loader.pack_for("cpu"), loader.pack_for("cuda", 0)

    def child():
        installation.facts.devices = ()  # as if the parent had used CUDA
        loader.after_fork()
        with pytest.raises(NoPackError, match="shows no device cuda:0"):
            loader.pack_for("cuda", 0)
        return loader.pack_for("cpu") is cpu

    assert in_a_child(child) == 0
    assert loader.pack_for("cuda", 0) is gpu


@forks
def test_a_child_asks_the_driver_anew(monkeypatch):
    monkeypatch.setattr(nvidia, "visible_devices", lambda: [("GPU", (9, 0))])
    machine = loader.default_loader.facts
    monkeypatch.setattr(Machine, "torch", lambda self: Torch("2.11.0", "13.0"))
    Machine.gpus.cache_clear()
    try:
        assert machine.gpus() == (Device("cuda", 0, "GPU", "9.0"),)

        def child():
            nvidia.visible_devices = list
            return machine.gpus() == ()

        assert in_a_child(child) == 0
        assert len(machine.gpus()) == 1
    finally:
        Machine.gpus.cache_clear()


@forks
def test_a_child_chooses_its_backends_anew():
    import torch

    chosen = backends.select_backend(torch.device("cpu"), "auto")
    assert backends.select_backend(torch.device("cpu"), "auto") is chosen
    again = lambda: backends.select_backend(torch.device("cpu"), "auto") is not chosen  # noqa: E731
    assert in_a_child(again) == 0
    assert backends.select_backend(torch.device("cpu"), "auto") is chosen
