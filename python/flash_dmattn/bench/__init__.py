# SPDX-License-Identifier: BSD-3-Clause
"""Benchmarks of dynamic mask attention beside PyTorch's own attention.

``python -m flash_dmattn.bench`` runs them, on a GPU and on a CPU alike. Every number is one
:class:`~.records.Record`, of a case, a contestant and a quantity; a contestant that fails is a
record with the reason, and the run goes on. The modules hold one concern each: what is measured
(:mod:`cases`, :mod:`workloads`, :mod:`sets`), who competes (:mod:`contestants`), how time and
memory are taken (:mod:`timing`, :mod:`memory`), the measuring itself (:mod:`engine`,
:mod:`decode`), and what is shown of the results (:mod:`results`, :mod:`bars`, :mod:`plot`).
"""
