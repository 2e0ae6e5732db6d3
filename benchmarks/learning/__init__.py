# SPDX-License-Identifier: BSD-3-Clause
"""Which attention learns: the same small language model of bytes with one or another.

A run is a variant (:mod:`variants`), a text (:mod:`corpora`), a seed and a budget of seconds or of
steps. :mod:`runs` trains and can go on where it stopped, :mod:`probes` asks what was learned, and
:mod:`report` makes tables and a figure of the files of several runs.
"""
