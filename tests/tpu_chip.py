"""A TPU that is only described: the compiler can compile for it, nothing can run."""

import contextlib
import importlib.util
import os

import jax
import pytest

TOPOLOGY = "v6e:2x2x1"

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed; pip install 'uhrc_fn[tpu]' brings it",
)

# Pallas asks which chip it compiles for; the mesh in force tells it.
TPU = jax.sharding.AbstractMesh(
    (),
    (),
    abstract_device=jax.sharding.AbstractDevice(
        device_kind="TPU v6 lite", num_cores=1, platform="tpu"
    ),
)


def described_chips() -> list:
    """The four chips of a described topology, or skip the test."""
    from jax.experimental import topologies

    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v6e-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several test runs at once
    }.items():
        os.environ.setdefault(name, value)
    try:
        described = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY)
    except Exception as error:  # libtpu raises several kinds
        pytest.skip(f"libtpu cannot describe {TOPOLOGY}: {error}")
    return list(described.devices)


def described_chip():
    """Where arrays live: one chip of a described topology, or skip the test."""
    return jax.sharding.SingleDeviceSharding(described_chips()[0])


def compiled_for_tpu(function, *args, donate_argnums=0):
    """Compile `function` for the described chip, from shapes of its arguments."""
    chip = described_chip()
    describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip)
    jitted = jax.jit(function, donate_argnums=donate_argnums)
    with jax.sharding.use_abstract_mesh(TPU), no_cache_entry():
        return jitted.lower(*jax.tree.map(describe, args)).compile()


@contextlib.contextmanager
def no_cache_entry():
    """Keep what is compiled out of the cache on disk: it could not be read again."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    try:
        yield
    finally:
        jax.config.update(name, before)
