"""Hybrid replays: the ceilings that snapshots leave, with everything kept."""

import json

import numpy as np
import pytest

from uhrc_fn.replay.cli import BAD_INPUT, main
from uhrc_fn.replay.engine import replay
from uhrc_fn.replay.hybrid import Hybrid
from uhrc_fn.replay.traces import load_trace
from uhrc_fn.replay.workload import Workload

# Of all prompt tokens: snapshots at the ends of inputs, and also where requests part.
# Prompts of GSM8K share five examples and end differently: only the branch serves.
CEILINGS = {
    "mooncake_conversation": (0.3497, 0.3586),
    "mooncake_synthetic": (0.5088, 0.5820),
    "ragpulse": (0.0002, 0.3137),
    "gsm8k_test": (0.0000, 0.8783),
}
SWA = ["--components", "FULL,SWA"]
# Text is cut into pages; the others have blocks of their own.
PAGE_SIZES = {"gsm8k_test": 64}


def conversations(count: int = 300, seed: int = 5):
    """Block ids of requests that share beginnings and branch, and their tokens."""
    rng = np.random.default_rng(seed)
    lines = [[int(x)] for x in range(1, 5)]
    fresh, keys, tokens = 100, [], []
    for _ in range(count):
        line = lines[rng.integers(len(lines))]
        if rng.random() < 0.3:
            line = list(line[: rng.integers(1, len(line) + 1)])
            lines.append(line)
        for _ in range(rng.integers(0, 3)):
            if len(line) < 12:
                line.append(fresh)
                fresh += 1
        keys.append(list(line))
        # The last block is partial in every second request.
        tokens.append(len(line) * 10 - int(rng.integers(0, 2)) * 3)
    return keys, tokens


def workload_of(keys, tokens) -> Workload:
    return Workload(
        name="generated",
        page_size=1,
        keys=np.concatenate(keys).astype(np.int32),
        offsets=np.cumsum([0, *map(len, keys)]),
        input_tokens=np.array(tokens),
        page_tokens=10,
    )


def hits_of(keys, tokens, with_branches: bool) -> list[int]:
    """What sets of prefixes say, without any tree."""
    kept, snapshots, hits = set(), set(), []
    for key, count in zip(keys, tokens, strict=True):
        prefixes = [tuple(key[: k + 1]) for k in range(len(key))]
        run = next((k for k, p in enumerate(prefixes) if p not in kept), len(key))
        hit = max(
            (k for k in range(1, run + 1) if prefixes[k - 1] in snapshots), default=0
        )
        hits.append(hit)
        kept.update(prefixes)
        ends = [count // 10] + ([run] if with_branches and run > hit else [])
        snapshots.update(prefixes[end - 1] for end in ends if end > 0)
    return hits


@pytest.mark.parametrize(
    "checkpoints", ["ends", pytest.param("branches", marks=pytest.mark.slow)]
)
def test_snapshots_are_where_sets_of_prefixes_say(checkpoints):
    keys, tokens = conversations()
    hybrid = Hybrid(components=("FULL", "RECURRENT"), checkpoints=checkpoints)
    result = replay(workload_of(keys, tokens), capacity_pages=0, hybrid=hybrid)
    wanted = hits_of(keys, tokens, checkpoints == "branches")
    assert sum(wanted) > 100
    assert result.hit_pages.tolist() == wanted
    assert result.evicted_pages == 0
    # Every page and slot is the tree's, or free.
    free = result.cache.num_free + result.cache.evictable
    assert free.tolist() == list(result.cache.config.capacities)


@pytest.mark.slow
def test_a_wide_window_hits_like_full_attention():
    keys, tokens = conversations()
    workload = workload_of(keys, tokens)
    hybrid = Hybrid(components=("FULL", "SWA"), window=120)
    windowed = replay(workload, capacity_pages=0, hybrid=hybrid)
    full = replay(workload, capacity_pages=0)
    assert windowed.hit_pages.tolist() == full.hit_pages.tolist()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--components", "FULL,SWA"], "positive window"),
        (["--window", "64"], "none without"),
        (["--capacity-slots", "9"], "slots are for RECURRENT"),
        (["--capacity-swa-pages", "9"], "SWA pages are for SWA"),
        ([*SWA, "--window", "64,x"], "'x' is not an integer"),
        ([*SWA, "--window", "64,128", "--sweep", "0.5,1"], "wanted one of the two"),
        (
            [*SWA, "--window", "64", "--capacity-swa-pages", "4"],
            "at least the window and a page, 5 pages",
        ),
    ],
)
def test_options_that_contradict_are_named(options, sentence, capsys):
    try:
        code = main(["--trace", "builtin", "--limit", "20", *options])
    except SystemExit as exit:  # what argparse refuses
        code = exit.code
    assert code == BAD_INPUT
    assert sentence in capsys.readouterr().err


def test_a_window_that_the_pool_cannot_keep_hits_less(capsys, tmp_path):
    """Several windows in turn: a list, a table and a plot.

    Fault: each replay has the first window.
    """
    keys, _ = conversations()
    trace, picture = tmp_path / "trace.jsonl", tmp_path / "windows.svg"
    line = {"timestamp": 0, "output_length": 1}
    lines = [line | {"input_length": 512 * len(ids), "hash_ids": ids} for ids in keys]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["--trace", str(trace), *SWA, "--window", "512,4096"]
    arguments += ["--capacity-swa-pages", "20", "--json", "-", "--plot", str(picture)]
    assert main(arguments) == 0
    captured = capsys.readouterr()
    narrow, wide = json.loads(captured.out)
    assert (narrow["window"], wide["window"]) == (512, 4096)
    assert narrow["ideal_hit_ratio"] >= narrow["hit_ratio"] > wide["hit_ratio"] > 0
    assert f"{wide['hit_ratio']:.4f}" in captured.err
    assert "<svg" in picture.read_text()


@pytest.mark.slow
@pytest.mark.traces
@pytest.mark.parametrize("name", CEILINGS)
def test_the_ceilings_are_those_of_the_table(traces_dir, name):
    """With everything kept, each prompt token hits that a snapshot can serve.

    Fault: a branching length that is a page off, or a snapshot at a partial block.
    """
    workload = load_trace(
        traces_dir / f"{name}.jsonl.gz",
        block_weights="chunk",
        page_size=PAGE_SIZES.get(name),
    )
    got = []
    for checkpoints in ("ends", "branches"):
        hybrid = Hybrid(components=("FULL", "RECURRENT"), checkpoints=checkpoints)
        result = replay(workload, capacity_pages=0, hybrid=hybrid)
        hit_tokens = workload.hit_tokens(result.hit_pages).sum()
        got.append(hit_tokens / workload.input_tokens.sum())
    assert got == pytest.approx(CEILINGS[name], abs=1e-3)
