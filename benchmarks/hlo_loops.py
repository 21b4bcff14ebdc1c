"""The cost of a TPU program with its loops: how often each body runs.

A scan's condition compares a counter with a constant, and its body counts so often.
Other loops of the serving step ask something of the data (is a request due? how many
lanes have work?): how often they turn is the caller's to say.
"""

import re
from typing import NamedTuple

import hlo

_LOOP = re.compile(r"condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_COUNTS_TO = re.compile(
    r"ROOT %?[\w.\-]+ = pred\[\]\S* compare\(%?[\w.\-]+, %?([\w.\-]+)\), direction=LT"
)
_CONSTANT = re.compile(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")

_MOVES_ROWS = re.compile(r'op_name="[^"]*jit\((?:track_scatter|copy_slots)\)/while"')


class LoopCost(NamedTuple):
    """Sums over what runs, a loop's body as often as it turns."""

    cycles: int
    """Of the kernels that have a finite estimate: a lower bound."""
    kernels: int
    without_estimate: int
    """Kernels without a figure, or with none that is finite."""


def cost(text: str, *, turns: int = 1, rows: int = 0, only: str = "") -> LoopCost:
    """Add up a compiled module.

    Args:
      text: of the compiled module.
      turns: of each loop that asks something of the data.
      rows: turns of the loops that move rows one by one.
      only: count kernels whose `op_name` holds this.
    """
    computations, entry = hlo._computations(text)

    def add(name: str) -> LoopCost:
        total = [0, 0, 0]
        for line in computations.get(name, ()):
            opcode = hlo._opcode(line)
            times, called = 1, []
            if opcode == "while":
                match = _LOOP.search(line)
                assert match, line
                counted = _trips(computations[match[1]])
                times = counted if counted is not None else turns
                if counted is None and _MOVES_ROWS.search(line):
                    times = rows
                called = [match[2]]
            elif opcode not in hlo._CLOSED:
                for single, several in hlo._CALLED.findall(line):
                    called += (single or several).replace("%", "").split(",")
            inner = [add(each.strip()) for each in called if each.strip()]
            for parts in [*inner, _own(line, opcode, only)]:
                total = [a + times * b for a, b in zip(total, parts, strict=True)]
        return LoopCost(*total)

    return add(entry)


def _own(line: str, opcode: str, only: str) -> LoopCost:
    """One instruction alone."""
    transfer = opcode.endswith(hlo._TRANSFER)
    if opcode in hlo._FREE or opcode == "while" or transfer or only not in line:
        return LoopCost(0, 0, 0)
    estimate = hlo._CYCLES.search(line)
    if estimate and int(estimate[1]) != hlo._UNBOUNDED:
        return LoopCost(int(estimate[1]), 1, 0)
    is_marker = any(marker in line for marker in hlo._MARKERS)
    if estimate or (opcode in hlo._KERNEL_OPCODES and not is_marker):
        return LoopCost(0, 1, 1)
    return LoopCost(0, 0, 0)


def _trips(condition: list[str]) -> int | None:
    """How far a condition counts; `None` where it asks something else."""
    constants = {m[1]: int(m[2]) for line in condition if (m := _CONSTANT.search(line))}
    for line in condition:
        if match := _COUNTS_TO.search(line):
            return constants.get(match[1])
    return None
