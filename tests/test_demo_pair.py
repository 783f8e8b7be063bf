"""The shipped pair has the published layout, and the script that trained it still runs."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "demo"
WEIGHTS = "model.safetensors"

Layout = dict[str, tuple[str, tuple[int, ...]]]


def read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def layout(path: Path) -> Layout:
    """Names, dtypes and shapes from the header of a safetensors file."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    return {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in header.items()}


def block_layout(config: dict[str, Any], kind: str, prefix: str) -> Layout:
    """What the published Qwen3.5 files hold for one block."""
    h, ffn, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q = config["num_attention_heads"] * dim
    kv = config["num_key_value_heads"] * dim
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    heads = config["linear_num_value_heads"]
    bf16: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
        "mlp.gate_proj.weight": (ffn, h),
        "mlp.up_proj.weight": (ffn, h),
        "mlp.down_proj.weight": (h, ffn),
    }
    fp32: dict[str, tuple[int, ...]] = {}
    if kind == "full_attention":
        bf16 |= {
            "self_attn.q_proj.weight": (2 * q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
        }
    else:
        bf16 |= {
            "linear_attn.in_proj_qkv.weight": (2 * keys + values, h),
            "linear_attn.in_proj_z.weight": (values, h),
            "linear_attn.in_proj_a.weight": (heads, h),
            "linear_attn.in_proj_b.weight": (heads, h),
            "linear_attn.conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.out_proj.weight": (h, values),
        }
        fp32 = {
            "linear_attn.A_log": (heads,),
            "linear_attn.norm.weight": (config["linear_value_head_dim"],),
        }
    typed = {name: ("BF16", shape) for name, shape in bf16.items()}
    typed |= {name: ("F32", shape) for name, shape in fp32.items()}
    return {prefix + name: entry for name, entry in typed.items()}


def trunk_layout(config: dict[str, Any]) -> Layout:
    h = config["hidden_size"]
    want: Layout = {
        "model.language_model.embed_tokens.weight": ("BF16", (config["vocab_size"], h)),
        "model.language_model.norm.weight": ("BF16", (h,)),
        "mtp.fc.weight": ("BF16", (h, 2 * h)),
        "mtp.norm.weight": ("BF16", (h,)),
        "mtp.pre_fc_norm_embedding.weight": ("BF16", (h,)),
        "mtp.pre_fc_norm_hidden.weight": ("BF16", (h,)),
    }
    for i, kind in enumerate(config["layer_types"]):
        want |= block_layout(config, kind, f"model.language_model.layers.{i}.")
    return want | block_layout(config, "full_attention", "mtp.layers.0.")


def draft_layout(config: dict[str, Any]) -> Layout:
    h, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["draft_vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    chunks = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    bf16: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, chunks * h),
        "midlayer.input_layernorm.weight": (h,),
        "midlayer.hidden_norm.weight": (h,),
        "midlayer.post_attention_layernorm.weight": (h,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "midlayer.self_attn.o_proj.weight": (h, q),
        "midlayer.mlp.gate_proj.weight": (ffn, h),
        "midlayer.mlp.up_proj.weight": (ffn, h),
        "midlayer.mlp.down_proj.weight": (h, ffn),
        "norm.weight": (h,),
        "lm_head.weight": (vocab, h),
    }
    want: Layout = {name: ("BF16", shape) for name, shape in bf16.items()}
    return want | {"d2t": ("I64", (vocab,)), "t2d": ("BOOL", (config["vocab_size"],))}


def check_pair(trunk: Path, draft: Path) -> None:
    """Check that both folders hold exactly the tensors that their configs imply."""
    trunk_config, draft_config = read_json(trunk / "config.json"), read_json(draft / "config.json")
    text = trunk_config["text_config"]
    assert layout(trunk / WEIGHTS) == trunk_layout(text)
    assert layout(draft / WEIGHTS) == draft_layout(draft_config)
    assert trunk_config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    assert draft_config["architectures"] == ["LlamaForCausalLMEagle3"]
    aux = draft_config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert aux[0] == 1, "a first id of 1 says that the ids are outputs"
    assert {text["layer_types"][i] for i in aux} == {"linear_attention", "full_attention"}
    assert (trunk / "tokenizer.json").is_file()


def test_shipped_pair_has_the_published_layout() -> None:
    check_pair(DEMO / "trunk", DEMO / "draft")
    files = [p for folder in ("trunk", "draft") for p in (DEMO / folder).iterdir()]
    assert sum(p.stat().st_size for p in files) <= 18_000_000


def test_draft_vocabulary_is_a_sorted_subset() -> None:
    torch = pytest.importorskip("torch")
    tensors = pytest.importorskip("safetensors.torch").load_file(DEMO / "draft" / WEIGHTS)
    targets = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert (targets.diff() > 0).all()
    assert torch.equal(targets, tensors["t2d"].nonzero().flatten())


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the modules of the training script by name."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(DEMO))
    return importlib.import_module


def test_trunk_gives_the_logits_of_transformers(demo: Any) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    reference = transformers.Qwen3_5ForCausalLM.from_pretrained(
        DEMO / "trunk", dtype=torch.float32, attn_implementation="eager"
    )
    trunk = demo("folders").read_trunk(DEMO / "trunk", torch.device("cpu"))
    ids = torch.randint(0, 8192, (1, 130), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = reference(ids, output_hidden_states=True)
        hidden, features = trunk(ids, (1, 3, 6))
        state = trunk.empty_state(1, ids.shape[1])
        steps = [trunk.logits(trunk.step(column, state)[0]) for column in ids[0, :, None]]
    # float32 on both sides; only the order of the sums differs
    assert (trunk.logits(hidden) - want.logits).abs().max() < 2e-3
    assert (torch.stack(steps, 1) - want.logits).abs().max() < 2e-3
    for layer, feature in zip((1, 3, 6), features, strict=True):
        assert (feature - want.hidden_states[layer + 1]).abs().max() < 2e-3


def chain_by_rows(
    tensors: dict[str, Any],
    embedding: Any,  # [V, H]
    tokens: list[int],
    features: Any,  # [T, 3H]
    prompt: int,
    k: int,
) -> list[int]:
    """Accepted count of each round, drafting one row at a time with a kept cache.

    The oracle: written from the description of EAGLE-3, on the raw tensors of the shipped draft.
    """
    torch = importlib.import_module("torch")
    weight = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    heads, kv_heads, dim, rotary = 4, 2, 64, 16
    keys: list[Any] = []
    values: list[Any] = []

    def norm(x: Any, name: str) -> Any:
        return x * torch.rsqrt(x.pow(2).mean() + 1e-6) * weight[name]

    def turn(x: Any, position: int) -> Any:
        angle = position * 1e7 ** -(torch.arange(0, rotary, 2) / rotary)
        a, b, rest = x[:, : rotary // 2], x[:, rotary // 2 : rotary], x[:, rotary:]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def row(token: int, g: Any, position: int) -> tuple[int, Any]:
        part = "midlayer."
        both = torch.cat(
            [
                norm(embedding[token], f"{part}input_layernorm.weight"),
                norm(g, f"{part}hidden_norm.weight"),
            ]
        )
        q, key, value = (
            (weight[f"{part}self_attn.{n}_proj.weight"] @ both).view(-1, dim) for n in "qkv"
        )
        del keys[position:], values[position:]
        keys.append(turn(key, position))
        values.append(value)
        all_keys, all_values = torch.stack(keys, 1), torch.stack(values, 1)  # [kv, rows, dim]
        q = turn(q, position)
        mixed = []
        for head in range(heads):
            source = head // (heads // kv_heads)
            share = (all_keys[source] @ q[head] * dim**-0.5).softmax(0)
            mixed.append(share @ all_values[source])
        x = g + weight[f"{part}self_attn.o_proj.weight"] @ torch.cat(mixed)
        z = norm(x, f"{part}post_attention_layernorm.weight")
        gate, up = (weight[f"{part}mlp.{n}_proj.weight"] @ z for n in ("gate", "up"))
        x = x + weight[f"{part}mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)
        best = int((weight["lm_head.weight"] @ norm(x, "norm.weight")).argmax())
        return best + int(weight["d2t"][best]), x

    counts, true_rows, length = [], 0, prompt
    while length + k < len(tokens) - 1:
        for i in range(true_rows, length):  # token i + 1 with the true feature of i
            token, g = row(tokens[i + 1], weight["fc.weight"] @ features[i], i)
        true_rows = length
        drafted = [token]
        for step in range(1, k):
            token, g = row(token, g, length - 1 + step)
            drafted.append(token)
        run = 0
        while run < k and drafted[run] == tokens[length + 1 + run]:
            run += 1
        counts.append(run)
        length += run + 1
    return counts


def test_acceptance_equals_a_chain_drafted_row_by_row(demo: Any) -> None:
    torch = pytest.importorskip("torch")
    cpu, prompt, k = torch.device("cpu"), 24, 4
    folders, evaluate, decode = demo("folders"), demo("evaluate"), demo("decode")
    trunk = folders.read_trunk(DEMO / "trunk", cpu)
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(
        str(DEMO / "trunk" / "tokenizer.json")
    )
    source = (DEMO / "train.py").read_text(encoding="utf-8")
    ids = tokenizer.encode("<|py|>" + source).ids
    prompts = torch.tensor([ids[:prompt], [1, *ids[400 : 400 + prompt - 1]]])
    text = decode.empty_text(2, prompt + 60, trunk, 3, torch.float32)
    decode.generate(trunk, prompts, torch.zeros(2), (1, 3, 6), text, torch.Generator())
    drafted = evaluate.drafts(
        folders.read_draft(DEMO / "draft", cpu), trunk.embed_tokens.weight, text, k
    )
    found = evaluate.acceptance(drafted, text.tokens, prompt, [prompt + 60] * 2)

    tensors = pytest.importorskip("safetensors.torch").load_file(DEMO / "draft" / WEIGHTS)
    embedding = trunk.embed_tokens.weight
    counts = [
        count
        for tokens, features in zip(text.tokens.tolist(), text.features, strict=True)
        for count in chain_by_rows(tensors, embedding, tokens, features, prompt, k)
    ]
    assert found.rounds == len(counts)
    assert found.accepted == tuple(sum(c > j for c in counts) for j in range(k))
    assert found.length > 2.0


def write_corpus(path: Path) -> None:
    """Write a few documents of two registers, held-out ones among them."""
    code = "def f{0}(x):\n    return x + {0}\n\n\n"
    prose = "It was the {0}th day of the voyage, and the wind held. "
    with path.open("w", encoding="utf-8") as lines:
        for name, sentence in (("py", code), ("book", prose)):
            for held_out in (False, False, True):
                text = "".join(sentence.format(i) for i in range(60))
                lines.write(json.dumps({"c": name, "t": text, "v": held_out}) + "\n")


@pytest.mark.slow
def test_smoke_training_writes_a_pair_of_the_same_layout(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    corpus = tmp_path / "corpus.jsonl"
    write_corpus(corpus)
    trunk, draft, report = (tmp_path / name for name in ("trunk", "draft", "report"))
    paths = {"--corpus": corpus, "--trunk": trunk, "--draft": draft, "--report": report}
    arguments = [str(word) for pair in paths.items() for word in pair]
    subprocess.run(
        [sys.executable, str(DEMO / "train.py"), "smoke", *arguments],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        timeout=240,
    )
    check_pair(trunk, draft)
    held_out = read_json(report / "trunk.json")["held_out"]
    assert held_out["py"] < 9.2, "no worse than guessing among 8192 tokens"
    found = read_json(report / "evaluate.json")
    assert 1.0 <= found["eagle.py.prompt16.whole"]["acceptance_length"] <= 5.0
