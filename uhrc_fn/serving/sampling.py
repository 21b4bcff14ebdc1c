"""The next token of each lane: greedy, or drawn with a seed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32


def sample(
    logits: Float[Array, " lanes vocab"],
    temperature: Float[Array, " lanes"],
    seed: Int32[Array, " lanes"],
    position: Int32[Array, " lanes"],
) -> Int32[Array, " lanes"]:
    """Draw a token for each lane.

    A draw depends on the request's seed and on the token's position alone, so that
    neither the rest of the batch nor a hit or a retraction changes it.

    Args:
      logits: of the last token of each lane.
      temperature: 0 takes the likeliest token.
      seed: of the request.
      position: of the token that is drawn.
    """

    def noise(seed, position):
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[-1:], jnp.float32)

    logits = logits.astype(jnp.float32)
    greedy = temperature <= 0
    # The largest of logits with Gumbel noise is a draw from their softmax.
    scaled = logits / jnp.where(greedy, 1, temperature)[:, None]
    drawn = scaled + jax.vmap(noise)(seed, position)
    ranked = jnp.where(greedy[:, None], logits, drawn)
    return jnp.argmax(ranked, axis=-1).astype(jnp.int32)
