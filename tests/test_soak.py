"""The long run's verdicts: what counts as growth, and what does not."""

import numpy as np
import pytest
import soak
from soak_series import LIMITS, Sample, verdicts

ROUNDS = 40


def samples(**series):
    """Flat rounds with a little noise, but for the series that are given."""
    noise = np.random.default_rng(0).normal(size=(6, ROUNDS))
    flat = {
        "minutes": np.arange(ROUNDS) + 0.1 * np.abs(noise[0]),
        "resident_bytes": 1e9 + 1e6 * noise[1],
        "device_bytes": np.full(ROUNDS, 5e6),
        "serving_nodes": 70 + noise[2],
        "replay_nodes": np.full(ROUNDS, 4096),
        "tokens_per_s": 1e4 + 2e3 * noise[3],
        "tokens_per_cpu_s": 1e4 + 300 * noise[4],
        "requests_per_s": 9e3 + 1e3 * noise[0],
        "requests_per_cpu_s": 9e3 + 300 * noise[5],
        "hit_ratio": np.full(ROUNDS, 0.5),
        "retractions": np.arange(ROUNDS),
    }
    rows = flat | series
    return [
        Sample(**{name: row[i].item() for name, row in rows.items()})
        for i in range(ROUNDS)
    ]


def bad(rows):
    return [verdict.name for verdict in verdicts(rows) if not verdict.is_flat]


def test_flat_series_pass():
    assert {verdict.name for verdict in verdicts(samples())} == set(LIMITS)
    assert not bad(samples())


@pytest.mark.parametrize(
    ("name", "rise"),
    [
        ("resident_bytes", 1e6),
        ("device_bytes", 8.0),
        ("serving_nodes", 0.2),
        ("replay_nodes", 3.0),
        ("tokens_per_cpu_s", -80.0),
        ("requests_per_cpu_s", -70.0),
    ],
)
def test_a_slope_is_seen(name, rise):
    series = np.array([getattr(sample, name) for sample in samples()], float)
    assert bad(samples(**{name: series + rise * np.arange(ROUNDS)})) == [name]


def test_what_fills_up_at_the_start_is_not_growth():
    filling = np.minimum(np.arange(ROUNDS) * 1e8, 1e9)
    assert not bad(samples(resident_bytes=filling))


def test_a_few_slow_rounds_are_no_slope():
    series = np.full(ROUNDS, 1e4)
    series[-5:] = 1e3
    assert not bad(samples(tokens_per_cpu_s=series))


def test_a_run_of_a_few_rounds_has_no_slope():
    assert not verdicts(samples()[:8])


def test_a_run_of_no_time_is_refused(capsys):
    with pytest.raises(SystemExit):
        soak.parse_arguments(["--minutes", "0"])
    assert "more than 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_run_serves_replays_and_compares(tmp_path, capsys):
    options = ["--minutes", "0.2", "--round-seconds", "3"]
    assert soak.main([*options, "--json", str(tmp_path / "soak.json")]) == 0
    assert (tmp_path / "soak.json").stat().st_size > 0
    assert "every invariant held" in capsys.readouterr().out
