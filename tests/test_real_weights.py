"""Published weights: what a GGUF holds, and SmolLM2 served with the cache and without.

What needs the weights skips where they are not; `examples/smollm2_chat.py --download`
fetches them.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import smollm2_chat as example
from serving_harness import FAST, check_idle

from uhrc_fn.serving.models.layers import rotary
from uhrc_fn.serving.weights.gguf_file import GGUFFile
from uhrc_fn.serving.weights.llama import llama_config, load_llama, split_rotary
from uhrc_fn.serving.weights.smollm2 import VARIABLE, find_smollm2
from uhrc_fn.serving.weights.tokenizer import Tokenizer, chat_text


def test_rows_of_queries_and_keys_are_brought_into_our_order():
    """Turning neighbours, as the file has them, gives the products that ours give."""
    heads, dim, inner, theta = 3, 8, 5, 100.0
    random = np.random.default_rng(0)
    weight = random.normal(size=(heads * dim, inner)).astype(np.float32)
    x = random.normal(size=(4, inner)).astype(np.float32)
    at = np.arange(4)

    pairs = (x @ weight.T).reshape(4, heads, dim // 2, 2)
    angle = at[:, None] * theta ** (-2.0 * np.arange(dim // 2) / dim)
    turn = np.exp(1j * angle)[:, None]
    turned = (pairs[..., 0] + 1j * pairs[..., 1]) * turn
    wanted = np.einsum("thd,shd->hts", turned, turned.conj()).real

    ours = (x @ split_rotary(weight, heads).T).reshape(4, heads, dim)
    ours = rotary(jnp.asarray(ours), jnp.asarray(at), theta=theta, rotary_dim=dim)
    got = np.einsum("thd,shd->hts", ours, ours)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


def test_the_weights_are_looked_for_where_the_variable_says(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "none.gguf"))
    with pytest.raises(FileNotFoundError, match=r"none\.gguf.*--download"):
        find_smollm2()
    (tmp_path / "none.gguf").touch()
    assert find_smollm2() == tmp_path / "none.gguf"


# A small file of our own.

HIDDEN, INNER, HEADS, KV_HEADS, VOCABULARY = 64, 96, 4, 2, 7
NEEDS = "install uhrc_fn[weights] to run this"


def write_gguf(path, *, architecture="llama", without=(), tied=True):
    """A complete Llama of one layer, but for the tensors of `without`."""
    gguf = pytest.importorskip("gguf", reason=NEEDS)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|end|>", "h", "i", "hi", "1", "2", "12"])
    writer.add_token_types([3, 1, 1, 1, 1, 1, 1])
    writer.add_token_merges(["h i", "1 2"])
    writer.add_eos_token_id(0)
    shapes = {
        "token_embd": (VOCABULARY, HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_v": (HIDDEN // 2, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    shapes |= {} if tied else {"output": (VOCABULARY, HIDDEN)}
    random = np.random.default_rng(0)
    for name, shape in shapes.items():
        if name not in without:
            values = random.normal(size=shape).astype(np.float32)
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_gives_a_config_and_weights(tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "small.gguf"))
    model = load_llama(file)
    assert model.config == llama_config(file)
    assert model.config.layers == ("gqa",)
    assert model.config.tie_embeddings and model.head is None
    assert (model.config.num_kv_heads, model.config.head_dim) == (KV_HEADS, 16)
    block = model.blocks[0]
    np.testing.assert_array_equal(
        block.mixer.value, file.tensor("blk.0.attn_v.weight").T
    )
    key = split_rotary(file.tensor("blk.0.attn_k.weight"), KV_HEADS).T
    np.testing.assert_array_equal(block.mixer.key, key)
    assert block.mlp.gate.shape == (HIDDEN, INNER)


def test_a_head_of_its_own_is_read(tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "small.gguf", tied=False))
    head = load_llama(file, dtype="bfloat16").head
    assert head.shape == (HIDDEN, VOCABULARY) and head.dtype == jnp.bfloat16


def test_a_tokenizer_is_read(tmp_path):
    pytest.importorskip("tokenizers", reason=NEEDS)
    tokenizer = Tokenizer(GGUFFile(write_gguf(tmp_path / "small.gguf")))
    # Each digit is a token, whatever the merges say; markers are one token.
    assert tokenizer.encode("hi12<|end|>").tolist() == [3, 4, 5, 0]
    assert tokenizer.decode([3, 4, 5, 0]) == "hi12"
    assert tokenizer.end == 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gemma"}, "wanted 'llama'"),
        ({"without": ("blk.0.ffn_up",)}, r"blk\.0\.ffn_up"),
    ],
)
def test_an_unfit_file_is_refused_with_a_sentence(changes, words, tmp_path):
    file = GGUFFile(write_gguf(tmp_path / "small.gguf", **changes))
    with pytest.raises(ValueError, match=words):
        load_llama(file)


def test_what_is_no_gguf_is_refused_with_a_sentence(tmp_path):
    pytest.importorskip("gguf", reason=NEEDS)
    (tmp_path / "text.gguf").write_text("no weights here, only text")
    with pytest.raises(ValueError, match="not a GGUF"):
        GGUFFile(tmp_path / "text.gguf")
    with pytest.raises(FileNotFoundError, match="no such file"):
        GGUFFile(tmp_path / "none.gguf")


# SmolLM2-135M-Instruct.


@pytest.fixture(scope="module")
def smollm2():
    """The tokenizer and the model."""
    for package in ("gguf", "tokenizers"):
        pytest.importorskip(package, reason=NEEDS)
    try:
        file = GGUFFile(find_smollm2())
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return Tokenizer(file), load_llama(file)


def test_text_comes_back_from_the_tokenizer(smollm2):
    tokenizer, _ = smollm2
    text = "  It's 1234 naïve façades —\n\n\tdéjà vu, 你好 🙂 "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    start = tokenizer.encode(chat_text([("user", "Hi")]))
    assert start[0] == tokenizer.encode("<|im_start|>")[0]
    assert tokenizer.end in start


@pytest.mark.slow
def test_real_chats_and_few_shot_prompts_hit_and_give_equal_tokens(smollm2):
    """Answers are sensible, equal to those without a cache, and come sooner."""
    tokenizer, model = smollm2
    runs = []
    for use_cache in (True, False):
        engine = example.make_engine(model, use_cache=use_cache, compiler_options=FAST)
        example.warm_up(engine)
        chat = example.chat(engine, tokenizer, 16)
        runs.append((chat, example.few_shot(engine, tokenizer)))
        if use_cache:
            check_idle(engine)
    for cached, control in zip(*runs, strict=True):
        assert cached.outputs == control.outputs
        assert cached.hits[0] == 0 and not any(control.hits)
        # All but the new turn, or the question, and less than two pages.
        assert all(hit > 0.75 * size for hit, size in _hit(cached))
        # A hit computes one chunk or two of eight: half leaves room for a busy machine.
        assert example.ratio(cached, control) < 0.5
    (chat, few_shot), _ = runs
    words = ("Paris", "Rome", "Jupiter", "four")
    for word, output in zip(words, chat.outputs, strict=True):
        assert word in tokenizer.decode(output)
    answers = [tokenizer.decode(output).split()[0] for output in few_shot.outputs]
    assert answers == ["negative", "positive", "negative", "positive"]


def _hit(served):
    return list(zip(served.hits, served.prompts, strict=True))[1:]
