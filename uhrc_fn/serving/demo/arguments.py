"""The options of `python -m uhrc_fn.serving` and what each may be."""

import argparse

from ...replay.arguments import not_negative, positive
from ..models.config import FAMILIES


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = argparse.ArgumentParser(
        prog="python -m uhrc_fn.serving",
        description="Serve conversations with a small hybrid model, with the prefix "
        "cache and without it, and compare outputs and speed.",
    )
    add = p.add_argument
    add("--family", choices=FAMILIES, default="kda-mla", help="default kda-mla")
    add(
        "--page-size",
        type=positive,
        default=64,
        metavar="N",
        help="tokens a page; 1 is the base path of recurrent families (default 64)",
    )
    add(
        "--track-interval",
        type=positive,
        metavar="N",
        help="tokens between snapshots of a recurrent family, whole pages; a prefill "
        "is cut there (default: the chunk, about 64 tokens)",
    )
    add(
        "--capacity-pages",
        type=not_negative,
        default=0,
        metavar="N",
        help="pages of the pool (default 0: 16,384 tokens, or more where one request "
        "needs it)",
    )
    add(
        "--batch-slots",
        type=positive,
        default=4,
        metavar="N",
        help="conversations held, and requests decoded, at once (default 4)",
    )
    add(
        "--steps-per-call",
        type=positive,
        default=1,
        metavar="K",
        help="steps that run before the host looks again (default 1)",
    )
    add(
        "--trace",
        default="builtin",
        metavar="PATH",
        help="a text trace, a request each; or 'builtin' (default): conversations "
        "whose turns hold the model's own answers",
    )
    add(
        "--limit",
        type=positive,
        metavar="N",
        help="only the first N conversations, or requests of a trace (default: 4, 40)",
    )
    add("--seed", type=not_negative, default=0, metavar="N", help="of the weights")
    add("--json", metavar="PATH", help="write the figures as JSON ('-': stdout)")
    add("--plot", metavar="PATH", help="draw TTFT and tokens/s (.png, .svg, .pdf)")
    return p
