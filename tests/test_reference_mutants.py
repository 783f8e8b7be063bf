"""Each classic porting mistake, planted in the reference, must fail a check of `trunk_checks`.

A mistake is one or more replacements in the source, old text and new in turn.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from eagle_chain.export import reference
from tests.toy_pair import save, trunk_parts
from tests.trunk_checks import (
    Case,
    check_log,
    check_prefill,
    check_resume,
    check_single,
    check_verify,
)

SOURCE = Path(str(reference.__file__)).read_text()

MATHS = {
    "value heads tiled, not interleaved": (
        "k_t = key[t].repeat_interleave(group, 0)[..., None]",
        "k_t = key[t].repeat(group, 1)[..., None]",
    ),
    "query heads tiled, not interleaved": (
        "q_t = query[t].repeat_interleave(group, 0)[..., None]",
        "q_t = query[t].repeat(group, 1)[..., None]",
    ),
    "norm without the +1": ("(1.0 + weight.to(f32))", "weight.to(f32)"),
    "1 + w rounded to bf16": ("(1.0 + weight.to(f32))", "(1.0 + weight).bfloat16().to(f32)"),
    "+1 on the gated norm too": (
        'layer["linear_attn.norm.weight"] * normed',
        '(1 + layer["linear_attn.norm.weight"]) * normed',
    ),
    "gated norm over all heads at once": (
        "normed = rms(out, config.norm_eps)",
        "normed = rms(out.flatten(1), config.norm_eps).view_as(out)",
    ),
    "gate before the norm": (
        "normed = rms(out, config.norm_eps)",
        "normed = rms(out * F.silu(z), config.norm_eps)",
    ),
    "gate through sigmoid, not silu": ("F.silu(z.to(f32))", "z.to(f32).sigmoid()"),
    "all queries, then all gates": (
        ".reshape(rows, -1, 2 * dim)\n    query, gate = torch.split(fused, dim, -1)",
        ".reshape(rows, 2, -1, dim)\n    query, gate = fused.unbind(1)",
    ),
    "gates before queries": ("query, gate = torch.split", "gate, query = torch.split"),
    "attention gate through silu": (
        "mixed * gate.reshape(rows, -1).sigmoid()",
        "mixed * F.silu(gate.reshape(rows, -1))",
    ),
    "attention gate left out": ("mixed = mixed * gate.reshape(rows, -1).sigmoid()", "pass"),
    "no norm on queries": (
        'query = centred_norm(query, layer["self_attn.q_norm.weight"], eps)',
        "pass",
    ),
    "no norm on keys": ('key = centred_norm(key, layer["self_attn.k_norm.weight"], eps)', "pass"),
    "unit length by the mean": (
        "x.pow(2).sum(-1, keepdim=True) + 1e-6",
        "x.pow(2).mean(-1, keepdim=True) + 1e-6",
    ),
    "scale of linear queries left out": (") * dk**-0.5", ")"),
    "scale of linear queries from dv": (") * dk**-0.5", ") * dv**-0.5"),
    "no silu after the conv": (
        "F.silu(F.conv1d(window[None], taps, groups=len(window)))",
        "F.conv1d(window[None], taps, groups=len(window))",
    ),
    "conv taps reversed": ("F.conv1d(window[None], taps,", "F.conv1d(window[None], taps.flip(-1),"),
    "delta from the undecayed state": (
        "S = S * decay[t, :, None, None]\n        delta = (value[t] - (S *",
        "S0 = S; S = S * decay[t, :, None, None]\n        delta = (value[t] - (S0 *",
    ),
    "read before the update": (
        "outs.append((S * q_t).sum(-2))",
        "outs.append(((S - k_t * delta[:, None, :]) * q_t).sum(-2))",
    ),
    "dt_bias left out": ('F.softplus(a + layer["linear_attn.dt_bias"].to(f32))', "F.softplus(a)"),
    "a and b swapped": (
        'F.linear(x, layer["linear_attn.in_proj_b.weight"]).sigmoid()',
        'F.linear(x, layer["linear_attn.in_proj_a.weight"]).sigmoid()',
    ),
    "delta not weighted": ("* beta[t, :, None]", ""),
    "A_log used as A": ('layer["linear_attn.A_log"].to(f32).exp()', 'layer["linear_attn.A_log"]'),
    "rotary over the whole head": (
        "turn = (positions, config.rope_theta, config.rotary_dim)\n    cache = write",
        "turn = (positions, config.rope_theta, dim)\n    cache = write",
    ),
    "rotary frequencies from head_dim": ("dtype=f32) / dims)", "dtype=f32) / x.shape[-1])"),
    "rotary pairs (2i, 2i + 1)": (
        "a, b, rest = torch.split(x, [dims // 2, dims // 2, x.shape[-1] - dims], -1)",
        "a, b, rest = x[..., 0:dims:2], x[..., 1:dims:2], x[..., dims:]",
    ),
    "rotary position one too high": (
        "angle = positions.to(f32)",
        "angle = (positions + 1).to(f32)",
    ),
    "KV heads tiled, not grouped": (
        "t.repeat_interleave(query.shape[1] // len(t), 0)",
        "t.repeat(query.shape[1] // len(t), 1, 1)",
    ),
    "scale of attention left out": ("key.mT * query.shape[-1] ** -0.5", "key.mT"),
    "scale of attention from the hidden size": (
        "key.mT * query.shape[-1] ** -0.5",
        "key.mT * (64 // query.shape[1]) ** -0.5",
    ),
    "rows see one slot too many": ("> positions[:, None]", "> positions[:, None] + 1"),
    "rows do not see themselves": ("> positions[:, None]", "> positions[:, None] - 1"),
    "features before the MLP": ("features.append(h)", "features.append(h - mlp(x, layer))"),
    "features one layer late": ("if i in aux_layers:", "if i - 1 in aux_layers:"),
    "features are normed": (
        "features.append(h)",
        'features.append(centred_norm(h, weights["norm.weight"], config.norm_eps))',
    ),
    "last norm left out": (
        'hidden = centred_norm(h, weights["norm.weight"], config.norm_eps)',
        "hidden = h",
    ),
}

# What goes wrong between calls; already a prompt of several calls shows it.
CARRY = {
    "fold drops the last kept row": ("t < kept)", "t < kept - 1)"),
    "S never folded": ('"S": start,', '"S": states["S"],'),
    "log folded into S twice": ('"S": start,', '"S": S,'),
    "fold without decay": ('states["log_decay"][t], 1.0)', 'states["log_decay"][t] * 0 + 1, 1.0)'),
    "fold decays after adding": (
        "S = S + key[..., None] * delta[:, None, :]",
        "S = S + key[..., None] * (delta * decay[:, None])[:, None, :]",
    ),
    "fold tiles the key heads": (
        "logged[t], 0.0).repeat_interleave(group, 0)",
        "logged[t], 0.0).repeat(group, 1)",
    ),
    "log of unweighted deltas": ("deltas.append(delta)", "deltas.append(delta / beta[t, :, None])"),
    "log of keys before unit length": (
        '"log_key": key,',
        '"log_key": k.reshape(rows, key_heads, dk).to(f32),',
    ),
    "log in bf16": ("torch.stack(deltas),", "torch.stack(deltas).bfloat16().float(),"),
    "S in bf16": ('"S": start,', '"S": start.bfloat16().float(),'),
    "window read at its start": ("[:, kept : kept + history]", "[:, :history]"),
    "window holds the conv's output": (
        '"window": window,',
        '"window": torch.cat([past, c.T], 1),',
    ),
    "position counted from 0 in each call": (
        "torch.arange(position, position + len(ids))\n    after",
        "torch.arange(0, len(ids))\n    after",
    ),
}

# What a prompt in full calls, single tokens and one verify call all pass: the calls before kept
# all their rows. Only decoding on after a partial accept shows it.
ROLLBACK = {
    "kept ignored in the fold": ("t < kept)", "t < len(logged))"),
    "fold takes one row too many": ("t < kept)", "t <= kept)"),
    "S left as after the call": (
        '"S": start,',
        '"S": S,',
        "S = start = fold_log(states, kept)",
        'S = start = states["S"]',
    ),
    "full rollback keeps a row": ("t < kept)", 't < (kept or int(states["S"].any())))'),
    "window read at its end": (
        'past = states["window"][:, kept : kept + history]',
        'past = states["window"][:, -history:]',
    ),
    "window read one column late": ("past = states", "kept = min(kept + 1, rows); past = states"),
    "counts above the conv history clamped": (
        "past = states",
        "kept = kept if kept in (1, rows) else min(kept, history); past = states",
    ),
}


def plant(*edits: str) -> ModuleType:
    """The reference as a module of its own, with replacements in its source."""
    source = SOURCE
    for old, new in zip(edits[::2], edits[1::2], strict=True):
        assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    module = ModuleType("planted_reference")
    sys.modules[module.__name__] = module  # dataclasses look their module up
    exec(compile(source, "planted_reference", "exec"), module.__dict__)
    return module


def catches(check: Callable[[ModuleType, Case], None], module: ModuleType, case: Case) -> bool:
    """Whether the check fails; any other exception is a mutant that does not run."""
    try:
        check(module, case)
    except AssertionError:
        return True
    return False


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    return Case(save(tmp_path_factory.mktemp("trunk"), *trunk_parts()))


@pytest.fixture(scope="module")
def small_keys(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A trunk whose linear keys have a length near the epsilon of `unit`."""
    config, tensors = trunk_parts(layers=4)
    for name, tensor in tensors.items():
        if name.endswith("in_proj_qkv.weight"):
            tensor *= 1e-3
    return Case(save(tmp_path_factory.mktemp("small"), config, tensors), aux_layers=(0, 1, 2))


def test_nothing_planted(case: Case, small_keys: Case) -> None:
    module = plant("f32 = torch.float32", "f32 = torch.float32  # the same")
    for check in (check_prefill, check_single, check_verify, check_resume, check_log):
        check(module, case)
    check_prefill(module, small_keys)


@pytest.mark.parametrize("mistake", MATHS)
def test_maths(mistake: str, case: Case) -> None:
    module = plant(*MATHS[mistake])
    assert any(catches(check, module, case) for check in (check_verify, check_single))


def test_epsilon_of_unit_length(small_keys: Case) -> None:
    module = plant("keepdim=True) + 1e-6)", "keepdim=True) + 1e-6 * x.shape[-1])")
    assert catches(check_prefill, module, small_keys)


@pytest.mark.parametrize("mistake", CARRY)
def test_carry(mistake: str, case: Case) -> None:
    module = plant(*CARRY[mistake])
    assert catches(check_prefill, module, case)


@pytest.mark.parametrize("mistake", ROLLBACK)
def test_rollback(mistake: str, case: Case) -> None:
    module = plant(*ROLLBACK[mistake])
    for check in (check_prefill, check_single, check_verify):
        check(module, case)
    assert catches(check_resume, module, case)
