"""How the tests run: JAX on CPU, strict promotion, a compile cache kept on disk."""

import gc
import os
import pathlib

# Read when JAX starts its backend: set before anything can do that. Eight virtual
# devices let the sharded tests run on any machine.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
import jax
import pytest

CACHE = pathlib.Path(__file__).parent.parent / ".cache"

jax.config.update("jax_platforms", os.environ["JAX_PLATFORMS"])
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(CACHE / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)

# Deadlines would count compilation. CI derandomizes: the same commit, the same run.
hypothesis.settings.register_profile("dev", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev")
)


def pytest_addoption(parser):
    """Here, not in `tests/peer`: a run of the whole suite reads this file alone."""
    parser.addoption(
        "--peer",
        metavar="CHECKOUT",
        help="checkout of sglang-jax whose own tests of its caches to run on ours",
    )


# Each compiled program takes a hundred memory maps or more, and a Linux process may
# have 65,530: past that JAX dies of a segmentation fault.
_MAPS = pathlib.Path("/proc/self/maps")
_MANY_MAPS = 25_000


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Let go of compiled programs before there are too many for one process."""
    yield
    if _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def traces_dir() -> pathlib.Path:
    """The folder of recorded traces; a test that needs it skips where it is not."""
    named = os.environ.get("UHRC_TRACES", "")
    if not named:
        pytest.skip("set UHRC_TRACES to the folder of recorded traces to run this")
    folder = pathlib.Path(named)
    if not folder.is_dir():
        pytest.skip(f"UHRC_TRACES names {folder}, which is not a folder")
    return folder
