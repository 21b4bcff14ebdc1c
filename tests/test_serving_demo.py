"""`python -m uhrc_fn.serving`, from arguments to table, JSON and plot."""

import contextlib
import dataclasses
import json
import random

import jax
import numpy as np
import pytest

from uhrc_fn import jitted
from uhrc_fn.serving.demo import cli, setting
from uhrc_fn.serving.demo.audit import holdings, leaks
from uhrc_fn.serving.demo.cli import main
from uhrc_fn.serving.demo.figures import Figures
from uhrc_fn.serving.demo.workload import ANSWER_TOKENS, Turn, conversations
from uhrc_fn.serving.models.config import small_config
from uhrc_fn.serving.models.model import init_model

JSON_KEYS = [
    "family",
    "requests",
    "identical_outputs",
    "hit_ratio",
    "ttft_p50_ms",
    "ttft_p50_no_cache_ms",
    "ttft_ratio_p50",
    "tokens_per_s",
    "tokens_per_s_no_cache",
    "unshared_throughput_ratio",
    "retractions",
    "leaked_pages",
    "leaked_slots",
]
NUM_TURNS = 3
TALKS = 3
# Room for one conversation and a half: the demo must evict on its way.
OPTIONS = ["--family", "gdn-gqa", "--page-size", "16", "--batch-slots", "2"]
OPTIONS += ["--capacity-pages", "24"]


def tiny_model(family):
    model = small_config(family, vocab_size=256, num_layers=4, hidden_size=32)
    return dataclasses.replace(model, layers=model.layers[-2:])


def tiny_talks(count, dice):
    """Conversations that share a beginning of 40 tokens."""
    del count
    said = lambda n: np.array(dice.choices(range(256), k=n), np.int32)
    system = said(40)
    first = lambda: np.concatenate([system, said(30)])
    return [Turn(first(), (said(20),) * (NUM_TURNS - 1)) for _ in range(TALKS)]


@contextlib.contextmanager
def tiny():
    """The demo, small enough that compiling takes most of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setting, "_model_config", tiny_model)
        patch.setattr(cli, "conversations", tiny_talks)
        yield patch


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """One run: ``(exit code, JSON, the folder with the plot)``."""
    folder = tmp_path_factory.mktemp("demo")
    files = ["--json", str(folder / "a.json"), "--plot", str(folder / "a.svg")]
    with tiny():
        code = main([*OPTIONS, *files])
    return code, json.loads((folder / "a.json").read_text()), folder


def test_the_demo_keeps_its_word(demo):
    code, figures, folder = demo
    assert code == 0
    assert list(figures) == JSON_KEYS
    assert figures["family"] == "gdn-gqa"
    assert figures["requests"] == NUM_TURNS * TALKS
    assert figures["identical_outputs"] is True
    assert (figures["leaked_pages"], figures["leaked_slots"]) == (0, 0)
    # A turn hits nearly all that the turn before it left.
    assert 0.3 < figures["hit_ratio"] < 1
    for key in JSON_KEYS[4:10]:
        assert figures[key] > 0
    ratio = figures["ttft_p50_ms"] / figures["ttft_p50_no_cache_ms"]
    assert figures["ttft_ratio_p50"] == pytest.approx(ratio)
    assert "time to first token" in (folder / "a.svg").read_text()


def test_a_model_that_answers_otherwise_is_found_out(demo, capsys):
    """The control with other weights: the demo must not call that identical."""
    engine = setting.Setting.engine

    def other_weights(self, *, use_cache):
        if use_cache:
            return engine(self, use_cache=True)
        other = init_model(jax.random.key(99), self.model.config)
        return engine(dataclasses.replace(self, model=other), use_cache=False)

    with tiny() as patch:
        patch.setattr(setting.Setting, "engine", other_weights)
        assert main([*OPTIONS, "--json", "-"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["identical_outputs"] is False
    assert "outputs differ with and without the cache; wanted none" in err
    assert "hit ratio" in err  # the table makes way for the JSON


def test_a_page_that_nobody_has_is_a_leak():
    arguments = cli.parser().parse_args(OPTIONS)
    with tiny():
        engine = setting.make_setting(arguments, 160).engine(use_cache=True)
    assert leaks(engine) == (0, 0)
    cache, _ = jitted.alloc_pages(engine.state.cache, 2, max_new=2)
    engine.state = dataclasses.replace(engine.state, cache=cache)
    assert leaks(engine) == (2, 0)
    full, slots = holdings(engine)
    assert (full.name, full.capacity, full.free, full.leaked) == ("FULL", 24, 22, 2)
    assert (slots.name, slots.free, slots.leaked) == ("RECURRENT", slots.capacity, 0)


def test_problems_are_told_in_a_sentence():
    good = Figures("gqa", 1)
    assert cli.find_problems(good) == []
    bad = Figures("gqa", 1, num_differing=3, leaked_slots=2)
    differing, leaking = cli.find_problems(bad)
    assert differing.startswith("3 outputs differ")
    assert leaking.startswith("0 pages and 2 slots are neither free nor in the tree")


def test_ttft_is_null_where_nothing_hit():
    figures = Figures("gqa", 0, unshared=[(3.0, 4.0), (1.0, 2.0), (9.0, 9.0)])
    written = figures.as_json()
    assert written["ttft_p50_ms"] is written["ttft_ratio_p50"] is None
    assert written["unshared_throughput_ratio"] == 0.75


def test_a_turn_goes_on_with_the_answer():
    turn = Turn(np.arange(4), (np.array([7, 8]), np.array([9])))
    assert (turn.num_requests, turn.longest_prompt) == (3, 4 + 3 + 2 * ANSWER_TOKENS)
    second = turn.after([5, 6])
    assert second is not None
    assert second.prompt.tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    third = second.after([1])
    assert third is not None and third.after([1]) is None


def test_the_builtin_conversations_fit_a_demo():
    turns, again = (conversations(5, random.Random(0)) for _ in range(2))
    for turn, same in zip(turns, again, strict=True):
        assert np.array_equal(turn.prompt, same.prompt)
        assert 500 < turn.prompt.size and turn.longest_prompt < 1600
        assert turn.num_requests >= 4
    # Two assistants: conversations of one share its system prompt.
    beginning = [turn.prompt[:800].tolist() for turn in turns]
    assert beginning[0] == beginning[2] != beginning[1]


def test_a_text_trace_gives_its_prompts_as_bytes(tmp_path):
    path = tmp_path / "gsm8k.jsonl"
    lines = [{"question": f"{n} + 1?", "answer": str(n + 1)} for n in range(8)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    turns = cli.load(cli.parser().parse_args(["--trace", str(path), "--limit", "2"]))
    asked = [bytes(turn.prompt.astype(np.uint8)).decode() for turn in turns]
    assert [text.splitlines()[-2] for text in asked] == [
        "Question: 5 + 1?",
        "Question: 6 + 1?",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "gqa", "--track-interval", "64"], "gqa has no recurrent layers"),
        (["--track-interval", "64", "--page-size", "1"], "page size 1 takes its"),
        (["--track-interval", "24", "--page-size", "16"], "multiple of page_size"),
        (["--capacity-pages", "3"], "num_pages=3; wanted at least"),
        (["--json", "/no/such/folder/a.json"], "there is no such folder"),
        (["--plot", "a.txt"], "wanted one of"),
        (["--trace", "/no/such/trace"], "cannot be read"),
    ],
)
def test_bad_settings_are_refused_in_a_sentence(options, message, capsys):
    assert main(options) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ") and message in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--family", "lstm"], "invalid choice: 'lstm'"),
        (["--batch-slots", "0"], "0 is not a positive integer"),
        (["--steps-per-call", "x"], "'x' is not an integer"),
    ],
)
def test_bad_options_are_refused(options, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(options)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_traces_that_hold_no_text_are_refused(tmp_path, capsys):
    path = tmp_path / "blocks.jsonl"
    line = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}
    path.write_text(json.dumps(line) + "\n")
    assert main(["--trace", str(path)]) == 2
    assert "holds block ids; wanted a text trace" in capsys.readouterr().err
