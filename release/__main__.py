# SPDX-License-Identifier: BSD-3-Clause
"""The command line of the release tool, run from the root of the source tree."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from release.project import ReleaseError

# Each verb is a module with `add_arguments` and `run`. Failures raise ReleaseError.
VERBS = {
    "matrix": "print what CI builds and tests, in the form of a workflow's outputs",
    "packs": "build the kernel packs of one CUDA major for this machine's platform into a folder",
    "wheel": "build the core and the cpu pack, and assemble a wheel with packs built before",
    "variants": "make a base wheel and a wheel of packs for each CUDA major",
    "hub": "make a repository of Hugging Face's kernels hub from wheels",
    "gates": "check wheels: their libraries, content, packs and metadata",
    "tables": "check that what is derived from cmake/targets.json and the build's options agrees",
    "tag": "check that a tag is the version of the tree and that the changelog tells of it",
    "digests": "print the hashes of what was built, or compare files with them",
    "assets": "complete a folder of wheels and an sdist into what a release holds",
    "draft": "make the draft of a release from a tag, with every file of a folder",
    "pin": "open a pull request that commits the digests of a run's images",
    "reproduce": "build the packs of a release again, and compare them with its build record",
    "records": "write down on which GPU, with which pack, the installed wheel passes its self-test",
    "index": "make the package index of all releases as static files",
    "conda": "check or build conda/recipe.yaml",
    "rehearse": "run a whole release on this machine, and install from it",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(prog="python -m release", description=__doc__)
    subparsers = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    plain = argparse.RawDescriptionHelpFormatter
    verbs = {
        verb: subparsers.add_parser(verb, help=text, formatter_class=plain)
        for verb, text in VERBS.items()
    }
    # Imports only the requested verb: other verbs may need packages that are not installed.
    module = import_module(f"release.{words[0]}") if words and words[0] in VERBS else None
    if module is not None:
        verbs[words[0]].description = module.__doc__
        module.add_arguments(verbs[words[0]])
    options = parser.parse_args(words)
    assert module is not None, "the parser accepts nothing but verbs"
    try:
        module.run(options)
    except ReleaseError as error:
        print(f"release {options.verb}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
