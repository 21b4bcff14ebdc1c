"""The fused step and its engine: scheduling, pressure, and what a user may ask."""

import dataclasses

import numpy as np
import pytest
from serving_harness import (
    CHUNK,
    MAX_LENGTH,
    VOCABULARY,
    check,
    check_idle,
    make_engine,
    outputs,
    prompts_around,
    run_checked,
)

from uhrc_fn.serving.requests import Phase

OUTPUT = 8
SLOW = pytest.mark.slow

# At, before and after a page boundary and a track boundary.
POINTS = (47, 48, 49, 63, 64, 65, 5)


@pytest.mark.parametrize(
    "family", ["kda-mla", *(pytest.param(f, marks=SLOW) for f in ("gqa", "swa-gqa"))]
)
def test_rows_of_a_batch_do_not_influence_each_other(family):
    prompts = prompts_around(POINTS)
    alone = outputs(make_engine(family), prompts, OUTPUT)
    engine = make_engine(family)
    together = [engine.submit(prompt, OUTPUT) for prompt in prompts]
    run_checked(engine)
    assert [request.output for request in together] == alone
    check_idle(engine)


def test_no_page_or_slot_is_lost_where_the_pool_is_too_small():
    """Requests are retracted, come back, and end with the right tokens."""
    prompts = _many_prompts()
    control = make_engine("gqa", use_cache=False).generate(prompts, 24)
    engine = make_engine("gqa", num_pages=10, num_nodes=10)
    requests = [engine.submit(prompt, 24) for prompt in prompts]
    run_checked(engine)
    assert engine.stats.retractions > 0
    assert [request.output for request in requests] == control
    check_idle(engine)


@pytest.mark.parametrize(
    ("family", "small"),
    [
        pytest.param(
            "swa-gqa",
            {"num_pages": 10, "num_nodes": 10, "num_swa_pages": 8},
            marks=SLOW,
        ),
        ("kda-mla", {"num_pages": 10, "num_nodes": 10, "num_recurrent_slots": 3}),
    ],
)
def test_hybrids_under_pressure(family, small):
    """Too few SWA pages or slots, down to those of one request."""
    prompts = _many_prompts()[:6]
    control = make_engine(family, use_cache=False).generate(prompts, 24)
    engine = make_engine(family, **small)
    requests = [engine.submit(prompt, 24) for prompt in prompts]
    run_checked(engine)
    assert [request.output for request in requests] == control
    check_idle(engine)


def _many_prompts():
    random = np.random.default_rng(5)
    shared = random.integers(1, VOCABULARY, 80)
    sizes = random.integers(0, 80, 10)
    tails = random.integers(1, VOCABULARY, (10, 9))
    return [np.concatenate([shared[:n], t]) for n, t in zip(sizes, tails, strict=True)]


def test_draws_depend_on_the_seed_alone():
    prompts = prompts_around((40, 64))
    options = {"temperature": 1.0, "seed": 7}
    engine = make_engine("gqa")
    first = outputs(engine, prompts, OUTPUT, **options)
    assert engine.generate(prompts, OUTPUT, **options) == first
    assert outputs(engine, prompts, OUTPUT, temperature=1.0, seed=8) != first
    assert outputs(engine, prompts, OUTPUT) != first


def test_a_stop_token_ends_a_request():
    prompt = prompts_around(())[0]
    engine = make_engine("gqa")
    whole = engine.generate([prompt], OUTPUT)[0]
    stop = whole[3]
    cut = engine.generate([prompt], OUTPUT, stop_tokens=(stop,))[0]
    assert cut == whole[: whole.index(stop) + 1]
    check_idle(engine)


def test_tokens_stream_as_they_come():
    prompt = prompts_around(())[0]
    engine = make_engine("gqa")
    whole = engine.generate([prompt], OUTPUT)[0]
    stream = engine.stream(prompt, OUTPUT)
    assert next(stream) == whole[0]
    assert not engine.is_idle
    assert list(stream) == whole[1:]


def test_a_cancelled_request_leaves_nothing_behind():
    prompts = _many_prompts()
    engine = make_engine("gqa")
    requests = [engine.submit(prompt, 24) for prompt in prompts]
    for _ in range(3):
        engine.step()
    running = next(r for r in requests if r.output and not r.is_finished)
    for request in (running, requests[-1], requests[-2]):
        engine.cancel(request)
        check(engine)
    run_checked(engine)
    check_idle(engine)
    assert [r.is_cancelled for r in requests].count(True) == 3
    kept = [r for r in requests if not r.is_cancelled]
    assert all(len(r.output) == 24 for r in kept)


def test_namespaces_do_not_share():
    prompt = prompts_around(())[0]
    engine = make_engine("gqa")
    engine.generate([prompt], OUTPUT, extra_key="a")
    engine.generate([prompt], OUTPUT, extra_key="b")
    assert engine.stats.hit_tokens == 0
    engine.generate([prompt], OUTPUT, extra_key="a")
    assert engine.stats.hit_tokens == 96


def test_steps_without_the_host_give_the_same_tokens():
    prompts = _many_prompts()
    one = make_engine("gqa").generate(prompts, OUTPUT)
    many = make_engine("gqa", steps=8)
    assert many.generate(prompts, OUTPUT) == one
    check_idle(many)


def test_a_prompt_is_computed_but_for_what_hit():
    """A hit leaves one token at least; chunks end at boundaries."""
    prompt = prompts_around(())[0][:96]
    engine = make_engine("gqa")
    engine.generate([prompt], 1)
    engine.generate([prompt], 1)
    assert engine.stats.hit_tokens == 80
    prefilled = engine.stats.prefilled_tokens
    assert prefilled == 96 + 16


def test_a_request_of_the_greatest_length_ends():
    prompt = np.arange(MAX_LENGTH - 1) % VOCABULARY
    engine = make_engine("gqa")
    assert len(engine.generate([prompt], 1)[0]) == 1
    assert len(engine.generate([prompt[:1]], MAX_LENGTH - 1)[0]) == MAX_LENGTH - 1
    check_idle(engine)


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "at least one token"),
        ([[1]], {}, "flat sequence"),
        ([VOCABULARY], {}, "ids in"),
        ([1], {"max_tokens": 0}, "at least 1"),
        ([1] * MAX_LENGTH, {}, "Cut the prompt"),
        ([1], {"stop_tokens": (1, 2, 3, 4, 5)}, "at most 4"),
    ],
)
def test_a_bad_request_is_refused_with_a_sentence(prompt, options, words):
    engine = make_engine("gqa")
    options = {"max_tokens": 1} | options
    with pytest.raises(ValueError, match=words):
        engine.submit(np.asarray(prompt, np.int64), **options)
    assert engine.is_idle


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"chunk_tokens": 17}, "multiple of the page"),
        ({"decode_lanes": 7}, "no more lanes"),
        ({"max_length": 2 * MAX_LENGTH}, "max_prefix_pages"),
        ({"decode_lanes": 0}, "decode_lanes"),
    ],
)
def test_bad_settings_are_refused_with_a_sentence(change, words):
    config = make_engine("gqa").config
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config, **change)


def test_without_a_cache_the_step_holds_none():
    """The control has no cache in its state: no operation could be in its program."""
    engine = make_engine("kda-mla", use_cache=False)
    assert engine.state.cache is None
    assert engine.config.track_interval == 0


def test_phases_are_what_the_step_says():
    engine = make_engine("gqa")
    engine.submit(np.arange(2 * CHUNK + 5) % VOCABULARY, 2)
    seen = []
    for _ in range(5):
        engine.step()
        phase = int(engine.state.requests.phase[1])
        seen.append((Phase(phase).name, int(engine.state.tables.length[1])))
    running = [("RUNNING", n * CHUNK) for n in (1, 2)]
    assert seen[:3] == [*running, ("RUNNING", 2 * CHUNK + 5)]
    assert seen[3:] == [("IDLE", 0)] * 2
