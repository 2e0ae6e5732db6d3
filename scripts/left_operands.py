# SPDX-License-Identifier: BSD-3-Clause
"""Finds left operands of wgmma that the compiler overwrote although a later product reads them.

ptxas 13.0 did so in a kernel whose loop reads operands that ldmatrix had loaded before the loop.
The check follows the registers and the spills of a disassembled kernel. An operand is lost if it
comes from ldmatrix (LDSM) on one path and from arithmetic on another path: a kernel loads an
operand, or computes it.
"""

from __future__ import annotations

import collections
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(@!?U?P\w+\s+)?([A-Z][^;]*?)\s*;")
_DESTINATION = re.compile(r"[\w.]+\s+(?:!?U?P\w+,\s*)*R(\d+)\b")
_LEFT_OPERAND = re.compile(r"HGMMA\S*\s+R\d+, R(\d+), g")
_MOVE = re.compile(r"(?:MOV|IMAD\.MOV)\S*\s+R\d+, (?:RZ, RZ, )?R(\d+)")
_SPILL = re.compile(r"(STL|LDL)\S*\s+(?:R(\d+), )?\[R1(?:\+0x([0-9a-f]+))?\](?:, R(\d+))?$")
_BRANCH = re.compile(r"BRA\b.*?0x([0-9a-f]+)")
_JUMP = re.compile(r"BRA\s+0x")  # always taken if it has no guard
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x")
# Instructions that read their first register.
_READERS = ("ISETP", "FSETP", "DSETP", "HSETP2", "R2P", "WARPSYNC", "BAR", "BRX", "STL")
_WIDE = ("IMAD.WIDE", "DADD", "DFMA", "DMUL")
_LOADED, _COMPUTED = 1, 2


@dataclass(frozen=True)
class _Effect:
    """The registers and spilled words that an instruction writes, and where these come from."""

    written: list[int]
    copied: list[int] | None  # from these; otherwise all have `source`
    source: int


@dataclass(frozen=True)
class _Instruction:
    address: int
    text: str
    guarded: bool
    operand: range  # the registers of the left operand of a product
    effect: _Effect | None


@dataclass
class _Block:
    """Instructions without a branch but the last.

    `sources` has bits for the start of the block: by register, and by -1 - offset of spilled words.
    """

    first: int
    past: int
    next: list[int] = field(default_factory=list)
    sources: dict[int, int] = field(default_factory=dict)


def lost_operands(lines: Iterable[str]) -> list[str]:
    """Return the addresses of the products of one disassembled function that lost an operand."""
    lines = list(lines)
    if not all(any(opcode in line for line in lines) for opcode in ("LDSM", "HGMMA")):
        return []  # soon, since most kernels have no such operand
    instructions = [
        _instruction(int(found[1], 16), found[3], guarded=found[2] is not None)
        for line in lines
        if (found := _INSTRUCTION.search(line))
    ]
    blocks = _blocks(instructions)
    _follow(instructions, blocks)
    lost = []
    for block in blocks.values():
        sources = dict(block.sources)
        for instruction in instructions[block.first : block.past]:
            if any(sources.get(r, 0) == _LOADED | _COMPUTED for r in instruction.operand):
                lost.append(f"0x{instruction.address:x}")
            _apply(instruction, sources)
    return lost


def _instruction(address: int, text: str, *, guarded: bool) -> _Instruction:
    found = _LEFT_OPERAND.match(text)
    operand = range(int(found[1]), int(found[1]) + 4) if found else range(0)
    return _Instruction(address, text, guarded, operand, _effect(text))


def _size(text: str) -> int:
    """Return the number of 32-bit registers that an instruction writes."""
    if found := _PRODUCT.match(text):
        return int(found[1]) // 2
    opcode = text.split(maxsplit=1)[0]
    if opcode.startswith(("HMMA", "IMMA")) or re.search(r"\.(128|M88\.4|MT88\.4)\b", opcode):
        return 4
    if opcode.startswith("CS2R"):
        return 1 if ".32" in opcode else 2
    return 2 if ".64" in opcode or opcode.startswith(_WIDE) else 1


def _effect(text: str) -> _Effect | None:
    size = _size(text)
    source = _LOADED if text.startswith("LDSM") else _COMPUTED
    if found := _SPILL.match(text):
        words = [-1 - int(found[3] or "0", 16) - 4 * n for n in range(size)]
        first = int(found[2] or found[4] or 0)
        registers = [first + n for n in range(size)]
        is_store = found[1] == "STL"
        return _Effect(words, registers, 0) if is_store else _Effect(registers, words, 0)
    found = _DESTINATION.match(text)
    if text.startswith(_READERS) or found is None:
        return None
    moved = _MOVE.match(text)
    written = [int(found[1]) + n for n in range(size)]
    return _Effect(written, [int(moved[1])] if moved else None, source)


def _apply(instruction: _Instruction, sources: dict[int, int]) -> None:
    """Update the sources by what an instruction writes."""
    if (effect := instruction.effect) is None:
        return
    for n, register in enumerate(effect.written):
        source = effect.source if effect.copied is None else sources.get(effect.copied[n], 0)
        sources[register] = source | (sources.get(register, 0) if instruction.guarded else 0)


def _blocks(instructions: Sequence[_Instruction]) -> dict[int, _Block]:
    """Return the blocks by the index of their first instruction, with their successors."""
    index = {instruction.address: n for n, instruction in enumerate(instructions)}
    targets: dict[int, int] = {}
    ends = set()
    for n, instruction in enumerate(instructions):
        found = _BRANCH.match(instruction.text)
        if found and int(found[1], 16) in index:
            targets[n] = index[int(found[1], 16)]
        is_end = instruction.text.startswith(("EXIT", "RET")) or _JUMP.match(instruction.text)
        if is_end and not instruction.guarded:
            ends.add(n)
    starts = {0, *targets.values(), *(n + 1 for n in (*targets, *ends))}
    order = sorted(start for start in starts if start < len(instructions))
    blocks = {}
    for first, past in zip(order, [*order[1:], len(instructions)], strict=True):
        block = _Block(first, past)
        if past - 1 in targets:
            block.next.append(targets[past - 1])
        if past - 1 not in ends and past < len(instructions):
            block.next.append(past)
        blocks[first] = block
    return blocks


def _follow(instructions: Sequence[_Instruction], blocks: dict[int, _Block]) -> None:
    """Set the sources at the start of all blocks: the union over their predecessors."""
    waiting = collections.deque(blocks)
    while waiting:
        block = blocks[waiting.popleft()]
        sources = dict(block.sources)
        for instruction in instructions[block.first : block.past]:
            _apply(instruction, sources)
        for start in block.next:
            known = blocks[start].sources
            changed = {r: s | known.get(r, 0) for r, s in sources.items()}
            if any(known.get(register) != source for register, source in changed.items()):
                known.update(changed)
                if start not in waiting:
                    waiting.append(start)
