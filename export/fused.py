"""The `ort-fused` profile: the kernels of `engines/kernels`, as ONNX Runtime custom operators.

A layer is seven or eight launches, and the weights are read as the checkpoint holds them: matrices
that share an input are several inputs of one node, so nothing has to be joined or transposed. Only
sums of whole rows differ from the other profiles; the states have the same layout.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.kv import names
from eagle_chain.engines.spec import Options
from eagle_chain.export.builder import ONNX_DTYPE, GraphBuilder
from eagle_chain.export.draft import ATTENTION, LAYER, normed_features, scaled, swiglu, trunk_id
from eagle_chain.export.kv import kind_of
from eagle_chain.export.lowering import Heads, Portable, Rotary, rotary_tables
from eagle_chain.export.trunk import TrunkGraph

DOMAIN = "eagle_chain"
# Pieces in which attention takes a KV cache: up to which slot, how many slots each. As in
# `stretch_of` of the kernels.
STRETCHES = ((1024, 32), (4096, 64), (8192, 128), (math.inf, 256))
PICK_BLOCKS = 64
KINDS = {"q8_0": 4, "q5_1": 5}  # `KvKind` of the kernels; floats are told by their dtype
ATTEND = {("q8_0", "q8_0"): "AttendQ8", ("q8_0", "q5_1"): "AttendQ8Q5"}


class Fused(Portable):
    """Nodes of domain `eagle_chain`, with the shapes of their results."""

    norm_width = 8192  # the widest row that one block of the norm kernel holds

    def rms_norm(self, x: ir.Value, weight: str, eps: float, *, centred: bool) -> ir.Value:
        """RMSNorm of x [R, H] in fp32 with one rounding at the end."""
        g = self.g
        like = (g.dtype, _shape(x))
        if _shape(x)[-1] > self.norm_width:  # a norm over the features of all aux layers
            normed = super().rms_norm(x, weight, eps, centred=centred)
            return self.shaped(normed, *_shape(x))
        (normed,) = g.node(
            DOMAIN, "Norm", [x, g.weight(weight, "fp32")], [like], epsilon=eps, centred=int(centred)
        )
        return normed

    def add_norm(
        self, h: ir.Value, delta: ir.Value, weight: str, eps: float, *, centred: bool
    ) -> tuple[ir.Value, ir.Value]:
        """H + delta, and its norm."""
        g = self.g
        like = (g.dtype, _shape(delta))
        total, normed = g.node(
            DOMAIN,
            "AddNorm",
            [h, delta, g.weight(weight, "fp32")],
            [like, like],
            epsilon=eps,
            centred=int(centred),
        )
        return total, normed

    def linear(self, x: ir.Value, *names: str) -> ir.Value:
        """X [R, K] times up to four weights [N, K], side by side: [R, sum of N]."""
        g = self.g
        width = sum(g.weight_shape(name)[0] for name in names)
        weights = [g.weight(name) for name in names]
        (y,) = g.node(DOMAIN, "Linear", [x, *weights], [(g.dtype, (_shape(x)[0], width))])
        return y

    def swiglu(self, x: ir.Value, prefix: str) -> ir.Value:
        """down(silu(gate(x)) * up(x)), x [R, H]."""
        g = self.g
        names = (f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight")
        inner = (_shape(x)[0], g.weight_shape(names[0])[0])
        weights = [g.weight(name) for name in names]
        (y,) = g.node(DOMAIN, "GatedLinear", [x, *weights], [(g.dtype, inner)])
        return self.linear(y, f"{prefix}.down_proj.weight")

    def embed(self, ids: ir.Value, table: str) -> ir.Value:
        """Rows of the embedding, with their shape."""
        rows = super().embed(ids, table)
        return self.shaped(rows, *_shape(ids), self.g.weight_shape(table)[1])

    def shaped(self, x: ir.Value, *shape: int) -> ir.Value:
        """`x`, a value of the compute dtype, with its shape noted."""
        x.dtype, x.shape = ONNX_DTYPE[self.g.dtype], ir.Shape(shape)
        return x

    def attend(
        self,
        query: ir.Value,
        kv: ir.Value,
        states: tuple[str, str],
        places: tuple[ir.Value, ir.Value],
        heads: Heads,
        rotary: Rotary,
        slots: int,
        *,
        norms: tuple[str, str] | None = None,
        gated: bool = False,
        eps: float = 0.0,
        kv_offset: int = 0,
    ) -> ir.Value:
        """Norms, rotary, KV rows and attention; sets the outputs of `states`.

        Args:
            query: [Rq, ...], from column 0 the heads; if `gated` each is followed by its gate.
            kv: [R, ...], from column `kv_offset` the key heads, then the value heads.
            states: Names of the keys and of the values.
            places: Where row 0 of `kv` and of `query` stand.
            heads: Sizes.
            rotary: Whole tables, fp32 [slots, rotary_dim / 2].
            slots: Rows of the KV buffers.
            norms: Weights of the q and k norms, used as 1 + w if `gated`, else as they are.
            gated: Whether it is the trunk's attention.
            eps: Of the norms.
            kv_offset: See `kv`.
        """
        g = self.g
        rows, pieces = _shape(query)[0], stretches(slots)
        pairs = rows * heads.query
        gates = [g.weight(name, "fp32") for name in norms] if norms else [None, None]
        kinds = kind_of(g.spec, states[0]), kind_of(g.spec, states[1])
        planes = [n for k, s in zip(kinds, states, strict=True) for n in names(k, s)]
        held = {pair.input: (pair.dtype, pair.shape) for pair in g.spec.states}
        y, _, _, _, *results = g.node(
            DOMAIN,
            ATTEND.get(kinds, "Attend"),
            [query, kv, *places, rotary.cos, rotary.sin, *gates, *map(g.input, planes)],
            [
                (g.dtype, (rows, heads.query * heads.dim)),
                ("fp32", (pairs, pieces)),
                ("fp32", (pairs, pieces)),
                ("fp32", (pairs, pieces, heads.dim)),
                *(held[name] for name in planes),
            ],
            epsilon=eps,
            centred=int(gated),
            gated=int(gated),
            heads=heads.query,
            kv_offset=kv_offset,
            key_kind=KINDS.get(kinds[0], 0),
            value_kind=KINDS.get(kinds[1], 0),
        )
        for name, result in zip(planes, results, strict=True):
            g.output(f"{name}.next", result)
        return y

    def whole_rotary(self, slots: int, config: TrunkConfig | DraftConfig) -> Rotary:
        """Cos and sin of every position, fp32."""
        cos, sin = (self.g.constant(t) for t in rotary_tables(slots, config))
        return Rotary(cos, sin, config.rotary_dim)

    def pick(self, logits: ir.Value) -> ir.Value:
        """Argmax per row -> int32 [R]; -1 where a row is not finite."""
        rows = _shape(logits)[0]
        scratch = (rows, PICK_BLOCKS)
        ids, *_ = self.g.node(
            DOMAIN,
            "Greedy",
            [logits],
            [("int32", (rows,)), ("fp32", scratch), ("int32", scratch)],
        )
        return ids


class FusedTrunk(TrunkGraph):
    """The trunk in few nodes; the same spec as every other profile's."""

    low: Fused

    def rotary(self) -> Rotary:
        """The whole tables: the kernel picks the rows."""
        return self.low.whole_rotary(self.options.kv_rows, self.config)

    def add_norm(self, h: ir.Value, delta: ir.Value, weight: str) -> tuple[ir.Value, ir.Value]:
        """One node."""
        return self.low.add_norm(h, delta, weight, self.config.norm_eps, centred=True)

    def full_mixer(self, x: ir.Value, i: int, rotary: Rotary) -> ir.Value:
        """Gated attention behind one product for q, gate, k and v."""
        low, config, prefix = self.low, self.config, f"layers.{i}.self_attn"
        heads = Heads.of(config)
        fused = low.linear(x, *(f"{prefix}.{part}_proj.weight" for part in "qkv"))
        mixed = low.attend(
            fused,
            fused,
            (f"layers.{i}.key", f"layers.{i}.value"),
            (self.position, self.position),
            heads,
            rotary,
            self.options.kv_rows,
            norms=(f"{prefix}.q_norm.weight", f"{prefix}.k_norm.weight"),
            gated=True,
            eps=config.norm_eps,
            kv_offset=2 * heads.query * heads.dim,
        )
        return low.linear(mixed, f"{prefix}.o_proj.weight")

    def linear_mixer(self, x: ir.Value, i: int) -> ir.Value:
        """Gated DeltaNet behind one product for u, z, b and a."""
        g, low, config = self.g, self.low, self.config
        prefix = f"layers.{i}.linear_attn"
        fused = low.linear(
            x, *(f"{prefix}.in_proj_{part}.weight" for part in ("qkv", "z", "b", "a"))
        )
        states = [f"layers.{i}.{part}" for part in ("S", "log_key", "log_delta", "log_decay")]
        states.append(f"layers.{i}.window")
        like = {pair.input: (pair.dtype, pair.shape) for pair in g.spec.states}
        outputs = [like[name] for name in states]
        flat = (self.width, config.linear_value_heads * config.linear_value_dim)
        every = g.wants(f"layers.{i}.S_rows")
        if every:
            outputs.append(("fp32", (self.width, *self.state_shape())))
        vectors = ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        S, window = g.input(states[0]), g.input(states[-1])
        y, *results = g.node(
            DOMAIN,
            "GatedDelta",
            [
                *(fused, window, S, *map(g.input, states[1:-1]), g.input("kept")),
                *(g.weight(f"{prefix}.{name}", "fp32") for name in vectors),
            ],
            [(g.dtype, flat), *outputs],
            epsilon=config.norm_eps,
        )
        for name, result in zip(states, results, strict=False):
            g.output(f"{name}.next", result)
        if every:
            g.output(f"layers.{i}.S_rows", results[-1])
        return low.linear(y, f"{prefix}.out_proj.weight")

    def verify(self, hidden: ir.Value) -> None:
        """Greedy choice per row and the accepted count in one node."""
        g = self.g
        logits = self.low.linear(hidden, self.config.head)
        if self.options.sampling:
            self.judge(logits)
            return
        names = ("next_ids", "accepted", "pending", "next_kept", "next_position")
        scratch = (self.width, PICK_BLOCKS)
        results = g.node(
            DOMAIN,
            "Verify",
            [logits, g.input("ids"), self.position, g.input("rows")],
            [
                ("int32", (self.width,)),
                *[("int32", (1,))] * 4,
                *[("fp32", scratch), ("int32", scratch)],
            ],
        )
        for name, value in zip(names, results, strict=False):
            g.output(name, value)
        if g.wants("logits"):
            g.output("logits", g.fp32(logits))


def record_fused_draft(
    g: GraphBuilder, low: Fused, config: DraftConfig, rows: int, options: Options
) -> None:
    """One draft call over R rows; see `draft.record_draft`."""
    heads = Heads.of(config)
    eps, hidden = config.norm_eps, config.hidden_size
    position, row = g.input("position"), g.input("row")

    def chosen(x: ir.Value) -> ir.Value:
        if rows == 1:
            return x
        return low.shaped(g.Gather(x, row, axis=0), 1, _shape(x)[1])

    embedded = low.rms_norm(
        low.embed(g.input("ids"), config.embedding),
        f"{LAYER}.input_layernorm.weight",
        eps,
        centred=False,
    )
    normed = low.rms_norm(g.input("g"), f"{LAYER}.hidden_norm.weight", eps, centred=False)
    joined = low.shaped(g.Concat(embedded, normed, axis=-1), rows, 2 * hidden)
    here = g.Add(position, row)  # int32 [1]: where the wanted row stands
    names = [f"midlayer.self_attn.{part}_proj" for part in "qkv"]
    if rows == 1:
        query = kv = biased(g, low, joined, names, config)
        kv_offset = heads.query * heads.dim
    else:
        query = biased(g, low, chosen(joined), names[:1], config)
        kv, kv_offset = biased(g, low, joined, names[1:], config), 0
    norms = f"{ATTENTION}.q_norm.weight", f"{ATTENTION}.k_norm.weight"
    mixed = low.attend(
        query,
        kv,
        ("draft.key", "draft.value"),
        (position, here),
        heads,
        low.whole_rotary(options.kv_rows, config),
        options.kv_rows,
        norms=norms if config.qk_norm else None,
        eps=eps,
        kv_offset=kv_offset,
    )
    x, z = low.add_norm(
        chosen(normed if config.norm_before_residual else g.input("g")),
        biased(g, low, mixed, ["midlayer.self_attn.o_proj"], config),
        f"{LAYER}.post_attention_layernorm.weight",
        eps,
        centred=False,
    )
    inner = low.shaped(swiglu(g, low, z, config), 1, hidden)
    total, last = low.add_norm(x, inner, "draft.norm.weight", eps, centred=False)
    logits = low.linear(last, config.head)
    if config.logit_scale != 1:
        raised = scaled(g, g.fp32(logits), config)
        logits = low.shaped(g.lower(raised), 1, config.draft_vocab_size)
    g.output("token", trunk_id(g, low.pick(logits), config))
    g.output("g_next", last if config.norm_output else total)
    g.output("next_position", g.Add(here, g.int32(1)))
    if g.wants("logits"):
        g.output("logits", g.fp32(logits))


def record_fused_encoder(g: GraphBuilder, low: Fused, config: DraftConfig) -> None:
    """`features` [W, A*Ht] -> `g` [W, H]."""
    x = normed_features(g, low, config)
    width = (_shape(g.input("features"))[0], config.feature_size)
    g.output("g", biased(g, low, low.shaped(x, *width), ["fc"], config) if config.fc else x)


def biased(
    g: GraphBuilder, low: Fused, x: ir.Value, names: list[str], config: DraftConfig
) -> ir.Value:
    """`x` times weights of the draft side by side, plus their biases where they have any."""
    y = low.linear(x, *(f"draft.{name}.weight" for name in names))
    if not any(name in config.biases for name in names):
        return y
    pieces = []
    for name in names:
        if name in config.biases:
            pieces.append(g.weight(f"draft.{name}.bias"))
        else:
            width = g.weight_shape(f"draft.{name}.weight")[0]
            pieces.append(g.constant(np.zeros(width, g.numpy_dtype)))
    bias = pieces[0] if len(pieces) == 1 else g.Concat(*pieces, axis=0)
    return low.shaped(g.Add(y, bias), *_shape(y))


def stretches(slots: int) -> int:
    """How many pieces attention cuts a KV cache into."""
    pieces, start = 0, 0
    for until, size in STRETCHES:
        pieces += math.ceil((min(slots, until) - start) / size)
        if slots <= until:
            break
        start = int(until)
    return pieces


def _shape(x: ir.Value) -> tuple[int, ...]:
    assert x.shape is not None, "every value that enters a fused node has a shape"
    return tuple(extent for extent in x.shape if isinstance(extent, int))
