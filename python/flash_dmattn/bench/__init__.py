# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks of dynamic mask attention beside PyTorch's own attention.

``python -m flash_dmattn.bench`` runs them, with ``cpu`` or ``gpu`` for one of both. The modules
hold one concern each: what is measured (:mod:`cases`), who competes (:mod:`contestants`), how time
and memory are taken (:mod:`timing`, :mod:`memory`), how results are put together (:mod:`runner`)
and shown (:mod:`report`); :mod:`gpu` has what is said of GPUs, in the same parts.
"""
