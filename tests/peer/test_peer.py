"""sglang-jax's own tests of its caches, unmodified, against ours.

    pytest tests/peer --peer CHECKOUT

Each file runs in a process of its own, since it sets a global mesh of eight devices
and changes the peer's modules; see `peer_adapters`. Of request methods with the extra
buffer, the peer's tests drive the halves before and after the insert: those are the
peer's own here, on our tree.
"""

import ast
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import peer_expected
import pytest

FILES = tuple(peer_expected.EXPECTED_FAILURES)
HERE = Path(__file__).parent
_REASON = "needs a checkout of sglang-jax: pytest tests/peer --peer CHECKOUT"
_FULL_ROWS = (
    "TestUnifiedRadixCache.",
    "TestUnifiedRadixCacheWithRequests.",
    "TestUnifiedRadixCacheEffectiveCacheLen.",
)


class PeerTestFailed(Exception):
    """One of the peer's tests failed."""


def python_folder(path: str) -> Path:
    root = Path(path).resolve()
    root = root if (root / "sgl_jax").is_dir() else root / "python"
    missing = [str(_file(root, f)) for f in FILES if not _file(root, f).is_file()]
    if missing:
        raise pytest.UsageError(
            f"--peer {path} has no {', '.join(missing)}; wanted a whole checkout of "
            "sglang-jax, tests included"
        )
    return root


def _file(root: Path, name: str) -> Path:
    return root / "sgl_jax" / "test" / "mem_cache" / f"{name}.py"


def names_in(path: Path) -> list[str]:
    """``Class.method`` of each test in a file, which is not imported."""
    return [
        f"{each.name}.{test.name}"
        for each in ast.parse(path.read_text()).body
        if isinstance(each, ast.ClassDef)
        for test in each.body
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test")
    ]


def pytest_generate_tests(metafunc):
    if "peer_test" not in metafunc.fixturenames:
        return
    path = metafunc.config.getoption("--peer")
    if path is None:
        skip = pytest.mark.skip(reason=_REASON)
        metafunc.parametrize("peer_test", [pytest.param(None, marks=skip)])
        return
    root = python_folder(path)
    cases = []
    for file in FILES:
        for name in names_in(_file(root, file)):
            why = peer_expected.EXPECTED_FAILURES[file].get(name)
            xfail = pytest.mark.xfail(strict=True, reason=why, raises=PeerTestFailed)
            marks = [xfail] if why else []
            cases.append(pytest.param((file, name), marks=marks, id=f"{file}:{name}"))
    metafunc.parametrize("peer_test", cases)


@pytest.fixture
def root(request) -> Path:
    path = request.config.getoption("--peer")
    if path is None:
        pytest.skip(_REASON)
    return python_folder(path)


@functools.cache
def outcomes(root: Path, file: str) -> dict[str, str]:
    """What came of each test of a file: an empty string, or why it failed."""
    cache = HERE.parents[1] / ".cache" / "jax"
    paths = [str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "JAX_COMPILATION_CACHE_DIR": str(cache),
    }
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, str(HERE / "peer_run.py")]
        command += [str(root), str(_file(root, file)), str(results)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{file} could not be run\n{done.stderr[-4000:]}")
        return json.loads(results.read_text())["outcome"]


def test_peer(peer_test, root):
    file, name = peer_test
    failure = outcomes(root, file)[name]
    if failure:
        raise PeerTestFailed(failure)


def test_table_names_tests_that_exist(root):
    for file, expected in peer_expected.EXPECTED_FAILURES.items():
        assert set(expected) <= set(names_in(_file(root, file)))


def test_share_that_passes(root):
    """Nine of ten, of FULL rows and of recurrent rows past the leaf-only rule."""
    found = outcomes(root, "test_unified_radix_cache")
    full = {name for name in found if name.startswith(_FULL_ROWS)}
    recurrent = set(found) - full - set(peer_expected.LEAF_ONLY)
    assert len(full) > 20 and len(recurrent) > 20
    for rows in (full, recurrent):
        passed = [name for name in rows if not found[name]]
        assert len(passed) >= 0.9 * len(rows)
    assert not any(outcomes(root, "test_unified_radix_tree_flag").values())
