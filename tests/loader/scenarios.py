# SPDX-License-Identifier: BSD-3-Clause
"""Shared code of the scenario modules, which map an installation to a text for users."""

import pytest

from flash_dmattn import _core
from flash_dmattn.loader import Loader, NoPackError, errors, open_pack


class Scenarios(dict):
    """Functions from an installation to a text, by name."""

    def add(self, function):
        """Register a function."""
        self[function.__name__] = function
        return function


def error_of(loader, *device):
    with pytest.raises(NoPackError) as caught:
        loader.pack_for(*device)
    return str(caught.value)


def warning_of(loader, *device):
    with pytest.warns(errors.FallbackWarning) as caught:
        loader.pack_for(*device)
    (warning,) = caught
    assert warning.filename == __file__  # the warning points at the caller, not into the package
    return str(warning.message)


def real_loader(installation, open_file=open_pack, entry_points=()):
    """Return a loader that opens files as the package does."""
    return Loader(
        installation.facts,
        open_file,
        lambda: _core.PACK_ABI_VERSION,
        lambda: [installation.root],
        lambda: list(entry_points),
        installation.environ,
    )
