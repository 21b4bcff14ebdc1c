"""`python -m uhrc_fn.replay`, from arguments to table, JSON and plot."""

import builtins
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from uhrc_fn.replay import (
    BeladyBound,
    ReplayProgress,
    ReplayResult,
    load_trace,
    prefix_nodes,
    report,
)
from uhrc_fn.replay.builtin import conversations
from uhrc_fn.replay.cli import Run, main, pools_of
from uhrc_fn.replay.tokenizing import text_workload

JSON_KEYS = [
    "requests",
    "input_tokens",
    "hit_tokens",
    "hit_ratio",
    "ideal_hit_ratio",
    "evicted_tokens",
    "inserted_tokens",
    "capacity_tokens",
    "wall_s",
    "compile_s",
    "requests_per_s",
]
# Ids name blocks with all before them. With four pages the second [0, 3] hits both
# blocks, and [0, 1, 2] finds only 0 again.
REQUESTS = [
    (1100, [0, 1, 2]),
    (1024, [0, 3]),
    (1024, [0, 3]),
    (1500, [4, 5, 6]),
    (1100, [0, 1, 2]),
]


@pytest.fixture
def trace(tmp_path):
    lines = [
        {"timestamp": t, "input_length": n, "output_length": 1, "hash_ids": ids}
        for t, (n, ids) in enumerate(REQUESTS)
    ]
    path = tmp_path / "tiny.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run_json(capsys, *arguments):
    """Run the command with the JSON on stdout."""
    assert main([*map(str, arguments), "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


def test_figures_of_a_tiny_trace_worked_out_by_hand(trace, capsys):
    figures = run_json(capsys, "--trace", trace)
    assert list(figures) == JSON_KEYS
    total = sum(length for length, _ in REQUESTS)
    hits = 512 + 1024 + 1100  # requests 2, 3 and 5
    assert figures["requests"] == 5
    assert figures["input_tokens"] == total
    assert figures["hit_tokens"] == hits
    assert figures["hit_ratio"] == figures["ideal_hit_ratio"] == hits / total
    assert figures["evicted_tokens"] == 0
    assert figures["inserted_tokens"] == total - hits
    assert figures["capacity_tokens"] == 7 * 512
    assert figures["wall_s"] > 0
    assert figures["requests_per_s"] == pytest.approx(5 / figures["wall_s"])


def test_a_small_cache_evicts_the_oldest_deepest_page(trace, capsys):
    # 0-1-2, then 0-3 in the last free page, hit; 4-5-6 evicts 2, 1 and 3 and leaves 0;
    # the last request finds 0 alone and evicts 6 and 5 for 1 and 2.
    figures = run_json(capsys, "--trace", trace, "--capacity-pages", 4)
    assert figures["hit_tokens"] == 512 + 1024 + 512
    assert figures["capacity_tokens"] == 4 * 512
    missed = sum(length for length, _ in REQUESTS) - figures["hit_tokens"]
    assert figures["inserted_tokens"] == missed
    assert figures["evicted_tokens"] == round(5 * missed / 9)  # 5 of 9 missed pages


def test_measuring_starts_after_the_warm_up(trace, capsys):
    figures = run_json(capsys, "--trace", trace, "--measure-from", 0.4)
    assert figures["requests"] == 3
    assert figures["input_tokens"] == 1024 + 1500 + 1100
    assert figures["hit_tokens"] == 1024 + 1100
    assert figures["inserted_tokens"] == 1500


@pytest.mark.parametrize("batch", [1, 2, 7])
def test_the_batch_changes_speed_only(trace, capsys, batch):
    options = ("--trace", trace, "--capacity-pages", 4, "--measure-from", 0.2)
    usual = run_json(capsys, *options)
    other = run_json(capsys, *options, "--batch", batch)
    for key in JSON_KEYS[:8]:
        assert usual[key] == other[key]


def test_expanded_tokens_count_whole_pages(trace, capsys):
    figures = run_json(
        capsys, "--trace", trace, "--expand-tokens", "--page-size", "256"
    )
    assert figures["hit_tokens"] == 512 + 1024 + 1024
    assert figures["input_tokens"] == sum(length for length, _ in REQUESTS)


def test_limit_keeps_the_first_requests(trace, capsys):
    figures = run_json(capsys, "--trace", trace, "--limit", 2)
    assert (figures["requests"], figures["hit_tokens"]) == (2, 512)


def test_a_sweep_gives_a_list_and_a_plot(trace, capsys, tmp_path):
    target, picture = tmp_path / "out.json", tmp_path / "sweep.png"
    arguments = ["--trace", str(trace), "--sweep", "0.3,0.6,1"]
    arguments += ["--json", str(target), "--plot", str(picture)]
    assert main(arguments) == 0
    figures = json.loads(target.read_text())
    assert [list(f) for f in figures] == [JSON_KEYS] * 3
    assert [f["capacity_tokens"] // 512 for f in figures] == [2, 4, 7]
    assert [f["hit_tokens"] for f in figures][1:] == [2048, 2636]
    assert picture.read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert "Belady" in table and "0.4586" in table  # 2636 / 5748
    workload = load_trace(trace)
    bound = BeladyBound(workload, prefix_nodes(workload))
    for figure, pages in zip(figures, (2, 4, 7), strict=True):
        best = workload.hit_tokens(bound.hit_pages(pages)).sum()
        assert figure["hit_tokens"] <= best


def test_a_sweep_shares_pools_where_they_are_not_too_large():
    """Fault: hybrid sets share them too, and their other pool is too large."""
    runs = [Run(part=0, pages=pages, window=0) for pages in (6, 100, 24, 25, 1)]
    shared = {100: 100, 25: 100, 24: 24, 6: 24, 1: 1}
    assert pools_of(runs, ("FULL",)) == shared
    assert pools_of(runs, ("FULL", "SWA")) == {pages: pages for pages in shared}


def test_the_table_goes_to_stdout_and_a_plot_to_its_file(trace, capsys, tmp_path):
    picture = tmp_path / "run.svg"
    assert main(["--trace", str(trace), "--plot", str(picture)]) == 0
    captured = capsys.readouterr()
    assert "5 of 5" in captured.out and "0.4586" in captured.out
    assert captured.err == ""  # no bar without a terminal
    assert "<svg" in picture.read_text()


def test_builtin_conversations_are_the_same_each_time_and_share_prefixes():
    prompts = list(conversations())
    assert prompts == list(conversations())
    assert len(prompts) > 500
    starts = {prompt[:400] for prompt in prompts}
    assert len(starts) == 4  # as many as there are system prompts
    workload = text_workload("builtin", prompts, page_size=16)
    assert workload.page_tokens == 16 and workload.token_unit == "byte"


def test_builtin_runs_from_the_command_line(capsys):
    figures = run_json(capsys, "--trace", "builtin", "--limit", 40)
    assert figures["requests"] == 40
    assert 0.3 < figures["hit_ratio"] == figures["ideal_hit_ratio"] < 1


def refused(capsys, *arguments):
    """Run a command that must fail; return its message."""
    try:
        code = main(list(map(str, arguments)))
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def test_malformed_line_exits_with_2_and_one_sentence(trace):
    trace.write_text(trace.read_text() + '{"timestamp": 1}\n')
    run = subprocess.run(
        [sys.executable, "-m", "uhrc_fn.replay", "--trace", str(trace)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=pathlib.Path(__file__).parent.parent,
    )
    assert run.returncode == 2
    assert run.stdout == ""
    problem = "field 'input_length' is missing."
    assert run.stderr == f"error: {trace}, line 6: {problem}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--page-size", "0"], "0 is not a positive integer"),
        (["--page-size", "16"], "ids are pages already"),
        (["--capacity-pages", "-1"], "'-1' is not an integer >= 0"),
        (["--capacity-pages", "99999999"], "at most 16777216"),
        (["--measure-from", "1"], "'1' is not a number at least 0 and below 1"),
        (["--sweep", "0.1,2"], "'2' is not a number above 0 and at most 1"),
        (["--sweep", "0.1", "--capacity-pages", "3"], "not allowed with"),
        (["--json", "/no/such/folder/x.json"], "there is no such folder"),
        (["--plot", "picture.doc"], "wanted one of"),
        (["--block-weights", "none"], "invalid choice"),
    ],
)
def test_bad_arguments_are_refused(trace, capsys, arguments, message):
    assert message in refused(capsys, "--trace", trace, *arguments)


def test_a_missing_matplotlib_names_the_extra(trace, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = refused(capsys, "--trace", trace, "--plot", "x.png")
    assert "pip install 'uhrc_fn[replay]'" in message


def test_a_missing_tokenizers_names_the_extra(capsys, monkeypatch):
    usual = builtins.__import__

    def without(name, *arguments, **keywords):
        if name == "tokenizers":
            raise ImportError(name)
        return usual(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    message = refused(capsys, "--trace", "builtin", "--tokenizer", "x.json")
    assert "pip install 'uhrc_fn[replay]'" in message


def test_the_table_is_plain_text_without_rich(trace, capsys, monkeypatch):
    monkeypatch.setattr(report, "rich", None)
    workload = load_trace(trace)
    figures = report.summarize(
        workload,
        ReplayResult(
            hit_pages=np.array([0, 1, 2, 0, 3], np.int32),
            evicted_pages=2,
            inserted_pages=7,
            wall_s=0.5,
            compile_s=0.1,
            cache=None,
        ),
        np.array([0, 1, 2, 0, 3]),
        7,
        0.0,
    )
    report.print_summary(workload, figures, 7, sys.stdout)
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) for line in lines[2:]] == [len(lines[2])] * 12  # one right edge
    assert ["hit", "tokens", "2,636"] in [line.split() for line in lines]
    assert ["requests/s", "10"] in [line.split() for line in lines]


def test_the_running_ratio_counts_measured_requests_only(trace):
    workload = load_trace(trace)
    running = report.RunningRatio(workload, 0.4)
    for done, hits, ratio in (
        (1, [0], 0.0),
        (3, [1, 2], 1.0),
        (5, [0, 3], (1024 + 1100) / (1024 + 1500 + 1100)),
    ):
        progress = ReplayProgress(done=done, hit_pages=np.array(hits, np.int32))
        assert running.update(progress) == ratio
