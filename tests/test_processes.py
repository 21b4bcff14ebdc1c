"""Two processes on one machine step together, as `jax.distributed` has them."""

import os
import pathlib
import socket
import subprocess
import sys

import mesh_worker
import numpy as np
import pytest

TESTS = pathlib.Path(__file__).parent
TIMEOUT = 500


def run_processes(job: str, folder: pathlib.Path, count: int = 2) -> list[dict]:
    """What each of `count` processes holds after a job."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    devices = mesh_worker.NUM_DEVICES // count
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
    }
    outputs = [folder / f"{process}.npz" for process in range(count)]
    workers = []
    try:
        for process, output in enumerate(outputs):
            arguments = [job, port, count, process, output]
            command = [sys.executable, TESTS / "mesh_worker.py", *arguments]
            log = (folder / f"{process}.log").open("w")
            workers.append(
                subprocess.Popen(
                    [str(part) for part in command],
                    env=environment,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
            log.close()
        codes = [worker.wait(TIMEOUT) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    logs = [(folder / f"{n}.log").read_text()[-3000:] for n in range(count)]
    assert codes == [0] * count, "\n\n".join(logs)
    return [dict(np.load(output)) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("job", ["operations", "serving"])
def test_two_processes_agree_on_every_integer_with_one(job, tmp_path):
    held = run_processes(job, tmp_path)
    alone = by_rank(mesh_worker.run(job))
    seen = set()
    for parts in held:
        ranks = {name.split("/")[1] for name in parts}
        assert len(ranks) > 1 and len(parts) > 10
        for name, part in parts.items():
            place = tuple(name.split("/")[:2])
            np.testing.assert_array_equal(part, alone[place], err_msg=name)
            seen.add(place)
    assert seen == set(alone)


def by_rank(parts) -> dict[tuple[str, str], np.ndarray]:
    """What the devices of each rank hold, one of them for all."""
    return {tuple(name.split("/")[:2]): part for name, part in parts.items()}
