# SPDX-License-Identifier: BSD-3-Clause
"""Builds and checks packs, wheels and releases: ``python -m release VERB``.

Each verb is a module of the same name. Only ``gates`` (the extra ``[gates]``) and ``conda``
(py-rattler-build) need more than the standard library.
"""
