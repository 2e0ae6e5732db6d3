# SPDX-License-Identifier: BSD-3-Clause
"""Finds left operands of wgmma that the compiler overwrote although a later product reads them.

ptxas 13.0 did so in a kernel whose loop reads operands that ldmatrix had loaded before the loop.
The check follows the registers of the disassembled kernel: if a product's left operand may come
from ldmatrix (LDSM) on one path and from arithmetic on another, it is lost. Kernels load such an
operand or compute it, and never do either as the path decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+([^;]+);")
_WRITE = re.compile(r"(@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(?:!?U?P\w+,\s*)*R(\d+)\b")
_LEFT_OPERAND = re.compile(r"HGMMA\S*\s+R\d+, R(\d+), g")
_BRANCH = re.compile(r"(@!?U?P\w+\s+)?BRA\S*\s.*?0x([0-9a-f]+)")
# Instructions whose first register is read.
_READERS = ("ST", "RED", "SYNCS", "R2UR", "LDGSTS", "ATOMS", "BAR", "UTMA", "CCTL", "BRX")
_COPIES = ("MOV", "IMAD.MOV", "LDL")  # a spilled or moved operand keeps its source
_LOADED, _COMPUTED = 1, 2


@dataclass
class _Block:
    """Instructions without a branch but the last, and the sources of registers at its start."""

    first: int
    past: int
    next: list[int] = field(default_factory=list)
    sources: dict[int, int] = field(default_factory=dict)


def _written(text: str) -> tuple[range, int, bool] | None:
    """Return the registers that an instruction writes, their source, and whether it always does."""
    found = _WRITE.match(text)
    if not found or found[2].startswith(_READERS) or found[2].startswith("HGMMA"):
        return None
    opcode = found[2]
    wide = opcode.startswith(("LD", "IMAD.WIDE", "CS2R", "DADD", "DFMA", "DMUL"))
    size = 4 if ".128" in opcode or ".M88.4" in opcode else 2 if wide and ".64" in opcode else 1
    if opcode.startswith(("IMAD.WIDE", "CS2R")) and ".32" not in opcode:
        size = 2
    source = _LOADED if opcode.startswith("LDSM") else _COMPUTED
    if opcode.startswith(_COPIES):
        source = 0
    return range(int(found[3]), int(found[3]) + size), source, found[1] is None


def lost_operands(sass: str) -> list[str]:
    """Return the addresses of the products of one function whose left operand is lost."""
    instructions = [(int(a, 16), text.strip()) for a, text in _INSTRUCTION.findall(sass)]
    products = {
        n: int(found[1])
        for n, (_, text) in enumerate(instructions)
        if (found := _LEFT_OPERAND.search(text))
    }
    watched = {r for first in products.values() for r in range(first, first + 4)}
    if not any("LDSM" in text for _, text in instructions) or not watched:
        return []
    blocks = _blocks(instructions)
    _follow(instructions, blocks, watched)
    lost = []
    for block in blocks.values():
        sources = dict(block.sources)
        for n in range(block.first, block.past):
            if n in products:
                operand = range(products[n], products[n] + 4)
                if any(sources.get(r, 0) == _LOADED | _COMPUTED for r in operand):
                    lost.append(f"0x{instructions[n][0]:x}")
            _apply(instructions[n][1], sources, watched)
    return lost


def _blocks(instructions: Sequence[tuple[int, str]]) -> dict[int, _Block]:
    index = {address: n for n, (address, _) in enumerate(instructions)}
    starts, branches = {0}, {}
    for n, (_, text) in enumerate(instructions):
        found = _BRANCH.match(text)
        if found and int(found[2], 16) in index:
            branches[n] = (index[int(found[2], 16)], found[1] is None)
            starts |= {index[int(found[2], 16)], n + 1}
        elif text.startswith(("EXIT", "RET")):
            starts.add(n + 1)
    order = sorted(start for start in starts if start < len(instructions))
    blocks = {}
    for first, past in zip(order, [*order[1:], len(instructions)], strict=True):
        block = _Block(first, past)
        target, always = branches.get(past - 1, (None, False))
        if target is not None:
            block.next.append(target)
        ends = instructions[past - 1][1].startswith(("EXIT", "RET"))
        if not always and not ends and past < len(instructions):
            block.next.append(past)
        blocks[first] = block
    return blocks


def _apply(text: str, sources: dict[int, int], watched: set[int]) -> None:
    written = _written(text)
    if written is None:
        return
    registers, source, always = written
    for register in registers:
        if register in watched:
            sources[register] = source if always else sources.get(register, 0) | source


def _follow(
    instructions: Sequence[tuple[int, str]], blocks: dict[int, _Block], watched: set[int]
) -> None:
    """Set the sources at the start of all blocks: the union over their predecessors."""
    waiting = list(blocks)
    while waiting:
        block = blocks[waiting.pop()]
        sources = dict(block.sources)
        for n in range(block.first, block.past):
            _apply(instructions[n][1], sources, watched)
        for start in block.next:
            known = blocks[start].sources
            if any(known.get(r, 0) | s != known.get(r, 0) for r, s in sources.items()):
                for register, source in sources.items():
                    known[register] = known.get(register, 0) | source
                waiting.append(start)
