# SPDX-License-Identifier: BSD-3-Clause
"""How packs, wheels and releases are built and checked: ``python -m release VERB``.

Each verb is the module of its name. Only ``gates`` (the extra ``[gates]``) and ``conda``
(py-rattler-build) need more than the standard library.
"""
