"""The two checkpoint folders: configs in the published shape, tensor names, reading and writing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from corpus import EOS
from heads import EagleConfig, EagleHead, MtpHead
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from trunk_model import Trunk, TrunkConfig

TRUNK_PREFIX = "model.language_model."
MTP_PREFIX = "mtp."
ROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
EPS = 1e-6
MAX_POSITION = 4096


@dataclass(frozen=True)
class Size:
    """The numbers in which one trunk differs from another."""

    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    linear_dim: int
    mrope_section: tuple[int, int, int]


SIZES = {
    "demo": Size(192, 512, 8, 4, 2, 64, 2, 4, 128, (3, 3, 2)),
    "tiny": Size(64, 96, 4, 4, 2, 32, 1, 2, 32, (2, 1, 1)),
}


def trunk_json(size: Size, vocab: int, eos: int) -> dict[str, Any]:
    """Config of the trunk, keys as in the published Qwen3.5 folders (text part)."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(size.layers)]
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "attn_output_gate": True,
            "dtype": "bfloat16",
            "eos_token_id": eos,
            "full_attention_interval": 4,
            "head_dim": size.head_dim,
            "hidden_act": "silu",
            "hidden_size": size.hidden,
            "initializer_range": 0.02,
            "intermediate_size": size.ffn,
            "layer_types": kinds,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": size.linear_dim,
            "linear_num_key_heads": size.key_heads,
            "linear_num_value_heads": size.value_heads,
            "linear_value_head_dim": size.linear_dim,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": MAX_POSITION,
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": size.heads,
            "num_hidden_layers": size.layers,
            "num_key_value_heads": size.kv_heads,
            "rms_norm_eps": EPS,
            "rope_parameters": ROPE
            | {"mrope_interleaved": True, "mrope_section": list(size.mrope_section)},
            "tie_word_embeddings": True,
            "use_cache": True,
            "vocab_size": vocab,
        },
        "tie_word_embeddings": True,
    }


def draft_json(
    trunk: TrunkConfig, ffn: int, draft_vocab: int, aux_layers: Sequence[int], eos: int
) -> dict[str, Any]:
    """Config of a draft, flat as in published EAGLE-3 folders; heads and width are the trunk's.

    The rotation is trained as written: the first quarter of each head, exponents over that width.
    The aux layer ids are outputs: 1 is the residual stream after trunk layer 1.
    """
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "draft_vocab_size": draft_vocab,
        "dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(aux_layers),
            "use_aux_hidden_state": True,
        },
        "eos_token_id": eos,
        "fc_norm": False,
        "head_dim": trunk.head_dim,
        "hidden_act": "silu",
        "hidden_size": trunk.hidden,
        "intermediate_size": ffn,
        "max_position_embeddings": MAX_POSITION,
        "mlp_bias": False,
        "model_type": "llama",
        "norm_before_fc": False,
        "norm_before_residual": False,
        "norm_output": False,
        "num_attention_heads": trunk.heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": trunk.kv_heads,
        "partial_rotary_factor": ROPE["partial_rotary_factor"],
        "rms_norm_eps": EPS,
        "rope_parameters": ROPE,
        "target_hidden_size": trunk.hidden,
        "tie_word_embeddings": False,
        "vocab_size": trunk.vocab,
    }


def stored(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor in the dtype in which published checkpoints store it."""
    keep = not tensor.is_floating_point()
    fp32 = name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))
    dtype = tensor.dtype if keep else torch.float32 if fp32 else torch.bfloat16
    return tensor.detach().to("cpu", dtype).contiguous()


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add a prefix to every name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose names start with a prefix, without it, in float32."""
    return {
        name.removeprefix(prefix): tensor.float() if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix)
    }


def write_json(path: Path, value: object) -> None:
    """Write readable JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON object."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write model.safetensors; a reader never sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    save_file(
        {name: stored(name, tensor) for name, tensor in tensors.items()},
        part,
        metadata={"format": "pt"},
    )
    part.replace(folder / "model.safetensors")


def write_tokenizer(folder: Path, tokenizer_path: Path) -> None:
    """Write the tokenizer, without white space, and the two files that name its end token."""
    tokenizer = json.loads(tokenizer_path.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    model["merges"] = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    text = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    specials = [t["content"] for t in tokenizer["added_tokens"]]
    write_json(
        folder / "tokenizer_config.json",
        {
            "additional_special_tokens": [t for t in specials if t != EOS],
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS,
            "model_max_length": MAX_POSITION,
            "pad_token": EOS,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )
    eos = Tokenizer.from_file(str(tokenizer_path)).token_to_id(EOS)
    write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos})


def write_trunk(folder: Path, config: dict[str, Any], trunk: Trunk, tokenizer_path: Path) -> None:
    """Write a trunk folder; its MTP head follows with `add_mtp`."""
    write_weights(folder, prefixed(TRUNK_PREFIX, trunk.state_dict()))
    write_json(folder / "config.json", config)
    write_tokenizer(folder, tokenizer_path)


def add_mtp(folder: Path, head: MtpHead) -> None:
    """Put an MTP head into a trunk folder, in place of the one that may be there."""
    tensors = load_file(folder / "model.safetensors")
    body = {n: t for n, t in tensors.items() if not n.startswith(MTP_PREFIX)}
    write_weights(folder, body | prefixed(MTP_PREFIX, head.state_dict()))


def write_draft(folder: Path, config: dict[str, Any], head: EagleHead) -> None:
    """Write a draft folder."""
    write_weights(folder, head.state_dict())
    write_json(folder / "config.json", config)


def read_trunk(folder: Path, device: torch.device) -> Trunk:
    """Load a trunk, stored bits and float32 arithmetic."""
    trunk = Trunk(TrunkConfig.from_json(read_json(folder / "config.json")))
    trunk.load_state_dict(below(TRUNK_PREFIX, load_file(folder / "model.safetensors")))
    return trunk.requires_grad_(False).to(device).eval()


def read_mtp(folder: Path, device: torch.device) -> MtpHead:
    """Load the MTP head of a trunk folder."""
    head = MtpHead(TrunkConfig.from_json(read_json(folder / "config.json")))
    head.load_state_dict(below(MTP_PREFIX, load_file(folder / "model.safetensors")))
    return head.requires_grad_(False).to(device).eval()


def has_mtp(folder: Path) -> bool:
    """Whether a trunk folder has an MTP head."""
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return any(name.startswith(MTP_PREFIX) for name in file.keys())


def read_draft(folder: Path, device: torch.device) -> EagleHead:
    """Load a draft."""
    config = EagleConfig.from_json(read_json(folder / "config.json"))
    tensors = below("", load_file(folder / "model.safetensors"))
    head = EagleHead(config, tensors["d2t"] + torch.arange(config.draft_vocab))
    head.load_state_dict(tensors)
    return head.requires_grad_(False).to(device).eval()
