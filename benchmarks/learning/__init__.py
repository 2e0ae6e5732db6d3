# SPDX-License-Identifier: BSD-3-Clause
"""A study of learning: the same small language model of bytes with different attention.

A run is a variant (:mod:`variants`), a text (:mod:`corpora`), a seed and a budget of seconds or of
steps. :mod:`runs` trains and can resume, :mod:`probes` tests recall, and :mod:`report` makes tables
and a figure from the files of several runs.
"""
