"""Read a TPU program: its kernels and what the compiler says that each costs.

The compiled text is a scheduled module. What runs one after another are the
instructions of the entry computation and of the computations it calls (branches,
loop bodies, asynchronous parts); the inside of a fusion is one kernel.
"""

import re
from typing import NamedTuple

# The compiler writes the largest int64 where it cannot bound a kernel's cycles: work
# handed to the SparseCore, or a loop whose trip count it does not know.
_UNBOUNDED = 2**63 - 1

# An opcode that ends so takes part in a transfer, not in a computation.
_TRANSFER = ("-start", "-done", "-update")
# Instructions that move no data.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all call conditional "
    "opt-barrier partition-id".split()
)
# The computations these name are part of one kernel; do not look inside.
_CLOSED = frozenset(
    "fusion reduce reduce-window sort scatter select-and-scatter map all-reduce".split()
)
# Without an estimate these are kernels all the same; other instructions without one
# are scalar bookkeeping.
_KERNEL_OPCODES = frozenset("fusion custom-call sort gather scatter".split())
# Custom calls that only mark something for the compiler.
_MARKERS = ("AssumeGatherIndicesInBound", "AllocateBuffer", "Sharding")

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_OPCODE = re.compile(r"(?<![\w.\-%=])([a-z][a-z0-9\-]*)\(")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)="
    r"%?([\w.\-]+)|(?:branch_computations|called_computations)=\{([^}]*)\}"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


class ProgramCost(NamedTuple):
    """Kernels of one program and the sum of the compiler's estimates."""

    kernels: int
    estimated_cycles: int
    """Sum over the kernels that have a finite estimate: a lower bound."""
    without_estimate: int
    """Kernels for which the compiler gives no figure: custom gathers, sorts."""
    unbounded: int
    """Kernels it calls unbounded, and loops."""


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Split the module's text into instruction lines by computation."""
    found: dict[str, list[str]] = {}
    entry = current = ""
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            current = header[2]
            found[current] = []
            entry = current if header[1] else entry
        elif " = " in line and current:
            found[current].append(line.strip())
    if not entry:
        raise ValueError("the text holds no ENTRY computation; give Compiled.as_text()")
    return found, entry


def _opcode(line: str) -> str:
    """Read the opcode of an instruction: the first word that opens arguments."""
    match = _OPCODE.search(line.split(" = ", 1)[1])
    return match[1] if match else ""


def program_cost(text: str) -> ProgramCost:
    """Add up the kernels that the compiled module `text` runs."""
    computations, entry = _computations(text)
    kernels = cycles = without = unbounded = 0
    todo, seen = [entry], {entry}
    while todo:
        for line in computations.get(todo.pop(), ()):
            opcode = _opcode(line)
            estimate = _CYCLES.search(line)
            if opcode == "while":
                unbounded += 1
            elif opcode in _FREE or opcode.endswith(_TRANSFER):
                pass
            elif estimate:
                kernels += 1
                if int(estimate[1]) == _UNBOUNDED:
                    unbounded += 1
                else:
                    cycles += int(estimate[1])
            elif opcode in _KERNEL_OPCODES and not any(m in line for m in _MARKERS):
                kernels += 1
                without += 1
            if opcode in _CLOSED:
                continue
            for single, several in _CALLED.findall(line):
                for name in (single or several).replace("%", "").split(","):
                    if name.strip() and name.strip() not in seen:
                        seen.add(name.strip())
                        todo.append(name.strip())
    return ProgramCost(kernels, cycles, without, unbounded)
