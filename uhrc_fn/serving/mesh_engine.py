"""`MeshEngine`: data-parallel ranks of one model on a mesh, as an engine.

Each rank has a tree, requests and pools of its own, and its devices share the model's
heads. All ranks step together, in one program; who is served by which rank is the
caller's choice.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from ..mesh import DATA, init_ranks, partition_specs, per_rank, place
from ..ops.clock import compact_clock
from ..pools.layout import require
from ..status import raise_if_bad
from .config import ServeConfig
from .desk import Desk, Request
from .engine import COMPACT_AT, cancel_row, require_steps, take_arrivals
from .lanes import Pools
from .models.model import Model
from .models.shard import shard_model
from .state import ServeState, init_serving
from .step import serve_steps


class MeshEngine:
    """Serves one model on all ranks of a mesh.

    Where the mesh spans processes, each of them does the same: it builds this engine
    and submits all requests, and gets all tokens.
    """

    def __init__(
        self,
        model: Model,
        config: ServeConfig,
        make_pools: Callable[[], Pools],
        mesh: Mesh,
        *,
        steps_per_call: int = 1,
        compiler_options: dict | None = None,
    ):
        """Put a model and idle ranks on a mesh.

        Args:
          model: of `init_model`, whole.
          config: settings of each rank's step.
          make_pools: gives the pools of all ranks: `init_pools` with `num_ranks`.
          mesh: of `uhrc_fn.mesh.make_mesh`.
          steps_per_call: steps that run without the host in between.
          compiler_options: for XLA, as `jax.jit` takes them.

        Raises:
          ValueError: the devices of a rank do not divide the model, or
            `steps_per_call` is not positive.
        """
        require_steps(steps_per_call)
        self.config, self.mesh, self.steps_per_call = config, mesh, steps_per_call
        self.ranks = [
            Desk(config, model.config.vocab_size) for _ in range(mesh.shape[DATA])
        ]
        self.model = shard_model(model, mesh)
        self.state = init_ranks(mesh, lambda: init_serving(config, make_pools()))
        jit = functools.partial(jax.jit, compiler_options=compiler_options)
        steps = serve_steps_on(mesh, self.state, steps_per_call)
        specs = partition_specs(self.state)
        one_by_one = functools.partial(per_rank, mesh=mesh, out_specs=specs)
        self._steps = jit(steps, donate_argnums=1)
        self._enqueue = jit(one_by_one(take_arrivals), donate_argnums=0)
        cancel = one_by_one(cancel_row, check_vma=False)
        self._cancel = jit(cancel, donate_argnums=0)
        self._compact = jax.jit(per_rank(compact_clock, mesh), donate_argnums=0)

    def submit(self, prompt, max_tokens: int, *, rank: int, **options) -> Request:
        """Hand over a request to a rank; the rest as of `Engine.submit`."""
        require(
            0 <= rank < len(self.ranks),
            f"rank={rank}",
            f"one of {len(self.ranks)} ranks, from 0",
            "Choose it with uhrc_fn.engine's routing, or in turn.",
        )
        return self.ranks[rank].submit(prompt, max_tokens, **options)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits or runs on any rank."""
        return all(rank.is_idle for rank in self.ranks)

    def step(self) -> list[tuple[Request, list[int]]]:
        """Run `steps_per_call` steps on all ranks.

        Returns:
          the requests that got tokens, with those tokens, rank by rank.
        """
        while any(rank.has_arrivals for rank in self.ranks):
            arrivals = self._stack([rank.arrivals() for rank in self.ranks])
            self.state = self._enqueue(self.state, arrivals)
        self.state, record = self._steps(self.model, self.state)
        record = self._read(record)
        news = []
        for number, rank in enumerate(self.ranks):
            news += rank.read(jax.tree.map(lambda x, n=number: x[n], record))
        if self.config.use_cache and record.clock.max() > COMPACT_AT:
            cache = self._compact(self.state.cache)
            self.state = dataclasses.replace(self.state, cache=cache)
        return news

    def run(self) -> None:
        """Step until nobody waits or runs."""
        while not self.is_idle:
            self.step()

    def cancel(self, request: Request, *, rank: int) -> None:
        """Drop a request of a rank; what it has published stays, the rest is free."""
        row = self.ranks[rank].drop(request)
        if row:
            rows = [np.int32(row if n == rank else 0) for n in range(len(self.ranks))]
            self.state = self._cancel(self.state, self._stack(rows))

    def check(self) -> None:
        """Raise if a cache met trouble that it could not mend; see `Status`."""
        if self.config.use_cache:
            raise_if_bad(self.state.cache)

    def _stack(self, records):
        """What the host has for each rank, on the mesh."""
        return place(self.mesh, jax.tree.map(lambda *xs: np.stack(xs), *records))

    def _read(self, record):
        """The record of all ranks, those of other processes too."""
        if jax.process_count() == 1:
            return jax.device_get(record)
        return multihost_utils.process_allgather(record, tiled=True)


def serve_steps_on(mesh: Mesh, state: ServeState, num_steps: int) -> Callable:
    """`serve_steps` of all ranks: ``(model, state) -> (state, record)``, to be jitted.

    The model's heads are summed over `tensor`; nothing crosses `data`.

    Args:
      mesh: of `make_mesh`.
      state: of all ranks, or its shapes: how the pools lie.
      num_steps: static.
    """
    return per_rank(
        lambda model, state: serve_steps(model, state, num_steps),
        mesh,
        out_specs=(partition_specs(state), P(DATA)),
        # What the step's loops carry is the same on a rank's devices, as each sum over
        # them is; loops that mix the two kinds cannot be typed so.
        check_vma=False,
    )
