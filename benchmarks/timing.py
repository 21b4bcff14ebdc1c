"""Clocks and conditions: how every figure of `ops.py` and `replay.py` is taken."""

import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Step = Callable[[], Any]

# One round that was not counted warms the caches, the branch predictors and the jit.
_MIN_SAMPLES = 20
_MAX_SAMPLES = 5000


class Loop(NamedTuple):
    """Something to time: `make` prepares the steps of one round outside the clock."""

    make: Callable[[], Sequence[Step]]
    requests: int = 1
    """Requests that one step serves; times are divided by it."""
    consumes: bool = False
    """Whether a round uses its steps up, so that each round needs new ones."""


class Timing(NamedTuple):
    """Microseconds a request."""

    median: float
    mean: float
    minimum: float


def measure(loop: Loop, seconds: float) -> Timing:
    """Time single steps for about `seconds` and summarise them.

    The collector is off while the clock runs, so that neither side pays for the
    other's garbage.
    """
    nanoseconds: list[int] = []
    steps = loop.make()
    for step in steps:
        step()
    gc.collect()
    deadline = time.perf_counter() + seconds
    while len(nanoseconds) < _MAX_SAMPLES and (
        time.perf_counter() < deadline or len(nanoseconds) < _MIN_SAMPLES
    ):
        if loop.consumes:
            steps = loop.make()
        gc.disable()
        for step in steps:
            start = time.perf_counter_ns()
            step()
            nanoseconds.append(time.perf_counter_ns() - start)
        gc.enable()
    scale = 1e-3 / loop.requests
    return Timing(
        statistics.median(nanoseconds) * scale,
        statistics.fmean(nanoseconds) * scale,
        min(nanoseconds) * scale,
    )


def core_to_use(asked: int | None) -> int:
    """Pick the core of the one-core condition among those this process may use."""
    allowed = sorted(os.sched_getaffinity(0))
    if asked is not None and asked not in allowed:
        raise SystemExit(f"--core {asked} is not among the allowed cores {allowed}")
    return allowed[0] if asked is None else asked


def run_child(arguments: Sequence[str], core: int | None) -> None:
    """Run this script again in one condition; `core` None means JAX's defaults."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if core is not None:
        # XLA sizes its thread pool by NPROC, the scheduler keeps it on the core.
        environment["NPROC"] = "1"
        arguments = [*arguments, "--core", str(core)]
    command = [sys.executable, sys.argv[0], *arguments]
    code = subprocess.run(command, env=environment, check=False).returncode
    if code:
        sys.exit(code)  # the child has said why


def enter_one_core(core: int) -> None:
    """Bind this process to `core` and make JAX's dispatch synchronous."""
    os.sched_setaffinity(0, {core})
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
