"""The options of `python -m uhrc_fn.replay` and what each may be."""

import argparse

from .traces import BLOCK_WEIGHTS


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m uhrc_fn.replay",
        description="Replay a recorded workload through the jitted prefix cache.",
    )
    add = p.add_argument
    add("--trace", required=True, metavar="PATH", help="a trace file, or 'builtin'")
    add(
        "--page-size",
        type=positive,
        metavar="N",
        help="key tokens a page (default: 1 for block ids, 512 for expanded ones, "
        "16 for text)",
    )
    size = p.add_mutually_exclusive_group()
    size.add_argument(
        "--capacity-pages",
        type=not_negative,
        default=0,
        metavar="N",
        help="pages of the cache (default 0: enough for everything)",
    )
    size.add_argument(
        "--sweep",
        type=fractions,
        metavar="F,F,...",
        help="replay several capacities, given as fractions of the unique pages",
    )
    add(
        "--components",
        type=components,
        default=("FULL",),
        metavar="FULL,...",
        help="FULL (default), FULL,SWA or FULL,RECURRENT",
    )
    add(
        "--window",
        type=windows,
        metavar="W,...",
        help="sliding window in tokens (SWA); several are replayed in turn, and the "
        "plot has the hit ratio against the window",
    )
    add(
        "--capacity-swa-pages",
        type=not_negative,
        default=0,
        metavar="N",
        help="pages of the SWA pool (default 0: as many as FULL has)",
    )
    add(
        "--checkpoints",
        choices=("ends", "branches"),
        default="ends",
        help="RECURRENT: a snapshot at the last full block of each input (default), or "
        "also where the match says that requests part",
    )
    add(
        "--capacity-slots",
        type=not_negative,
        default=0,
        metavar="N",
        help="slots for snapshots (RECURRENT; default 0: enough for everything)",
    )
    add(
        "--batch",
        type=positive,
        default=512,
        metavar="N",
        help="requests per device call; changes speed only (default 512)",
    )
    add("--json", metavar="PATH", help="write the figures as JSON ('-': stdout)")
    add("--plot", metavar="PATH", help="draw the hit ratio (.png, .svg, .pdf)")
    add(
        "--progress-file",
        metavar="PATH",
        help="keep the progress in this file, and go on from it where it is there",
    )
    add(
        "--save-every",
        type=positive,
        default=10_000,
        metavar="N",
        help="requests between two savings of the progress (default 10000)",
    )
    add("--limit", type=positive, metavar="N", help="only the first N requests")
    add(
        "--measure-from",
        type=share,
        default=0.0,
        metavar="F",
        help="let this fraction of the requests warm the cache; the rest counts",
    )
    add(
        "--expand-tokens",
        action="store_true",
        help="make real pages of token ids from block ids",
    )
    add(
        "--block-weights",
        choices=BLOCK_WEIGHTS,
        default="published",
        help="RAGPulse: equal weights as in its published curves, or each chunk's own "
        "tokens (default published)",
    )
    add(
        "--tokenizer",
        metavar="FILE",
        help="a tokenizers file (tokenizer.json) for text traces (default: bytes)",
    )
    return p


def positive(text: str) -> int:
    if (value := not_negative(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return value


def windows(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def not_negative(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 0")
    return value


def components(text: str) -> tuple[str, ...]:
    allowed = {"FULL", "FULL,SWA", "FULL,RECURRENT"}
    if (text := text.upper().replace(" ", "")) not in allowed:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not one of {', '.join(sorted(allowed))}"
        )
    return tuple(text.split(","))


def share(text: str) -> float:
    return fraction(text, lambda value: 0 <= value < 1, "at least 0 and below 1")


def fractions(text: str) -> list[float]:
    def is_allowed(value):
        return 0 < value <= 1

    wanted = "above 0 and at most 1"
    return [fraction(part, is_allowed, wanted) for part in text.split(",")]


def fraction(text: str, is_allowed, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not is_allowed(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
    return value
