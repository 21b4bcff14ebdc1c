"""Table and plot of `dp_routing.py`."""

MOST_IMBALANCE, LEAST_OF_SINGLE = 1.2, 0.9


def print_rows(rows: list[dict], file) -> None:
    columns = ("hit_ratio", "of single", "imbalance", "uncached", "live", "deferred")
    print(
        f"{'trace':24}{'policy':32}" + "".join(f"{c:>11}" for c in columns), file=file
    )
    for row in rows:
        numbers = (
            row["hit_ratio"],
            row["hit_ratio"] / row["single_tree_hit_ratio"],
            row["imbalance"],
            row["imbalance_uncached"],
            row["mean_live"],
        )
        cells = "".join(f"{x:>11.4f}" for x in numbers)
        name = label_of(row)
        print(f"{row['trace']:24}{name:32}{cells}{row['deferred']:>11}", file=file)


def label_of(row: dict) -> str:
    if row["policy"] != "cache_aware":
        return row["policy"]
    return "cache_aware {max_skew},{max_skew_percent},{holder_percent}".format(**row)


def plot_rows(path: str, rows: list[dict]) -> None:
    """Hit ratio and imbalance of every policy, a panel each, traces side by side."""
    from matplotlib.figure import Figure

    traces = list(dict.fromkeys(row["trace"] for row in rows))
    figure = Figure(figsize=(5 * len(traces), 7), layout="constrained")
    axes = figure.subplots(2, len(traces), squeeze=False)
    for column, name in enumerate(traces):
        mine = [row for row in rows if row["trace"] == name]
        places, labels = range(len(mine)), [label_of(row) for row in mine]
        top, bottom = axes[:, column]
        top.bar(places, [row["hit_ratio"] for row in mine], color="#0072b2")
        single = mine[0]["single_tree_hit_ratio"]
        top.axhline(single, color="#555555", linestyle=":", label="one tree")
        aim = LEAST_OF_SINGLE * single
        top.axhline(aim, color="#cc79a7", linestyle="--", label="aim")
        top.set(title=name, ylabel="hit ratio", ylim=(0, 1))
        for shift, key, colour in (
            (-0.2, "imbalance", "#009e73"),
            (0.2, "imbalance_uncached", "#d55e00"),
        ):
            values = [row[key] for row in mine]
            bottom.bar(
                [p + shift for p in places], values, 0.4, color=colour, label=key
            )
        bottom.axhline(MOST_IMBALANCE, color="#555555", linestyle=":", label="aim")
        bottom.set(ylabel="most over mean", ylim=(0.9, None))
        for panel in (top, bottom):
            panel.set_xticks(places, labels, rotation=20, ha="right", fontsize=8)
            panel.legend(fontsize=8)
    figure.savefig(path, dpi=150)
