"""Run one of the peer's own test files against our classes; not a test itself.

python tests/peer/peer_run.py CHECKOUT/python FILE RESULTS.json
"""

import contextlib
import importlib.util
import io
import json
import os
import sys
import traceback
import unittest
from pathlib import Path

# As the peer's own run of these files: eight devices of the CPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import peer_adapters
import peer_checkout


class Recorder(unittest.TestResult):
    """Keeps each test's outcome: an empty string, or why it failed."""

    def __init__(self):
        super().__init__()
        self.outcome: dict[str, str] = {}

    def _keep(self, test, text: str) -> None:
        self.outcome[name_of(test)] = text

    def addSuccess(self, test):
        self._keep(test, "")

    def addFailure(self, test, err):
        self._keep(test, "".join(traceback.format_exception(*err)))

    def addError(self, test, err):
        self.addFailure(test, err)

    def addSkip(self, test, reason):
        self._keep(test, f"skipped: {reason}")


def name_of(test: unittest.TestCase) -> str:
    """``Class.method``."""
    return ".".join(test.id().split(".")[-2:])


def main(root: str, file: str, results: str) -> None:
    """Import the file by itself, run all of it, write the outcomes."""
    missing = peer_checkout.open_checkout(Path(root).resolve())
    peer_adapters.install()
    spec = importlib.util.spec_from_file_location("peer_test_file", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    suite = unittest.TestLoader().loadTestsFromModule(module)
    recorder = Recorder()
    with contextlib.redirect_stdout(io.StringIO()):
        suite.run(recorder)
    found = {"outcome": recorder.outcome, "missing": missing}
    Path(results).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
