"""Trace formats: what each reader makes of its lines, and what it refuses."""

import gzip
import itertools
import json

import numpy as np
import pytest

from uhrc_fn.replay import (
    TraceError,
    ideal_hit_pages,
    load_trace,
    prefix_nodes,
)
from uhrc_fn.replay.tokenizing import byte_tokens, load_tokenizer, text_workload
from uhrc_fn.replay.traces.expand import mix31


@pytest.fixture
def write(tmp_path):
    """Write JSON lines (or raw text lines) to a file and return its path."""

    def write(name, *lines):
        path = tmp_path / name
        texts = [x if isinstance(x, str) else json.dumps(x) for x in lines]
        data = "".join(text + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def requests(workload, column="keys"):
    """The keys (or weights) of each request as lists."""
    flat = getattr(workload, column).tolist()
    return [flat[a:b] for a, b in itertools.pairwise(workload.offsets.tolist())]


def as_text(workload):
    return [bytes(keys).decode() for keys in requests(workload)]


def mooncake(length, ids, timestamp: float = 0):
    return {
        "timestamp": timestamp,
        "input_length": length,
        "output_length": 1,
        "hash_ids": ids,
    }


def ragpulse(timestamp, length, ids):
    return {"timestamp": timestamp, "input_length": length, "seg": [1], "hash_ids": ids}


def session(*rows):
    return {"id": "s", "tool": 1, "sys": 1, "models": [], "reqs": list(rows)}


@pytest.mark.parametrize("name", ["m.jsonl", "m.jsonl.gz"])
def test_mooncake_weighs_a_partial_last_block_by_its_tokens(write, name):
    path = write(name, mooncake(1030, [0, 1, 2]), mooncake(1024, [0, 3]), "")
    workload = load_trace(path)
    assert workload.name == "m"
    assert (workload.page_size, workload.page_tokens) == (1, 512)
    assert requests(workload) == [[0, 1, 2], [0, 3]]
    assert requests(workload, "weights") == [[512, 512, 6], [512, 512]]
    assert workload.input_tokens.tolist() == [1030, 1024]
    assert workload.weights is not None
    assert workload.keys.dtype == workload.weights.dtype == np.int32
    assert workload.hit_tokens(np.array([3, 1])).tolist() == [1030, 512]
    assert workload.hit_tokens(np.array([1]), first=1).tolist() == [512]


def test_ragpulse_sorts_by_time_and_rounds_half_up(write):
    rows = ragpulse(9, 2000, [7, 7]), ragpulse(3, 5, [1, 0]), ragpulse(9, 30, [1])
    workload = load_trace(write("r.jsonl", *rows))
    assert requests(workload) == [[1, 0], [7, 7], [1]]  # ties keep the file's order
    assert requests(workload, "weights") == [[3, 3], [512, 512], [30]]
    assert workload.input_tokens.tolist() == [6, 1024, 30]


def test_ragpulse_chunk_weights_come_from_the_file_beside_the_trace(write):
    path = write("r.jsonl.gz", ragpulse(1, 100, [2, 0]))
    with pytest.raises(TraceError, match=r"need the token counts in r_block_tokens"):
        load_trace(path, block_weights="chunk")
    write("r_block_tokens.json", [10, 20, 30])
    assert requests(load_trace(path, block_weights="chunk"), "weights") == [[30, 10]]
    write("r_block_tokens.json", [10, 20])
    with pytest.raises(TraceError, match=r"line 1: block id \[2\] has no entry"):
        load_trace(path, block_weights="chunk")


def test_a_ragpulse_id_under_another_parent_is_another_node(write):
    rows = ragpulse(1, 30, [5, 6, 6]), ragpulse(2, 20, [6, 6]), ragpulse(3, 20, [5, 6])
    workload = load_trace(write("r.jsonl", *rows))
    tree = prefix_nodes(workload)
    assert tree.num_nodes == 5
    assert ideal_hit_pages(workload, tree).tolist() == [0, 0, 2]


def test_claude_code_ids_are_decoded_and_made_global(write):
    path = write(
        "c.jsonl",
        session(
            [0.0, "m", 200, 1, 0, [1, 3]],
            [5.0, "m.1", 330, 1, 2, [7, 1, 9, 2]],
            [9, "m", 130, 1, 1, [4, 1]],
        ),
        session([0.0, "m", 128, 1, 0, [1, 2]], [6.5, "m", 70, 1, 1, []]),
    )
    workload = load_trace(path)
    # Ids 0..10 belong to the first session, so the second one starts at 11.
    assert requests(workload) == [[1, 2, 3], [12, 13], [1, 2, 7, 9, 10], [12], [1, 4]]
    assert workload.input_tokens.tolist() == [200, 128, 330, 70, 130]
    assert workload.weights is None and workload.page_tokens == 64
    for limit in range(1, 5):
        first = load_trace(path, limit=limit)
        assert requests(first) == requests(workload)[:limit]


def test_magagent_ranges_and_empty_inputs(write):
    path = write("g.jsonl", [0, 1, 130, 9, [1, 2, 8, 1]], [5, 1, 0, 9, []])
    workload = load_trace(path)
    assert requests(workload) == [[1, 2, 8], []]
    assert requests(workload, "weights") == [[64, 64, 2], []]
    assert workload.token_unit == "byte"


def test_lmcache_prompts_share_characters_with_the_one_before(write):
    path = write(
        "l.jsonl",
        {"session": "a", "reqs": [[5, 0, "h\u00e9llo", ""], [9, 2, "y", "out"]]},
        {"session": "b", "reqs": [[7, 0, "other", ""]]},
    )
    workload = load_trace(path, page_size=1)
    assert as_text(workload) == ["h\u00e9llo", "other", "h\u00e9y"]
    assert workload.input_tokens.tolist() == [6, 5, 4]


def test_tau_airline_calls_the_model_before_each_assistant_message(write):
    calls = {"r": "a", "c": None, "tc": [["find", '{"id": 1}']]}
    messages = [{"r": "u", "c": "hi"}, calls, {"r": "t", "c": "found"}]
    messages += [{"r": "a", "c": "done"}]
    trial = {"task": 0, "trial": 0, "reward": 1.0, "msgs": messages}
    prompts = as_text(
        load_trace(write("t.jsonl", {"system": "be"}, trial), page_size=1)
    )
    assert prompts[0] == "<system>\nbe\n<user>\nhi\n<assistant>\n"
    later = 'find {"id": 1}\n<tool>\nfound\n<assistant>\n'
    assert prompts[1:] == [prompts[0] + later]


def test_tot_game24_fills_templates_and_repeats_samples(write):
    path = write(
        "t.jsonl",
        {"templates": {"value": "judge {input}!"}},
        [900, 0, "value", {"input": "4 6"}, " now", 2],
    )
    assert as_text(load_trace(path, page_size=1)) == ["judge 4 6! now"] * 2
    assert load_trace(path, limit=1).num_requests == 1


def test_gsm8k_asks_all_but_the_first_five_with_those_as_shots(write):
    lines = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(7)]
    prompts = as_text(load_trace(write("g.jsonl", *lines), page_size=1))
    shots = "".join(f"Question: q{i}\nAnswer: a{i}\n\n" for i in range(5))
    assert prompts == [f"{shots}Question: q{i}\nAnswer:" for i in (5, 6)]


def test_mtbench_has_a_request_for_each_turn(write):
    path = write("m.jsonl", {"question_id": 1, "category": "x", "turns": ["a", "b"]})
    first, second = as_text(load_trace(path, page_size=1))
    assert first == "<user>\na\n<assistant>\n"
    assert second == first + "<user>\nb\n<assistant>\n"


def test_text_pages_are_whole_and_the_tail_counts_as_input(write):
    path = write("l.jsonl", {"session": "a", "reqs": [[1, 0, "x" * 40, ""]]})
    workload = load_trace(path)
    assert workload.page_size == 16
    assert workload.offsets.tolist() == [0, 32]
    assert workload.input_tokens.tolist() == [40]


def test_a_tokenizer_replaces_bytes():
    workload = text_workload(
        "t", ["a b c"], page_size=2, tokenizer=lambda t: np.arange(len(t.split()))
    )
    assert (workload.token_unit, workload.input_tokens.tolist()) == ("token", [3])
    assert workload.keys.tolist() == [0, 1]


def test_a_tokenizer_file_is_read_or_refused_by_name(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({"the": 3, "tree": 5}, unk_token="the")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json")("the tree").tolist() == [3, 5]
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(ValueError, match=r"bad\.json: not a tokenizer file"):
        load_tokenizer(tmp_path / "bad.json")


def test_expanded_blocks_share_tokens_exactly_where_ids_are_equal(write):
    path = write("m.jsonl", mooncake(1100, [0, 1, 2]), mooncake(1024, [0, 3]))
    workload = load_trace(path, expand_tokens=True, page_size=128)
    first, second = (np.array(keys) for keys in requests(workload))
    assert (len(first), len(second)) == (1024, 1024)  # 76 tokens fill no page
    assert (first[:512] == second[:512]).all()
    assert len(np.unique(np.concatenate([first, second[512:]]))) == 3 * 512
    assert workload.keys.min() >= 0
    assert ideal_hit_pages(workload, prefix_nodes(workload)).tolist() == [0, 4]
    assert workload.hit_tokens(np.array([0, 4])).tolist() == [0, 512]
    assert load_trace(path, expand_tokens=True).page_size == 512


def test_the_token_mix_is_one_to_one_and_stays_below_2_31():
    # Ends of the range and a sample between; a permutation never merges two.
    x = np.concatenate([np.arange(1 << 16), 2**31 - 1 - np.arange(1 << 16)])
    x = np.unique(np.concatenate([x, np.arange(0, 2**31, 65_537)]))
    y = mix31(x)
    assert len(np.unique(y)) == len(x)
    assert y.min() >= 0


def test_settings_that_do_not_fit_the_trace_are_refused(write):
    blocks = write("m.jsonl", mooncake(512, [0]))
    text = write("l.jsonl", {"session": "a", "reqs": [[1, 0, "x", ""]]})
    chunks = write("r.jsonl", ragpulse(1, 10, [1]))

    def refused(message):
        return pytest.raises(ValueError, match=message)

    with refused("ids are pages already"):
        load_trace(blocks, page_size=16)
    with refused("does not divide"):
        load_trace(blocks, page_size=100, expand_tokens=True)
    with refused("is for text traces"):
        load_trace(blocks, tokenizer=byte_tokens)
    with refused("is for block traces"):
        load_trace(text, expand_tokens=True)
    with refused("needs --block-weights chunk"):
        load_trace(chunks, expand_tokens=True)


GOOD = mooncake(512, [0])
CLAUDE = session([0.0, "m", 64, 1, 0, [1, 1]])
MALFORMED = [
    ([GOOD, '{"timestamp": 0,'], "line 2: not JSON"),
    ([GOOD, "", {"timestamp": 0}], "line 3: field 'input_length' is missing"),
    ([GOOD, [1]], "line 2: found [1], wanted an object"),
    ([GOOD, mooncake("x", [0])], "line 2: field 'input_length' is 'x', wanted an int"),
    ([GOOD, mooncake(True, [0])], "line 2: field 'input_length' is True"),
    ([GOOD, mooncake(-1, [])], "line 2: field 'input_length' is -1, wanted at least 0"),
    ([GOOD, mooncake(2**31, [])], "line 2: field 'input_length' is 2147483648"),
    ([GOOD, mooncake(600, [0])], "line 2: 1 block ids for an input of 600, wanted 2"),
    ([GOOD, mooncake(512, [2**31])], "line 2: block id 2147483648 is outside"),
    ([GOOD, mooncake(512, [-1])], "line 2: block id -1 is outside"),
    ([GOOD, mooncake(512, [0.5])], "line 2: a block id is not an integer"),
    ([GOOD, mooncake(512, 7)], "line 2: field 'hash_ids' is 7, wanted a list"),
    ([GOOD, mooncake(512, [0], float("nan"))], "line 2: field 'timestamp' is nan"),
    ([{"a": 1}], "line 1: format not recognised from {'a': 1}; known formats: moon"),
    ([[1, 2, 30]], "hold token counts only"),
    (["TIMESTAMP,ContextTokens,GeneratedTokens"], "without prefix information"),
    ([], "the file is empty"),
    ([CLAUDE, session([0, "m", 64, 1, 1, []])], "line 2: a request shares 1 blocks"),
    ([CLAUDE, session([0, "m", 99, 1, 0, [1, 2]])], "line 2: a request has 2 block"),
    ([CLAUDE, session([0, "m", 99, 1, 0, [1]])], "line 2: id ranges are not pairs"),
    ([CLAUDE, session([0, "m", 64])], "line 2: entry 4 is missing"),
    (
        [session([9, "m", 64, 1, 0, [1, 1]], [3, "m", 64, 1, 1, []])],
        "line 1: the requests of a session are not in order",
    ),
    ([[0, 1, 64, 1, [2**31 - 1, 1, 1, 0]], [0, 1, 64, 1, [2**31 - 1, 2]]], "line 2: b"),
    ([{"session": "a", "reqs": [[1, 3, "x", ""]]}], "line 1: a request shares 3 char"),
    ([{"templates": {}}, [1, 0, "value", {}, "", 1]], "line 2: unknown template"),
    (
        [{"templates": {"v": "{input}"}}, [1, 0, "v", {}, "", 1]],
        "line 2: template 'v' cannot be filled",
    ),
    ([{"system": "s"}, {"msgs": [{"r": "z", "c": ""}]}], "line 2: unknown role 'z'"),
    ([{"question": "q", "answer": "a"}], "1 problems, wanted more than the 5"),
    ([{"question_id": 1, "turns": [5]}], "line 1: entry 0 is 5, wanted a string"),
]


@pytest.mark.parametrize(("lines", "message"), MALFORMED)
def test_a_malformed_line_is_one_sentence_with_file_and_line(write, lines, message):
    path = write("trace.jsonl", *lines)
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damaged_files_are_named(write, tmp_path):
    path = write("m.jsonl.gz", *[mooncake(512, [i]) for i in range(2000)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(TraceError, match="gzip stream is damaged"):
        load_trace(path)
    binary = tmp_path / "b.jsonl"
    binary.write_bytes(b'{"a": 1}\n\xff\xfe\n')
    with pytest.raises(TraceError, match="format not recognised"):
        load_trace(binary)
    binary.write_bytes(json.dumps(GOOD).encode() + b"\n\xff\xfe\n")
    with pytest.raises(TraceError, match=r"line 2: not UTF-8"):
        load_trace(binary)
    with pytest.raises(TraceError, match=r"nope: cannot be read \(No such file"):
        load_trace(tmp_path / "nope")
    with pytest.raises(TraceError, match="the trace holds no requests"):
        load_trace(write("e.jsonl", session()))


@pytest.mark.traces
def test_other_recorded_traces_load(traces_dir):
    for name, num_requests in (
        ("tau_airline_gpt4o_text", 2_454),
        ("mtbench_questions", 160),
        ("lmcache_magagent_blk64B", 746),
    ):
        assert load_trace(traces_dir / f"{name}.jsonl.gz").num_requests == num_requests
    for name in ("azure_llm_2023_conv.csv.gz", "sharegpt_v3_lengths.jsonl.gz"):
        with pytest.raises(TraceError, match="without prefix information"):
            load_trace(traces_dir / name)


@pytest.mark.traces
def test_claude_code_decodes_only_what_the_limit_keeps(traces_dir):
    path = traces_dir / "claude_code_kvct.jsonl.gz"
    workload = load_trace(path, limit=2_000)
    lengths = np.diff(workload.offsets)
    assert (lengths == workload.input_tokens // 64).all()
    assert len(workload.keys) < 10_000_000
    with gzip.open(path) as file:
        sessions = [json.loads(line) for line in file]
    # Every session starts at 0, so their first requests come first, in file order.
    assert workload.input_tokens[:710].tolist() == [s["reqs"][0][2] for s in sessions]
