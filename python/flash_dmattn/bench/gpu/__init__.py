# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark on a GPU: ``python -m flash_dmattn.bench gpu``.

Every number is one :class:`~.records.Record`, of a case, a contestant and a quantity. A contestant
that fails is a record with the reason, and the run goes on.
"""
