"""Random toy pairs as real Hugging Face folders: a Qwen3.5 trunk and an EAGLE-3 draft.

`write_pair` is what most tests need. Tests of odd files build `trunk_parts` / `draft_parts` (the
published config and the tensors under their published names), edit them, and `save` the folder.
Writing one takes milliseconds.
The weights are lively: norms away from 0 and 1, decays spread over (0, 1), attention not flat.
All sizes differ where a port could confuse them: key and value heads, key and value dims,
head_dim and hidden / heads, trunk and draft heads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_chain.engines.cli import main

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TRUNK_PREFIX = "model.language_model."  # as in the published multimodal checkpoints
END_OF_TEXT, IM_START, IM_END = 256, 257, 258  # ids of the toy tokenizer after its 256 bytes

Config = dict[str, Any]
Tensors = dict[str, Tensor]


def text_config(layers: int = 8, **sizes: Any) -> Config:
    """The `text_config` of a toy trunk; `sizes` replace or add keys, None removes one."""
    config: Config = {
        "model_type": "qwen3_5_text",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": layers,
        "layer_types": [
            "full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)
        ],
        "full_attention_interval": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "initializer_range": 0.02,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "eos_token_id": END_OF_TEXT,
        "dtype": "bfloat16",
        "use_cache": True,
    }
    return {k: v for k, v in {**config, **sizes}.items() if v is not None}


def trunk_config(
    layers: int = 8, *, tied: bool = False, flat: bool = False, **sizes: Any
) -> Config:
    """A trunk's config.json: nested under `text_config` as published, or flat as in fine-tunes."""
    text = text_config(layers, **sizes)
    if tied:  # the 4B says so at both levels, the 9B says false only at the top
        text["tie_word_embeddings"] = True
    top = {"tie_word_embeddings": tied, "transformers_version": "5.24.0"}
    if flat:
        return {"architectures": ["Qwen3_5ForCausalLM"], **text, **top}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "image_token_id": 300,
        "text_config": text,
        "vision_config": {"model_type": "qwen3_5_vision", "depth": 1, "hidden_size": 8},
        **top,
    }


class Random:
    """Seeded tensors of the kinds a checkpoint holds."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = DTYPES[dtype]

    def normal(self, *shape: int, scale: float, shift: float = 0.0) -> Tensor:
        """Gaussian values in the storage dtype."""
        values = torch.randn(*shape, generator=self.generator)
        return (values * scale + shift).to(self.dtype)

    def matrix(self, rows: int, columns: int, gain: float = 1.5) -> Tensor:
        """A linear layer that keeps activations near `gain` times their size."""
        return self.normal(rows, columns, scale=gain * columns**-0.5)

    def uniform(self, *shape: int, low: float, high: float) -> Tensor:
        """Uniform values, always float32."""
        return torch.rand(*shape, generator=self.generator) * (high - low) + low


def attention_layer(random: Random, text: Config) -> Tensors:
    """A gated full-attention mixer: per head the query rows, then the gate rows."""
    hidden, dim = text["hidden_size"], text["head_dim"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    return {
        "self_attn.q_proj.weight": random.matrix(heads * 2 * dim, hidden),
        "self_attn.k_proj.weight": random.matrix(kv * dim, hidden),
        "self_attn.v_proj.weight": random.matrix(kv * dim, hidden),
        "self_attn.o_proj.weight": random.matrix(hidden, heads * dim),
        "self_attn.q_norm.weight": random.normal(dim, scale=0.3),
        "self_attn.k_norm.weight": random.normal(dim, scale=0.3),
    }


def linear_layer(random: Random, text: Config) -> Tensors:
    """A Gated-DeltaNet mixer; A_log and the gated norm are float32 whatever the storage."""
    hidden = text["hidden_size"]
    key_heads, value_heads = text["linear_num_key_heads"], text["linear_num_value_heads"]
    keys = key_heads * text["linear_key_head_dim"]
    values = value_heads * text["linear_value_head_dim"]
    channels = 2 * keys + values
    norm = 1 + 0.3 * torch.randn(text["linear_value_head_dim"], generator=random.generator)
    return {
        "linear_attn.in_proj_qkv.weight": random.matrix(channels, hidden),
        "linear_attn.in_proj_z.weight": random.matrix(values, hidden),
        "linear_attn.in_proj_b.weight": random.matrix(value_heads, hidden),
        "linear_attn.in_proj_a.weight": random.matrix(value_heads, hidden),
        "linear_attn.conv1d.weight": random.normal(
            channels, 1, text["linear_conv_kernel_dim"], scale=0.5
        ),
        "linear_attn.A_log": random.uniform(value_heads, low=0.01, high=4.0).log(),
        "linear_attn.dt_bias": random.normal(value_heads, scale=1.0, shift=-1.0),
        "linear_attn.norm.weight": norm,
        "linear_attn.out_proj.weight": random.matrix(hidden, values),
    }


def mlp(random: Random, hidden: int, inner: int) -> Tensors:
    """The gated MLP of either model."""
    return {
        "mlp.gate_proj.weight": random.matrix(inner, hidden),
        "mlp.up_proj.weight": random.matrix(inner, hidden),
        "mlp.down_proj.weight": random.matrix(hidden, inner),
    }


def trunk_parts(
    *,
    layers: int = 8,
    seed: int = 0,
    dtype: str = "fp32",
    tied: bool = False,
    flat: bool = False,
    prefix: str = TRUNK_PREFIX,
    extras: bool = True,
    **sizes: Any,
) -> tuple[Config, Tensors]:
    """Config and tensors of a trunk under their published names.

    Args:
        layers: Number of layers; every fourth one is full attention.
        seed: Of the weights.
        dtype: Storage of everything but A_log and the gated norm.
        tied: No lm_head; the embedding serves as head.
        flat: Text-only config without `text_config`.
        prefix: In front of `embed_tokens`, `layers` and `norm`.
        extras: Add the `mtp.*` head and a few `visual.*` tensors.
        **sizes: Keys of `text_config` to replace.
    """
    config = trunk_config(layers, tied=tied, flat=flat, **sizes)
    text = config if flat else config["text_config"]
    random, hidden, inner = Random(seed, dtype), text["hidden_size"], text["intermediate_size"]

    def block(kind: str) -> Tensors:
        mixer = attention_layer if kind == "full_attention" else linear_layer
        return {
            "input_layernorm.weight": random.normal(hidden, scale=0.3),
            **mixer(random, text),
            "post_attention_layernorm.weight": random.normal(hidden, scale=0.3),
            **mlp(random, hidden, inner),
        }

    kinds = [("full_attention" if i % 4 == 3 else "linear_attention") for i in range(layers)]
    kinds = text.get("layer_types", kinds)
    tensors = {f"{prefix}embed_tokens.weight": random.matrix(text["vocab_size"], hidden)}
    for i, kind in enumerate(kinds):
        tensors |= {f"{prefix}layers.{i}.{name}": t for name, t in block(kind).items()}
    tensors[f"{prefix}norm.weight"] = random.normal(hidden, scale=0.3)
    if not tied:
        tensors["lm_head.weight"] = random.matrix(text["vocab_size"], hidden)
    if extras:
        tensors |= {f"mtp.layers.0.{n}": t for n, t in block("full_attention").items()}
        tensors |= {
            "mtp.fc.weight": random.matrix(hidden, 2 * hidden),
            "mtp.pre_fc_norm_embedding.weight": random.normal(hidden, scale=0.3),
            "mtp.pre_fc_norm_hidden.weight": random.normal(hidden, scale=0.3),
            "mtp.norm.weight": random.normal(hidden, scale=0.3),
            "model.visual.patch_embed.proj.weight": random.normal(8, 3, 2, 4, 4, scale=0.1),
            "model.visual.blocks.0.norm1.weight": random.normal(8, scale=0.3),
        }
    return config, tensors


def draft_config(trunk: Config, aux: list[int] | None = None, **sizes: Any) -> Config:
    """A draft's config.json: flat, aux ids under `eagle_config` as block outputs."""
    text = trunk.get("text_config", trunk)
    depth = text["num_hidden_layers"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": text["hidden_size"],
        "target_hidden_size": text["hidden_size"],
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": 1e-6,
        "vocab_size": text["vocab_size"],
        "draft_vocab_size": 96,
        "max_position_embeddings": 2048,  # smaller than the trunk's, as in published drafts
        "partial_rotary_factor": 0.25,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000000},
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": aux or [1, depth // 2 - 1, depth - 4],
            "use_aux_hidden_state": True,
        },
        "dtype": "bfloat16",
    }
    return {k: v for k, v in {**config, **sizes}.items() if v is not None}


def draft_parts(
    trunk: Config,
    *,
    seed: int = 1,
    dtype: str = "fp32",
    prefix: str = "",
    layer: str = "midlayer",
    aux: list[int] | None = None,
    **sizes: Any,
) -> tuple[Config, Tensors]:
    """Config and the 15 tensors of a draft for the trunk with this config.

    Args:
        trunk: The trunk's config.json.
        seed: Of the weights.
        dtype: Storage of the weights; d2t is I64 and t2d is BOOL.
        prefix: In front of all but lm_head, d2t and t2d, "model." in some exports.
        layer: "midlayer" or "layers.0".
        aux: Aux layer ids, given as block outputs; by default [1, n/2 - 1, n - 4].
        **sizes: Keys of the draft's config to replace.
    """
    config = draft_config(trunk, aux, **sizes)
    random, hidden, dim = Random(seed, dtype), config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    vocab, small = config["vocab_size"], config["draft_vocab_size"]
    count = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])

    def norm() -> Tensor:  # plain weights: near one, unlike the trunk's
        return random.normal(hidden, scale=0.3, shift=1.0)

    block = {
        "input_layernorm.weight": norm(),
        "hidden_norm.weight": norm(),
        "self_attn.q_proj.weight": random.matrix(heads * dim, 2 * hidden),
        "self_attn.k_proj.weight": random.matrix(kv * dim, 2 * hidden),
        "self_attn.v_proj.weight": random.matrix(kv * dim, 2 * hidden),
        "self_attn.o_proj.weight": random.matrix(hidden, heads * dim),
        "post_attention_layernorm.weight": norm(),
        **mlp(random, hidden, config["intermediate_size"]),
    }
    chosen = torch.randperm(vocab, generator=random.generator)[:small].sort().values
    return config, {
        f"{prefix}fc.weight": random.matrix(hidden, count * config["target_hidden_size"], 0.5),
        **{f"{prefix}{layer}.{name}": t for name, t in block.items()},
        f"{prefix}norm.weight": norm(),
        "lm_head.weight": random.matrix(small, hidden),
        "d2t": chosen - torch.arange(small),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True),
    }


def save(folder: Path, config: Config, tensors: Tensors, shards: int = 1) -> Path:
    """Write config.json and the weights, one file or `shards` files with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)
    size = math.ceil(len(names) / shards)
    weight_map: dict[str, str] = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[i * size : (i + 1) * size]}
        save_file(part, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    total = sum(t.nbytes for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def exported(pair: Iterable[Path], bundle: Path, *flags: str) -> Path:
    """A bundle of checkpoint folders, made by the command."""
    assert main(["export", *map(str, pair), "-o", str(bundle), *flags]) == 0
    return bundle


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: ids 0-255 are bytes, then the three special tokens of Qwen's chat."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def write_pair(
    folder: Path,
    *,
    layers: int = 8,
    seed: int = 0,
    dtype: str = "fp32",
    tied: bool = False,
    flat: bool = False,
    prefix: str = TRUNK_PREFIX,
    shards: int = 1,
    extras: bool = True,
    tokenizer: bool = False,
    draft_prefix: str = "",
    draft_layer: str = "midlayer",
    aux: list[int] | None = None,
    sizes: Config | None = None,
    draft_sizes: Config | None = None,
) -> tuple[Path, Path]:
    """Write `folder`/trunk and `folder`/draft; see `trunk_parts` and `draft_parts` for the options.

    `sizes` replace keys of the trunk's text config, `draft_sizes` keys of the draft's config.
    """
    config, tensors = trunk_parts(
        layers=layers,
        seed=seed,
        dtype=dtype,
        tied=tied,
        flat=flat,
        prefix=prefix,
        extras=extras,
        **(sizes or {}),
    )
    trunk = save(Path(folder) / "trunk", config, tensors, shards)
    draft = save(
        Path(folder) / "draft",
        *draft_parts(
            config,
            seed=seed + 1,
            dtype=dtype,
            prefix=draft_prefix,
            layer=draft_layer,
            aux=aux,
            **(draft_sizes or {}),
        ),
    )
    if tokenizer:
        write_tokenizer(trunk)
    return trunk, draft
