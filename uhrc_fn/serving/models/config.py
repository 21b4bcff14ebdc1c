"""`ModelConfig`: which layers a model has, and their dimensions."""

import dataclasses

import jax.numpy as jnp

from ...pools.layout import require, require_counts

ATTENTION_KINDS = ("gqa", "swa", "mla")
RECURRENT_KINDS = ("kda", "gdn", "gla")
KINDS = ATTENTION_KINDS + RECURRENT_KINDS

_REMEDY = "Take it from the model's config.json."


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Layers of a model, from the first to the last, and their dimensions.

    Args:
      vocab_size: token ids.
      hidden_size: width of the residual stream.
      intermediate_size: width of the MLP.
      layers: kind of each layer. Attention: "gqa", "swa" (sliding window), "mla".
        Recurrent: "kda", "gdn", "gla", of which a model has one family at most.
      num_heads: query heads of the attention layers.
      num_kv_heads: key and value heads of GQA and SWA layers.
      head_dim: width of such a head.
      rope_theta: base of the rotary frequencies.
      rotary_dim: leading dimensions of a GQA head that turn; `None` for all.
      qk_norm: whether queries and keys of a GQA head are normalized (Qwen3).
      sliding_window: tokens that a SWA layer attends to, the query's own included.
      kv_lora_rank: width of the latent that MLA caches.
      nope_head_dim: width of the part of an MLA query that meets the latent.
      rope_head_dim: width of the part of an MLA query that meets the shared key.
      v_head_dim: width of an MLA value head.
      mla_rope: whether those parts turn; Kimi Linear keeps them but turns nothing.
      recurrent_v_heads: value heads of a recurrent layer.
      recurrent_v_dim: width of one.
      recurrent_k_heads: its query and key heads; `None` for as many.
      recurrent_k_dim: width of one; `None` for that of a value head.
      conv_kernel_size: taps of its short convolution; 1 for none.
      norm_eps: of the RMS norms.
      tie_embeddings: whether the head is the embedding.
      dtype: of weights and activations.
      tensor_axis: mesh axis whose devices share the model, each with a part of the
        heads and of the MLP: see `shard`. `None` where each has all of it.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: tuple[str, ...]
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    rope_theta: float = 10000.0
    rotary_dim: int | None = None
    qk_norm: bool = False
    sliding_window: int = 0
    kv_lora_rank: int = 0
    nope_head_dim: int = 0
    rope_head_dim: int = 0
    v_head_dim: int = 0
    mla_rope: bool = True
    recurrent_v_heads: int = 0
    recurrent_v_dim: int = 0
    recurrent_k_heads: int | None = None
    recurrent_k_dim: int | None = None
    conv_kernel_size: int = 1
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    dtype: str = "float32"
    tensor_axis: str | None = None

    def __post_init__(self):
        require_counts(self, "vocab_size", "hidden_size", "intermediate_size")
        self._check_layers()
        if self.has("gqa", "swa"):
            self._check_gqa()
        if self.has("swa"):
            require_counts(self, "sliding_window")
        if self.has("mla"):
            names = ("kv_lora_rank", "nope_head_dim", "rope_head_dim", "v_head_dim")
            require_counts(self, "num_heads", *names)
            self._check_even("rope_head_dim", self.rope_head_dim)
        if self.recurrent_layers:
            # The pool's own config checks how the heads fit together.
            names = ("recurrent_v_heads", "recurrent_v_dim", "conv_kernel_size")
            require_counts(self, *names)
        require(self.rope_theta > 0, f"rope_theta={self.rope_theta}", "> 0", _REMEDY)
        require(self.norm_eps > 0, f"norm_eps={self.norm_eps}", "> 0", _REMEDY)
        require(
            jnp.issubdtype(jnp.dtype(self.dtype), jnp.floating),
            f"dtype={self.dtype!r}",
            "a floating type",
            "Use float32 or bfloat16.",
        )

    def has(self, *kinds: str) -> bool:
        """Whether a layer is of one of these kinds."""
        return any(kind in kinds for kind in self.layers)

    def layers_of(self, *kinds: str) -> tuple[int, ...]:
        """Numbers of the layers of these kinds."""
        return tuple(i for i, kind in enumerate(self.layers) if kind in kinds)

    def shard(self, ways: int, axis: str) -> "ModelConfig":
        """The part of one of `ways` devices along a mesh axis: its heads, its MLP.

        Raises:
          ValueError: the devices do not divide the heads, or the MLP's width.
        """
        names = ["intermediate_size"]
        names += ["num_heads"] if self.has("gqa", "swa", "mla") else []
        names += ["num_kv_heads"] if self.has("gqa", "swa") else []
        names += ["recurrent_v_heads"] if self.recurrent_layers else []
        names += ["recurrent_k_heads"] if self.recurrent_k_heads else []
        whole = {name: getattr(self, name) for name in names}
        for name, size in whole.items():
            require(
                size % ways == 0,
                f"{name}={size} over {ways} devices of {axis!r}",
                "a number that the devices divide",
                "Choose fewer devices a rank; heads are never split.",
            )
        part = {name: size // ways for name, size in whole.items()}
        return dataclasses.replace(self, tensor_axis=axis, **part)

    @property
    def num_layers(self) -> int:
        """Layers of all kinds."""
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Layers with a KV cache."""
        return self.layers_of(*ATTENTION_KINDS)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Layers with a recurrent state."""
        return self.layers_of(*RECURRENT_KINDS)

    @property
    def recurrent_family(self) -> str | None:
        """Kind of the recurrent layers; `None` without one."""
        return next((kind for kind in self.layers if kind in RECURRENT_KINDS), None)

    @property
    def components(self) -> tuple[str, ...]:
        """Components of the cache that serves this model."""
        swa = ("SWA",) if self.has("swa") else ()
        recurrent = ("RECURRENT",) if self.recurrent_layers else ()
        return ("FULL", *swa, *recurrent)

    def _check_layers(self) -> None:
        came = f"layers={self.layers!r}"
        require(
            isinstance(self.layers, tuple)
            and len(self.layers) > 0
            and set(self.layers) <= set(KINDS),
            came,
            f"a tuple of {KINDS}, at least one",
            "Name the kind of each layer.",
        )
        require(
            len(set(self.layers) & set(RECURRENT_KINDS)) <= 1,
            came,
            f"one family of {RECURRENT_KINDS} at most",
            "Their states differ in shape, and a model has one pool of them.",
        )
        require(
            not (self.has("mla") and self.has("gqa", "swa")),
            came,
            "either mla, or gqa and swa",
            "A model has one layout of KV.",
        )
        require(
            not (self.has("swa") and self.recurrent_layers),
            came,
            "sliding windows or recurrent layers, not both",
            "The cache has no such set of components.",
        )
        require(
            self.has("gqa") or not self.has("swa"),
            came,
            "a gqa layer beside those of a sliding window",
            "Give the model one layer that attends to all tokens.",
        )

    def _check_gqa(self) -> None:
        require_counts(self, "num_heads", "num_kv_heads", "head_dim")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} with num_kv_heads={self.num_kv_heads}",
            "a multiple of the kv heads",
            "Each kv head serves as many query heads as any other.",
        )
        if self.rotary_dim is None:
            object.__setattr__(self, "rotary_dim", self.head_dim)
        require_counts(self, "rotary_dim")
        self._check_even("rotary_dim", self.rotary_dim)
        require(
            self.rotary_dim <= self.head_dim,  # type: ignore[operator]
            f"rotary_dim={self.rotary_dim}",
            f"at most head_dim={self.head_dim}",
            _REMEDY,
        )

    def _check_even(self, name: str, value) -> None:
        require(
            value % 2 == 0,
            f"{name}={value}",
            "an even number",
            "Rotary dimensions turn in pairs.",
        )


_PATTERNS = {
    "kda-mla": ("kda", "kda", "kda", "mla"),
    "gdn-gqa": ("gdn", "gdn", "gdn", "gqa"),
    "gla-gqa": ("gla", "gla", "gla", "gqa"),
    "swa-gqa": ("swa", "swa", "swa", "gqa"),
    "gqa": ("gqa",) * 4,
    "mla": ("mla",) * 4,
}
FAMILIES = tuple(_PATTERNS)


def small_config(family: str, *, num_layers: int = 4, **changes) -> ModelConfig:
    """A model small enough for a test or a demo on CPU.

    Args:
      family: one of `FAMILIES`. Hybrids repeat three recurrent or sliding layers and
        one that attends to all tokens, as the published models do.
      num_layers: the pattern is repeated up to this many; the last of a hybrid's
        layers should be a multiple of 4.
      changes: fields of `ModelConfig` to set otherwise.
    """
    require(
        family in _PATTERNS,
        f"family={family!r}",
        f"one of {FAMILIES}",
        "Or build a ModelConfig with a layers tuple of your own.",
    )
    require(num_layers >= 1, f"num_layers={num_layers}", "at least 1", "Raise it.")
    pattern = _PATTERNS[family]
    kinds = (pattern * (-(-num_layers // len(pattern))))[:num_layers]
    settings: dict = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "layers": kinds,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    settings |= {"sliding_window": 32} if "swa" in kinds else {}
    if "mla" in kinds:
        settings |= {"kv_lora_rank": 32, "rope_head_dim": 8}
        settings |= {"nope_head_dim": 16, "v_head_dim": 16}
        settings["mla_rope"] = "kda" not in kinds
    if set(kinds) & set(RECURRENT_KINDS):
        settings |= {"recurrent_v_heads": 4, "recurrent_v_dim": 16}
        settings["conv_kernel_size"] = 1 if "gla" in kinds else 4
    if "gdn" in kinds:
        settings |= {"recurrent_k_heads": 2, "recurrent_k_dim": 8}
    return ModelConfig(**(settings | changes))
