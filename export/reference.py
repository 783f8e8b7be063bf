"""The pair in plain PyTorch: what the ONNX graphs are compared with.

Functions over dicts of tensors under the names of `export.checkpoint`, written from the maths of
the models and of `engines.contract`, independent of the graphs. They compute in the dtype
of the weights, round where transformers rounds, and are differentiable.

Letters: W rows of a trunk call, R of a draft call, H hidden, V vocabulary, T slots of a KV buffer,
C channels of the convolution, Hk/Hv key and value heads with dims dk/dv.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.export.kv_reference import Planes, decoded, encoded, planes_of

Weights = Mapping[str, Tensor]
States = dict[str, Tensor]
f32 = torch.float32
LINEAR_STATES = ("S", "log_key", "log_delta", "log_decay", "window")


@dataclass(frozen=True)
class TrunkOut:
    """What one trunk call gives; see `trunk_spec` for the meaning of each."""

    next_ids: Tensor  # int32 [W]
    accepted: Tensor  # int32 [1]
    pending: Tensor  # int32 [1]
    next_kept: Tensor  # int32 [1]
    next_position: Tensor  # int32 [1]
    features: Tensor  # [W, A*H]
    hidden: Tensor  # [W, H]
    logits: Tensor  # [W, V] fp32
    S_rows: dict[str, Tensor]  # "layers.N.S_rows": S after every row, [W, Hv, dk, dv] fp32
    states: States  # by the names under which the next call takes them
    # Of linear layers, what the rows of S were made of: "layers.N.log_qkv" [W, C] behind the conv,
    # "layers.N.raw_decay" and "layers.N.raw_beta" [W, Hv] as they are projected, fp32.
    made_of: dict[str, Tensor]


@dataclass(frozen=True)
class DraftOut:
    """What one draft call gives; see `draft_spec` for the meaning of each."""

    token: Tensor  # int32 [1], of the trunk's vocabulary
    g_next: Tensor  # [1, H]
    next_position: Tensor  # int32 [1]
    logits: Tensor  # [1, draft vocabulary] fp32
    states: States


def trunk_step(
    weights: Weights,
    config: TrunkConfig,
    aux_layers: tuple[int, ...],
    ids: Tensor,  # int [W]; below 0: no token
    position: int,
    rows: int,
    kept: int,
    states: States,
    draw: tuple[Tensor, float] | None = None,  # fp32 [W] shares, and the temperature
) -> TrunkOut:
    """Run W rows from `position`, on the states of the call before with its first `kept` rows.

    `states` is not written to. Rows from `rows` on are padding: they are computed, but never
    accepted, and the next call can keep none of them.
    """
    h = embed(weights["embed_tokens.weight"], ids).to(weights["norm.weight"].dtype)
    positions = torch.arange(position, position + len(ids))
    after: States = {}
    S_rows: dict[str, Tensor] = {}
    made_of: dict[str, Tensor] = {}
    features = []
    for i, kind in enumerate(config.layer_types):
        layer = layer_weights(weights, f"layers.{i}.")
        x = centred_norm(h, layer["input_layernorm.weight"], config.norm_eps)
        if kind == "linear_attention":
            old = {name: states[f"layers.{i}.{name}"] for name in LINEAR_STATES}
            mixed, new, by_row = linear_mixer(x, layer, config, kept, old)
            S_rows[f"layers.{i}.S_rows"] = by_row.pop("S_rows")
            made_of |= {f"layers.{i}.{name}": made for name, made in by_row.items()}
        else:
            cache = (planes_of(states, f"layers.{i}.key"), planes_of(states, f"layers.{i}.value"))
            mixed, new = full_mixer(x, layer, config, positions, cache)
        after |= {f"layers.{i}.{name}": state for name, state in new.items()}
        h = h + mixed
        x = centred_norm(h, layer["post_attention_layernorm.weight"], config.norm_eps)
        h = h + mlp(x, layer)
        if i in aux_layers:
            features.append(h)
    hidden = centred_norm(h, weights["norm.weight"], config.norm_eps)
    logits = F.linear(hidden, weights[config.head]).to(f32)
    next_ids = greedy(logits) if draw is None else drawn(logits, *draw)
    accepted = count_accepted(ids, next_ids, rows)
    return TrunkOut(
        next_ids=next_ids,
        accepted=int32(accepted),
        pending=next_ids[accepted : accepted + 1],
        next_kept=int32(accepted + 1),
        next_position=int32(position + accepted + 1),
        features=torch.cat(features, -1) if features else h[:, :0],
        hidden=hidden,
        logits=logits,
        S_rows=S_rows,
        states=after,
        made_of=made_of,
    )


def linear_mixer(
    x: Tensor,  # [W, H]
    layer: Weights,
    config: TrunkConfig,
    kept: int,
    states: States,
) -> tuple[Tensor, States, States]:
    """Gated DeltaNet: y [W, H], the new states, and `S_rows` and `made_of` of `TrunkOut`."""
    rows, history = x.shape[0], config.conv_kernel - 1
    key_heads, dk = config.linear_key_heads, config.linear_key_dim
    value_heads, dv = config.linear_value_heads, config.linear_value_dim
    group = value_heads // key_heads

    # The conv's history are the raw inputs of the last rows that joined the sequence.
    past = states["window"][:, kept : kept + history]
    u = F.linear(x, layer["linear_attn.in_proj_qkv.weight"])
    window = torch.cat([past, u.T], 1)  # [C, 3 + W]
    taps = layer["linear_attn.conv1d.weight"]  # [C, 1, 4], the last one meets the newest row
    c = F.silu(F.conv1d(window[None], taps, groups=len(window)))[0].T  # [W, C]
    q, k, v = torch.split(c, [key_heads * dk, key_heads * dk, value_heads * dv], -1)

    beta = F.linear(x, layer["linear_attn.in_proj_b.weight"]).sigmoid().to(f32)  # [W, Hv]
    a = F.linear(x, layer["linear_attn.in_proj_a.weight"]).to(f32)
    rate = F.softplus(a + layer["linear_attn.dt_bias"].to(f32))
    decay = torch.exp(-layer["linear_attn.A_log"].to(f32).exp() * rate)  # [W, Hv]
    query = unit(q.reshape(rows, key_heads, dk).to(f32)) * dk**-0.5
    key = unit(k.reshape(rows, key_heads, dk).to(f32))
    value = v.reshape(rows, value_heads, dv).to(f32)

    S = start = fold_log(states, kept)
    outs, deltas, after = [], [], []
    for t in range(rows):
        q_t = query[t].repeat_interleave(group, 0)[..., None]  # value head h reads key head h // G
        k_t = key[t].repeat_interleave(group, 0)[..., None]  # [Hv, dk, 1]
        S = S * decay[t, :, None, None]
        delta = (value[t] - (S * k_t).sum(-2)) * beta[t, :, None]  # [Hv, dv]
        S = S + k_t * delta[:, None, :]
        outs.append((S * q_t).sum(-2))
        deltas.append(delta)
        after.append(S)

    out = torch.stack(outs).to(x.dtype)  # [W, Hv, dv]
    z = F.linear(x, layer["linear_attn.in_proj_z.weight"]).reshape(rows, value_heads, dv)
    normed = rms(out, config.norm_eps).to(x.dtype)
    gated = layer["linear_attn.norm.weight"] * normed * F.silu(z.to(f32))  # plain w, per head
    y = F.linear(gated.to(x.dtype).reshape(rows, -1), layer["linear_attn.out_proj.weight"])
    new = {
        "S": start,
        "log_key": key,
        "log_delta": torch.stack(deltas),
        "log_decay": decay,
        "window": window,
    }
    raw_beta = F.linear(x, layer["linear_attn.in_proj_b.weight"]).to(f32)
    made_of = {"log_qkv": c, "raw_decay": a, "raw_beta": raw_beta}
    return y, new, {"S_rows": torch.stack(after), **made_of}


def fold_log(states: States, kept: int) -> Tensor:
    """S of the call before with its first `kept` rows applied, [Hv, dk, dv] fp32.

    The log of the other rows may hold anything, NaN included, so it is masked by selection.
    """
    S, logged = states["S"], states["log_key"]
    group = S.shape[0] // logged.shape[1]
    for t in range(len(logged)):
        on = torch.tensor(t < kept)
        decay = torch.where(on, states["log_decay"][t], 1.0)
        key = torch.where(on, logged[t], 0.0).repeat_interleave(group, 0)
        delta = torch.where(on, states["log_delta"][t], 0.0)
        S = S * decay[:, None, None]
        S = S + key[..., None] * delta[:, None, :]
    return S


def full_mixer(
    x: Tensor,  # [W, H]
    layer: Weights,
    config: TrunkConfig,
    positions: Tensor,  # [W]
    cache: tuple[Planes, Planes],  # keys and values of T slots
) -> tuple[Tensor, States]:
    """Attention with an output gate: y [W, H] and the cache with W more rows."""
    rows, dim, eps = x.shape[0], config.head_dim, config.norm_eps
    fused = F.linear(x, layer["self_attn.q_proj.weight"]).reshape(rows, -1, 2 * dim)
    query, gate = torch.split(fused, dim, -1)  # per head: query rows, then gate rows
    key = F.linear(x, layer["self_attn.k_proj.weight"]).reshape(rows, -1, dim)
    value = F.linear(x, layer["self_attn.v_proj.weight"]).reshape(rows, -1, dim)
    query = centred_norm(query, layer["self_attn.q_norm.weight"], eps)
    key = centred_norm(key, layer["self_attn.k_norm.weight"], eps)
    turn = (positions, config.rope_theta, config.rotary_dim)
    cache = write_rows(cache, rotate(key, *turn), value, int(positions[0]))
    mixed = attend(rotate(query, *turn), cache, positions)  # [W, Hq * head_dim]
    mixed = mixed * gate.reshape(rows, -1).sigmoid()
    y = F.linear(mixed, layer["self_attn.o_proj.weight"])
    return y, named(cache)


def encode(weights: Weights, config: DraftConfig, features: Tensor) -> Tensor:
    """The draft's fc: features [R, A*Ht], chunks in ascending depth -> g [R, H].

    They are normed before it together, chunk by chunk, or not at all.
    """
    if config.norm_before_fc:
        features = plain_norm(features, weights["input_norm.weight"], config.norm_eps)
    if config.fc_norm:
        chunks = torch.split(features, config.trunk_hidden_size, -1)
        features = torch.cat(
            [
                plain_norm(chunk, weights[f"fc_norm.{i}.weight"], config.norm_eps)
                for i, chunk in enumerate(chunks)
            ],
            -1,
        )
    return linear(features, weights, "fc") if config.fc else features


def draft_step(
    weights: Weights,
    embedding: Tensor,  # [V, H]
    config: DraftConfig,
    ids: Tensor,  # int [R], of the trunk's vocabulary: row i holds token i + 1 of feature i
    g: Tensor,  # [R, H]
    position: int,
    row: int,
    states: States,
) -> DraftOut:
    """Run R rows of the draft layer from `position` and propose a token after row `row`.

    e = norm(embedding[id]); attention over [e ; norm(g)]; g itself, or norm(g), is the residual;
    gated MLP; the sum before the last norm, or behind it, is the next g. `embedding` and
    `lm_head.weight` are those that the draft uses, its own or the trunk's.
    """
    layer, rows = layer_weights(weights, "midlayer."), len(ids)
    dim, eps = config.head_dim, config.norm_eps
    e = plain_norm(embed(embedding, ids).to(g.dtype), layer["input_layernorm.weight"], eps)
    normed_g = plain_norm(g, layer["hidden_norm.weight"], eps)
    x = torch.cat([e, normed_g], -1)  # [R, 2H]
    query = linear(x, layer, "self_attn.q_proj").reshape(rows, -1, dim)
    key = linear(x, layer, "self_attn.k_proj").reshape(rows, -1, dim)
    value = linear(x, layer, "self_attn.v_proj").reshape(rows, -1, dim)
    if config.qk_norm:
        query = plain_norm(query, layer["self_attn.q_norm.weight"], eps)
        key = plain_norm(key, layer["self_attn.k_norm.weight"], eps)
    positions = torch.arange(position, position + rows)
    turn = (positions, config.rope_theta, config.rotary_dim)
    cache = (planes_of(states, "draft.key"), planes_of(states, "draft.value"))
    cache = write_rows(cache, rotate(key, *turn), value, position)
    mixed = attend(rotate(query, *turn), cache, positions)
    residual = normed_g if config.norm_before_residual else g
    h = residual + linear(mixed, layer, "self_attn.o_proj")
    h = h + mlp(plain_norm(h, layer["post_attention_layernorm.weight"], eps), layer)
    g_next = h[row : row + 1]
    normed = plain_norm(g_next, weights["norm.weight"], eps)
    logits = F.linear(normed, weights["lm_head.weight"]).to(f32) * config.logit_scale
    token = greedy(logits)
    if "d2t" in weights:  # absent when both vocabularies are the same
        target = weights["d2t"][token.clamp(min=0).long()].to(torch.int32)
        target = target if config.absolute_d2t else token + target
        token = torch.where(token < 0, token, target)
    return DraftOut(
        token=token,
        g_next=normed if config.norm_output else g_next,
        next_position=int32(position + row + 1),
        logits=logits,
        states={f"draft.{name}": state for name, state in named(cache).items()},
    )


def mtp_step(
    weights: Weights,
    embedding: Tensor,  # [V, H], the trunk's
    head: Tensor,  # [V, H], the trunk's
    config: TrunkConfig,
    ids: Tensor,  # int [R]: row i holds token i + 1 of hidden i
    g: Tensor,  # [R, H], the trunk's hidden after its final norm, or what a step gave
    position: int,
    row: int,
    states: States,
) -> DraftOut:
    """Run R rows of the trunk's own head from `position` and propose a token after row `row`.

    fc over [norm(embedding[id]) ; norm(g)], one full-attention layer of the trunk, the last norm;
    what comes out of that is the next g.
    """
    layer, eps = layer_weights(weights, "mtp.layers.0."), config.norm_eps
    e = embed(embedding, ids).to(g.dtype)
    e = centred_norm(e, weights["mtp.pre_fc_norm_embedding.weight"], eps)
    n = centred_norm(g, weights["mtp.pre_fc_norm_hidden.weight"], eps)
    h = F.linear(torch.cat([e, n], -1), weights["mtp.fc.weight"])
    cache = (planes_of(states, "mtp.key"), planes_of(states, "mtp.value"))
    positions = torch.arange(position, position + len(ids))
    x = centred_norm(h, layer["input_layernorm.weight"], eps)
    mixed, new = full_mixer(x, layer, config, positions, cache)
    h = h + mixed
    h = h + mlp(centred_norm(h, layer["post_attention_layernorm.weight"], eps), layer)
    g_next = centred_norm(h[row : row + 1], weights["mtp.norm.weight"], eps)
    logits = F.linear(g_next, head).to(f32)
    return DraftOut(
        token=greedy(logits),
        g_next=g_next,
        next_position=int32(position + row + 1),
        logits=logits,
        states={f"mtp.{name}": state for name, state in new.items()},
    )


def linear(x: Tensor, weights: Weights, name: str) -> Tensor:
    """`x` times a weight, plus its bias if there is one."""
    return F.linear(x, weights[f"{name}.weight"], weights.get(f"{name}.bias"))


def layer_weights(weights: Weights, prefix: str) -> Weights:
    """The weights whose names start with a prefix, without the prefix."""
    return {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}


def embed(embedding: Tensor, ids: Tensor) -> Tensor:
    """Rows of the embedding [R, H]; no token (an id below 0) reads row 0."""
    return F.embedding(ids.clamp(min=0).long(), embedding)


def rms(x: Tensor, eps: float) -> Tensor:
    """`x` over its root mean square along the last axis, fp32."""
    x = x.to(f32)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def centred_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the trunk, whose weights are stored around zero; one rounding at the end."""
    return (rms(x, eps) * (1.0 + weight.to(f32))).to(x.dtype)


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of the draft, whose weights are stored around one; one rounding at the end."""
    return (rms(x, eps) * weight.to(f32)).to(x.dtype)


def unit(x: Tensor) -> Tensor:
    """`x` scaled to length one along the last axis; the epsilon is on the sum, not on the mean."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def mlp(x: Tensor, layer: Weights) -> Tensor:
    """down(silu(gate x) * up x)."""
    gate = F.silu(linear(x, layer, "mlp.gate_proj"))
    return linear(gate * linear(x, layer, "mlp.up_proj"), layer, "mlp.down_proj")


def rotate(x: Tensor, positions: Tensor, theta: float, dims: int) -> Tensor:
    """Rotate the first `dims` of each head of x [R, heads, head_dim]; pairs are (i, i + dims / 2).

    Angles are fp32, position * theta^(-2i / dims); the other dims pass through.
    """
    frequency = 1.0 / theta ** (torch.arange(0, dims, 2, dtype=f32) / dims)
    angle = positions.to(f32)[:, None, None] * frequency  # [R, 1, dims / 2]
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b, rest = torch.split(x, [dims // 2, dims // 2, x.shape[-1] - dims], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def named(cache: tuple[Planes, Planes]) -> States:
    """The planes of a layer by the names of its states."""
    return {
        f"{part}{suffix}": plane
        for part, planes in zip(("key", "value"), cache, strict=True)
        for suffix, plane in planes.items()
    }


def write_rows(
    cache: tuple[Planes, Planes], key: Tensor, value: Tensor, position: int
) -> tuple[Planes, Planes]:
    """The cache with key and value [R, Hkv, head_dim] in the slots from `position` on."""
    end = position + len(key)

    def write(old: Planes, update: Tensor) -> Planes:
        planes = {}
        for suffix, rows in encoded(update.transpose(0, 1)[None], old).items():
            if end > old[suffix].shape[2]:
                slots = old[suffix].shape[2]
                raise IndexError(f"rows {position} to {end - 1} do not fit {slots} slots")
            before, after = old[suffix][:, :, :position], old[suffix][:, :, end:]
            planes[suffix] = torch.cat([before, rows, after], 2)  # [1, Hkv, T, columns]
        return planes

    return write(cache[0], key), write(cache[1], value)


def attend(query: Tensor, cache: tuple[Planes, Planes], positions: Tensor) -> Tensor:
    """Grouped causal attention over the whole buffer, [R, Hq, head_dim] -> [R, Hq * head_dim].

    Row r sees the slots up to its position. Query head h reads KV head h // (Hq / Hkv).
    """
    held = (decoded(planes, query.dtype)[0] for planes in cache)  # [Hkv, T, head_dim]
    key, value = (t.repeat_interleave(query.shape[1] // len(t), 0) for t in held)
    scores = query.transpose(0, 1) @ key.mT * query.shape[-1] ** -0.5  # [Hq, R, T]
    unseen = torch.arange(key.shape[1]) > positions[:, None]
    scores = scores.masked_fill(unseen, torch.finfo(scores.dtype).min)
    shares = scores.softmax(-1, dtype=f32).to(query.dtype)
    mixed: Tensor = shares @ value
    return mixed.transpose(0, 1).reshape(len(query), -1)


def greedy(logits: Tensor) -> Tensor:
    """The largest logit of each row, the first of equals, int32; -1 where a row is not finite."""
    finite = logits.isfinite().all(-1)
    return torch.where(finite, logits.argmax(-1), -1).to(torch.int32)


def drawn(logits: Tensor, share: Tensor, temperature: float) -> Tensor:
    """One id per row of logits [W, V], int32: where `share` [W] falls in the cumulated softmax.

    With temperature 0, and where a row is not finite, as `greedy`.
    """
    best = greedy(logits)
    if temperature == 0:
        return best
    edges = (logits.double() / temperature).softmax(-1).cumsum(-1)
    wanted = share.double()[:, None].minimum(edges[:, -1:] * (1 - 1e-7))
    found = torch.searchsorted(edges, wanted, right=True)[:, 0]
    return torch.where(best < 0, best, found.to(torch.int32))


def count_accepted(ids: Tensor, next_ids: Tensor, rows: int) -> int:
    """How many of the drafted rows 1..rows-1 hold, from the front, what the row before chose."""
    for j in range(1, rows):
        if ids[j] < 0 or ids[j] != next_ids[j - 1]:
            return j - 1
    return rows - 1


def int32(value: int) -> Tensor:
    """A counter as the graphs give it, [1]."""
    return torch.tensor([value], dtype=torch.int32)
