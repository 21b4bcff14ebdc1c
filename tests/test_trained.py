"""A hybrid trained on recall remembers through its snapshots, and must need them."""

import functools

import jax
import numpy as np
import pytest
import trained_recall as example
from serving_harness import FAST

from uhrc_fn.serving.models.model import forward, init_pools

FAMILIES = example.FAMILIES
draw = jax.jit(example.draw, static_argnums=1)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forward_of_training_is_the_forward_of_serving(family):
    config = example.model_config(family)
    model = example.init(jax.random.key(3), config)
    ids = draw(jax.random.key(4), 3).token_ids
    lanes = example.whole(ids)
    pools = init_pools(config, num_pages=3, page_size=ids.shape[1], num_slots=3)
    jit = functools.partial(jax.jit, compiler_options=FAST)
    _, wanted = jit(forward)(model, pools, lanes)
    got = jit(example.logits_of)(model, ids)[:, -1]
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


def test_what_is_asked_was_there_before():
    batch = draw(jax.random.key(0), 64)
    ids, is_asked = np.asarray(batch.token_ids), np.asarray(batch.is_asked)
    assert (ids[:, 0] == example.START).all()
    for row, asked in zip(ids, is_asked, strict=True):
        seen = {}
        pairs = row[1:].reshape(-1, 2).tolist()
        for (key, value), is_old in zip(pairs, asked, strict=True):
            assert (key in seen) == is_old
            assert seen.setdefault(key, value) == value


def test_questions_share_their_beginning_up_to_the_middle_of_a_pair():
    prompts, answers, is_cut = example.questions(0, 2, 4)
    for prompt, answer, cut in zip(prompts, answers, is_cut, strict=True):
        pairs = dict(prompt[1:-1].reshape(-1, 2).tolist())
        assert pairs[prompt[-1]] == answer
        assert cut == (prompt[-1] == prompt[example.PREFIX - 1])
    begins = [prompt[: example.PREFIX].tolist() for prompt in prompts]
    assert begins[:4] == begins[:1] * 4 and begins[4] != begins[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_recall_is_the_same_with_the_cache_and_lost_with_half_a_snapshot(family):
    model, learned = example.train(family)
    assert learned >= 0.95
    recalls, is_cut = example.compare(model, 8, 9, FAST)
    control, cached, forgetful = (
        recalls[name] for name in ("without", "with", "forgetful")
    )
    assert control.hit_ratio == 0 and cached.hit_ratio > 0.6
    assert forgetful.hit_ratio == cached.hit_ratio
    assert cached.right.mean() >= 0.9 >= 10 * example.CHANCE
    np.testing.assert_array_equal(cached.tokens, control.tokens)
    # A key whose value comes after the snapshot is what a temporal state cannot hold.
    assert cached.right[is_cut].mean() >= 0.9
    assert forgetful.right[is_cut].mean() <= 0.5
    assert forgetful.right.mean() <= cached.right.mean() - 0.2
