"""What the processes of a mesh do, each in a Python of its own, and one alone.

    python tests/mesh_worker.py JOB PORT NUM_PROCESSES PROCESS OUTPUT

Each process keeps the parts of the state that its devices hold.
"""

import sys

import jax
import numpy as np

NUM_DEVICES = 8


def run(job: str) -> dict[str, np.ndarray]:
    """Do a job; ``{"leaf/rank/device": integers}`` of what this process holds."""
    # The devices of a rank lie in different processes.
    devices = np.asarray(jax.devices()).reshape(2, -1).T.reshape(-1)
    return {"operations": _operations, "serving": _serving}[job](devices)


def _operations(devices) -> dict[str, np.ndarray]:
    from harness import stack
    from mesh_driver import config_of, draw_turns, init_rank, play
    from serving_harness import FAST

    from uhrc_fn.mesh import init_ranks, make_mesh, per_rank, place

    config, mesh = config_of("FULL"), make_mesh(2, 4, devices)
    turns = place(mesh, stack([draw_turns(config, seed, 200) for seed in range(2)]))
    step = jax.jit(per_rank(play, mesh), donate_argnums=0, compiler_options=FAST)
    return _parts(step(init_ranks(mesh, lambda: init_rank(config)), turns))


def _serving(devices) -> dict[str, np.ndarray]:
    from mesh_engines import mesh_engine, serve

    engine = mesh_engine("gqa", (4, 2), devices=devices)
    outputs = serve(engine)
    engine.check()
    state = engine.state
    parts = _parts((state.cache, state.tables, state.requests))
    return parts | {"outputs/0/0": np.asarray(outputs)}


def _parts(tree) -> dict[str, np.ndarray]:
    return {
        f"{leaf}/{shard.index[0].start}/{shard.device.id}": np.asarray(shard.data)
        for leaf, array in enumerate(jax.tree.leaves(tree))
        for shard in array.addressable_shards
        if array.size
    }


def main(job: str, port: str, num_processes: str, process: str, output: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", int(num_processes), int(process), initialization_timeout=60
    )
    assert jax.process_count() == int(num_processes)
    assert len(jax.devices()) == NUM_DEVICES
    assert len(jax.local_devices()) < NUM_DEVICES
    np.savez(output, **run(job))  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])
