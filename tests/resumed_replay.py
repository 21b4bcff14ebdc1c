"""Replay a generated workload in a process of its own, which may kill itself.

    python resumed_replay.py COMPONENTS KILL_AT PROGRESS_FILE

Prints what the replay says, and a digest of the last state, as JSON. With `KILL_AT`
above 0 the process ends with SIGKILL once so many requests are done.
"""

import hashlib
import json
import os
import signal
import sys

import jax
import numpy as np

from uhrc_fn import check_invariants
from uhrc_fn.replay.engine import replay
from uhrc_fn.replay.hybrid import Hybrid
from uhrc_fn.replay.progress import ProgressFile
from uhrc_fn.replay.workload import Workload

NUM_REQUESTS = 400
CAPACITY = 60
BATCH = 32
HYBRIDS = {
    "FULL": Hybrid(),
    "FULL,SWA": Hybrid(
        components=("FULL", "SWA"), window=12, capacity_swa_pages=CAPACITY // 2
    ),
    "FULL,RECURRENT": Hybrid(
        components=("FULL", "RECURRENT"), checkpoints="branches", capacity_slots=12
    ),
}


def generated(seed: int = 11) -> Workload:
    """Conversations that branch, under eviction: far more pages than the cache has."""
    rng = np.random.default_rng(seed)
    lines, fresh, keys = [[1], [2], [3]], 10, []
    for _ in range(NUM_REQUESTS):
        line = lines[max(len(lines) - 1 - int(rng.geometric(0.2)), 0)]
        if rng.random() < 0.4:
            line = line[: rng.integers(1, len(line) + 1)]
            lines.append(line)
        for _ in range(rng.integers(0, 3)):
            if len(line) < 12:
                line.append(fresh)
                fresh += 1
        keys.append(list(line))
    return Workload(
        name="generated",
        page_size=1,
        keys=np.concatenate(keys).astype(np.int32),
        offsets=np.cumsum([0, *map(len, keys)]),
        input_tokens=np.array([4 * len(key) for key in keys]),
        page_tokens=4,
    )


def figures(
    components: str, progress_file: ProgressFile | None, on_progress=None
) -> dict:
    result = replay(
        generated(),
        capacity_pages=CAPACITY,
        batch=BATCH,
        measure_from=0.25,
        hybrid=HYBRIDS[components],
        progress_file=progress_file,
        on_progress=on_progress,
    )
    check_invariants(result.cache)
    state = hashlib.sha256()
    for leaf in jax.tree.leaves(result.cache):
        state.update(np.asarray(leaf).tobytes())
    return {
        "hit_pages": result.hit_pages.tolist(),
        "evicted_pages": result.evicted_pages,
        "inserted_pages": result.inserted_pages,
        "state": state.hexdigest(),
    }


def main() -> None:
    components, kill_at, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]

    def on_progress(progress):
        if kill_at and progress.done >= kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    every = NUM_REQUESTS // 2
    progress_file = ProgressFile(path=path, every=every)
    print(json.dumps(figures(components, progress_file, on_progress)))


if __name__ == "__main__":
    main()
