"""Do something in place, or nothing at all."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def once_if(is_needed: Callable, update: Callable, arrays):
    """``update(arrays)`` where ``is_needed(arrays)``, else `arrays`; in place.

    A loop of one turn at most: XLA keeps the arrays of a loop where they are, and
    copies what a `cond` returns. Under `vmap` the turn is taken for all where one of
    them needs it, as a select between old and new would copy every array.

    Args:
      is_needed: of the arrays, bool []; false of what `update` returns.
      update: takes and returns the arrays; changes nothing where it is not needed, and
        depends on no other array.
      arrays: any pytree.
    """

    @jax.custom_batching.custom_vmap
    def turn(arrays):
        return jax.lax.while_loop(is_needed, update, arrays)

    @turn.def_vmap
    def turn_for_all(size, is_batched, arrays):
        (is_batched,) = is_batched
        spread = lambda x, is_one: (
            x if is_one else jnp.broadcast_to(x, (size, *x.shape))
        )
        arrays = jax.tree.map(spread, arrays, is_batched)
        of_any = lambda arrays: jnp.any(jax.vmap(is_needed)(arrays))
        arrays = once_if(of_any, jax.vmap(update), arrays)
        return arrays, jax.tree.map(lambda _: True, arrays)

    return turn(arrays)
