# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks of dynamic mask attention beside PyTorch's own attention, run from a checkout.

``python -m benchmarks --help`` shows what there is. Every number is one
:class:`~.results.Record` of a case, a contestant and a quantity; a contestant that fails is a
record with the reason, and the run goes on. Cases (:mod:`sets`), contestants (:mod:`entrants`),
quantities (:mod:`tables`), bars (:mod:`bars`) and what pages show (:mod:`pages`) are tables of
data; :mod:`engine` measures.
"""
