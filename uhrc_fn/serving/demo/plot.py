"""The plot of a demo; matplotlib is imported only when one is asked for."""

from .figures import Figures

# A palette that stays distinct in grey and for colour-blind readers.
WITH, WITHOUT = "#0072b2", "#d55e00"


def plot_figures(path: str, figures: Figures) -> None:
    """TTFT against the length of the prompt, and tokens/s, with and without."""
    # The object interface leaves pyplot's global state and backend alone.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    latency, speed = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_ttft(latency, figures)
    _draw_speed(speed, figures)
    figure.suptitle(f"{figures.family}, {figures.num_requests} requests")
    figure.savefig(path, dpi=150)


def _draw_ttft(axes, figures: Figures) -> None:
    for requests, colour, mark, label in (
        (figures.alone_no_cache, WITHOUT, "s", "without"),
        (figures.alone, WITH, "o", "with cache"),
    ):
        lengths = [request.prompt.size for request in requests]
        ttft = [1000 * request.ttft_s for request in requests]
        axes.plot(lengths, ttft, mark, color=colour, alpha=0.7, label=label)
    axes.set(xlabel="prompt, tokens", ylabel="time to first token, ms")
    axes.set(title="one request at a time", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_speed(axes, figures: Figures) -> None:
    together = figures.tokens_per_s, figures.tokens_per_s_no_cache
    pairs = zip(together, figures.unshared_tokens_per_s(), strict=True)
    for offset, (colour, label, rates) in enumerate(
        zip((WITH, WITHOUT), ("with cache", "without"), pairs, strict=True)
    ):
        places = [group + 0.38 * offset for group in range(2)]
        axes.bar(places, rates, width=0.36, color=colour, label=label)
    axes.set_xticks([0.19, 1.19], ["conversations", "nothing shared"])
    axes.set(ylabel="tokens/s, prompts and outputs")
    axes.grid(alpha=0.3, axis="y")
    axes.legend()
