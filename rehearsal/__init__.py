# SPDX-License-Identifier: BSD-3-Clause
"""Runs the workflows on one machine: ``scripts/rehearse_workflows``.

act runs the jobs of .github/workflows on this machine. Stand-ins replace parts of GitHub and of its
runners: the actions (``actions/``), the container engine and its registry (``docker.py``), GitHub's
program (``gh.py``), the build of CUDA packs (``cmake.py``), and a GPU (``site/``).
"""
