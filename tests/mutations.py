"""Plant each known fault, one at a time, and show that its test goes red.

python tests/mutations.py [--only WORDS] [--jobs N]

A test that stays green with its fault in place is the fault of the test. Exit status
1 where there is one.
"""

import argparse
import concurrent.futures
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import ROOT, Fault
from faults_hits import FAULTS as HITS
from faults_ownership import FAULTS as OWNERSHIP

FAULTS: list[Fault] = [*OWNERSHIP, *HITS]

_FAILED_TESTS = 1  # pytest's exit status; others mean that no test could run
_BROKEN = ("NameError", "TypeError", "AttributeError", "SyntaxError", "ImportError")


def is_seen(fault: Fault) -> bool:
    """Whether the fault's test fails in a copy that holds the fault."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fault.plant(folder)
        (folder / ".cache").symlink_to(ROOT / ".cache")
        (ROOT / ".cache").mkdir(exist_ok=True)
        run = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider",
             f"tests/{fault.test}"],
            cwd=folder, env=os.environ | {"PYTHONPATH": name}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
    # A program that no longer runs is no wrong program.
    is_broken = any(f"E   {error}" in run.stdout for error in _BROKEN)
    if run.returncode not in (0, _FAILED_TESTS) or is_broken:
        raise RuntimeError(f"{fault.name}: no test ran\n{run.stdout}{run.stderr}")
    return run.returncode == _FAILED_TESTS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--jobs", type=int, default=1, help="copies tested at once")
    arguments = parser.parse_args()
    chosen = [fault for fault in FAULTS if arguments.only in fault.name]
    if not chosen:
        parser.error(f"no fault is named {arguments.only!r}")
    missed = 0
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for fault, seen in zip(chosen, pool.map(is_seen, chosen), strict=True):
            missed += not seen
            print("seen  " if seen else "MISSED", fault.name, flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults were seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
