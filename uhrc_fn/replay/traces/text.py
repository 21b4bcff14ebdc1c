"""Text traces: each reader yields the prompts, in the order of the requests."""

import itertools
import pathlib
from collections.abc import Iterator

from .reading import Line, TraceError, parse_lines, shorten

GSM8K_SHOTS = 5
MAX_SAMPLES = 10_000


def read_lmcache(path: pathlib.Path) -> Iterator[str]:
    """Sessions of `[timestamp_us, k, suffix, output]`, by timestamp (stable).

    `input = previous_input[:k] + suffix`, in characters.
    """
    requests = []
    for line in parse_lines(path):
        line.get("session", str)
        prompt = ""
        for row in line.get("reqs", list):
            time = line.field(row, 0, float)
            shared = line.field(row, 1, int, 0)
            line.require(
                shared <= len(prompt),
                f"a request shares {shared} characters with the one before, which has "
                f"{len(prompt)}",
            )
            prompt = prompt[:shared] + line.field(row, 2, str)
            requests.append((time, prompt))
    requests.sort(key=lambda request: request[0])
    yield from (prompt for _, prompt in requests)


def read_tau_airline(path: pathlib.Path) -> Iterator[str]:
    """A model call before every assistant message; sessions one after another."""
    lines = parse_lines(path)
    first = next(lines)
    system = f"<system>\n{first.get('system', str)}\n"
    for line in lines:
        prompt = system
        for message in line.get("msgs", list):
            role = line.field(message, "r", str)
            line.require(role in TAU_ROLES, f"unknown role {role!r}, wanted u, a or t")
            if role == "a":
                yield prompt + "<assistant>\n"
            prompt += f"<{TAU_ROLES[role]}>\n{tau_content(line, message)}\n"


TAU_ROLES = {"u": "user", "a": "assistant", "t": "tool"}


def tau_content(line: Line, message: dict) -> str:
    content = message.get("c")
    line.require(content is None or isinstance(content, str), "a message has no text")
    calls = message.get("tc", [])
    for call in calls if isinstance(calls, list) else [None]:
        line.require(
            isinstance(call, list) and all(isinstance(t, str) for t in call),
            f"tool call {shorten(call)} is not a list [name, arguments]",
        )
    return "\n".join([content or "", *(" ".join(call) for call in calls)]).strip("\n")


def read_tot_game24(path: pathlib.Path) -> Iterator[str]:
    """`[puzzle, step, kind, format_args, tail, n_samples]`: a request a sample."""
    lines = parse_lines(path)
    templates = next(lines).get("templates", dict)
    for line in lines:
        kind = line.field(line.value, 2, str)
        line.require(kind in templates, f"unknown template {kind!r}")
        arguments = line.field(line.value, 3, dict)
        tail = line.field(line.value, 4, str)
        samples = line.field(line.value, 5, int, 1)
        line.require(samples <= MAX_SAMPLES, f"{samples} samples of one prompt")
        try:
            prompt = templates[kind].format(**arguments) + tail
        except (KeyError, IndexError, ValueError, AttributeError) as error:
            line.fail(f"template {kind!r} cannot be filled in ({error})")
        yield from itertools.repeat(prompt, samples)


def read_gsm8k(path: pathlib.Path) -> Iterator[str]:
    """The first five problems are the shots; every other one is asked."""
    shots = ""
    count = 0
    for count, line in enumerate(parse_lines(path), 1):
        question = f"Question: {line.get('question', str)}\nAnswer:"
        answer = line.get("answer", str)
        if count <= GSM8K_SHOTS:
            shots += f"{question} {answer}\n\n"
        else:
            yield shots + question
    if count <= GSM8K_SHOTS:
        raise TraceError(
            f"{path}: {count} problems, wanted more than the {GSM8K_SHOTS} that serve "
            "as shots."
        )


def read_mtbench(path: pathlib.Path) -> Iterator[str]:
    """A request for each turn: all turns of the question so far (no answers given)."""
    for line in parse_lines(path):
        prompt = ""
        turns = line.get("turns", list)
        for position in range(len(turns)):
            prompt += f"<user>\n{line.field(turns, position, str)}\n<assistant>\n"
            yield prompt
