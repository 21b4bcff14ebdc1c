"""Every operation compiles for a TPU, and there too the state is updated in place.

libtpu compiles for a described chip; nothing runs. It has an environment of its own
(`make tpu-estimate` makes it), so these tests skip where it is not installed.
"""

import re

import jax
import pytest
from op_cases import OPS, READS, op_cases, shapes
from tpu_chip import described_chip, needs_libtpu, no_cache_entry

from uhrc_fn import CacheConfig

ESTIMATE = re.compile(r'"estimated_cycles":"(\d+)"')
CONFIG = CacheConfig(page_size=128, num_pages=16_384, max_prefix_pages=1024)

pytestmark = [pytest.mark.slow, needs_libtpu]


@pytest.fixture(scope="module")
def chip():
    """Where arrays live: one chip of a described topology."""
    with no_cache_entry():
        yield described_chip()


def placed(tree, chip):
    describe = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=chip)
    return jax.tree.map(describe, tree)


@pytest.fixture(scope="module")
def state_bytes(chip) -> int:
    """The state as the TPU lays it out, padding included."""
    identity = jax.jit(lambda state: state, keep_unused=True)
    compiled = identity.lower(placed(shapes(CONFIG), chip)).compile()
    return compiled.memory_analysis().argument_size_in_bytes


@pytest.mark.parametrize("name", OPS)
def test_an_operation_compiles_and_keeps_the_state_in_place(name, chip, state_bytes):
    case = op_cases(CONFIG, pages=64, batch=8)[name]
    args = placed((shapes(CONFIG), *jax.eval_shape(lambda: case.args)), chip)
    memory = case.jit().lower(*args).compile().memory_analysis()
    if name in READS:
        assert memory.alias_size_in_bytes == 0
        assert memory.output_size_in_bytes < state_bytes / 100
        return
    assert memory.alias_size_in_bytes >= state_bytes
    undonated = memory.output_size_in_bytes - memory.alias_size_in_bytes
    assert undonated < state_bytes / 100


def test_without_donation_nothing_is_aliased(chip):
    case = op_cases(CONFIG, pages=64, batch=8)["match"]
    args = placed((shapes(CONFIG), *jax.eval_shape(lambda: case.args)), chip)
    compiled = case.jit(donate=False).lower(*args).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == 0


def test_a_match_of_64_pages_is_cheap_by_the_compilers_estimate(chip, state_bytes):
    """Each kernel costs about 2,100 cycles, so this bounds their number too."""
    case = op_cases(CONFIG, pages=64, batch=8)["match"]
    args = placed((shapes(CONFIG), *jax.eval_shape(lambda: case.args)), chip)
    compiled = case.jit().lower(*args).compile()
    cycles = [int(c) for c in ESTIMATE.findall(str(compiled.as_text()))]
    assert len(cycles) >= 5 and sum(cycles) <= 35_000
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes
