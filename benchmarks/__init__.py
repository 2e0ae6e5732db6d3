# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks of dynamic mask attention compared with PyTorch's own attention, run from a checkout.

``python -m benchmarks --help`` lists the commands. Every number is one :class:`~.results.Record` of
a case, a contestant and a quantity. A contestant that fails gives a record with the reason, and the
run continues. Cases (:mod:`sets`), contestants (:mod:`entrants`), quantities (:mod:`tables`), bars
(:mod:`bars`) and contents of pages (:mod:`pages`) are tables of data; :mod:`engine` measures.
"""
