# SPDX-License-Identifier: BSD-3-Clause
"""The workflows themselves, run on one machine: ``scripts/rehearse_workflows``.

act runs the jobs of .github/workflows on this machine. What they need of GitHub and of its runners
is replaced, each by what this package has of the same name: the actions (``actions/``), the
container engine and its registry (``docker.py``), the interface (``gh.py``), the compiler of CUDA
packs (``cmake.py``), and a GPU (``site/``).
"""
