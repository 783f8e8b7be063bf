"""The trunk graph: W rows of a Qwen3.5 text model with explicit KV and recurrent state."""

from __future__ import annotations

from functools import cached_property

import onnx_ir as ir

from eagle_chain.engines.config import TrunkConfig
from eagle_chain.engines.spec import Options
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.kv import Rows
from eagle_chain.export.lowering import DeltaRows, Heads, Portable, Rotary
from eagle_chain.export.sampling import sample


class TrunkGraph:
    """Records one trunk call; `engines.contract.trunk_spec` says what goes in and out.

    W rows, H hidden, C + W slots of a KV buffer; Hk key and Hv = Hk * G value heads of a linear
    layer.
    """

    def __init__(
        self,
        g: GraphBuilder,
        low: Portable,
        config: TrunkConfig,
        aux_layers: tuple[int, ...],
        options: Options,
    ) -> None:
        self.g, self.low, self.config, self.options = g, low, config, options
        self.aux_layers = aux_layers
        self.width = options.width
        self.position = g.input("position")

    @cached_property
    def positions(self) -> ir.Value:
        """Where each row stands, int32 [W]."""
        return self.g.Add(self.position, self.g.int32(*range(self.width)))

    @cached_property
    def was_kept(self) -> ir.Value:
        """Which rows of the last call are part of the sequence, bool [W]."""
        return self.g.Less(self.g.int32(*range(self.options.width)), self.g.input("kept"))

    def record(self) -> None:
        """Record the whole call, from ids to accepted count."""
        g, types = self.g, self.config.layer_types
        h = self.low.embed(g.input("ids"), "embed_tokens.weight")
        x = self.norm(h, "layers.0.input_layernorm.weight")
        rotary = self.rotary()
        features = []
        for i, kind in enumerate(types):
            mixed = (
                self.linear_mixer(x, i)
                if kind == "linear_attention"
                else self.full_mixer(x, i, rotary)
            )
            h, x = self.add_norm(h, mixed, f"layers.{i}.post_attention_layernorm.weight")
            follows = "norm" if i + 1 == len(types) else f"layers.{i + 1}.input_layernorm"
            h, x = self.add_norm(h, self.low.swiglu(x, f"layers.{i}.mlp"), f"{follows}.weight")
            if i in self.aux_layers:
                features.append(h)
        if features:
            g.output("features", g.Concat(*features, axis=-1))
        g.output("hidden", x)
        self.verify(x)

    def rotary(self) -> Rotary:
        """What rotates the rows of this call."""
        return self.low.rotary_rows(self.positions, self.options.kv_rows, self.config)

    def add_norm(self, h: ir.Value, delta: ir.Value, weight: str) -> tuple[ir.Value, ir.Value]:
        """The residual stream with `delta` added, and its norm."""
        h = self.g.Add(h, delta)
        return h, self.norm(h, weight)

    def norm(self, x: ir.Value, weight: str) -> ir.Value:
        """The trunk's RMSNorm: weights are stored around zero and used as 1 + w."""
        return self.low.rms_norm(x, weight, self.config.norm_eps, centred=True)

    def full_mixer(self, x: ir.Value, i: int, rotary: Rotary) -> ir.Value:
        """Gated attention: per head, q_proj holds the query rows and then the gate rows."""
        g, low, config, width = self.g, self.low, self.config, self.width
        prefix = f"layers.{i}.self_attn"
        heads = Heads.of(config)
        fused = g.linear(x, f"{prefix}.q_proj.weight")
        fused = g.reshape(fused, width, heads.query, 2 * heads.dim)
        query, gate = g.split(fused, -1, heads.dim, heads.dim)
        key = g.reshape(g.linear(x, f"{prefix}.k_proj.weight"), width, heads.kv, heads.dim)
        value = g.reshape(g.linear(x, f"{prefix}.v_proj.weight"), width, heads.kv, heads.dim)
        query = low.rotate(self.norm(query, f"{prefix}.q_norm.weight"), rotary, heads.dim)
        key = low.rotate(self.norm(key, f"{prefix}.k_norm.weight"), rotary, heads.dim)
        key, value = self.valid(key), self.valid(value)
        cache = low.write_cache(f"layers.{i}", key, value, self.position, width, heads)
        mixed = self.attention(query, cache, heads)
        gate = g.reshape(gate, width, heads.query * heads.dim)
        return g.linear(g.Mul(mixed, g.Sigmoid(gate)), f"{prefix}.o_proj.weight")

    def attention(self, query: ir.Value, cache: tuple[Rows, Rows], heads: Heads) -> ir.Value:
        """Attention of every row over the KV buffers."""
        return self.low.attention(
            query, cache, self.positions, self.width, heads, self.options.kv_rows
        )

    def valid(self, x: ir.Value, axes: int = 2) -> ir.Value:
        """Rows [W, ...] for a KV buffer: here all as they are, rejected ones are overwritten."""
        return x

    def linear_mixer(self, x: ir.Value, i: int) -> ir.Value:
        """Gated DeltaNet over W rows, on the state with the last call's kept rows folded in."""
        g, low, config, width = self.g, self.low, self.config, self.width
        prefix = f"layers.{i}.linear_attn"
        value_heads, value_dim = config.linear_value_heads, config.linear_value_dim
        S = self.committed_state(i)
        rows, key = self.delta_rows(x, self.conv(x, i), prefix)
        outputs, deltas, states = low.delta_rule(S, rows)

        g.output(f"layers.{i}.S.next", g.reshape(S, *self.state_shape()))
        g.output(f"layers.{i}.log_key.next", key)
        delta = g.reshape(g.Concat(*deltas, axis=0), width, value_heads, value_dim)
        g.output(f"layers.{i}.log_delta.next", delta)
        decay = g.reshape(g.Concat(*rows.decay, axis=0), width, value_heads)
        g.output(f"layers.{i}.log_decay.next", decay)
        if g.wants(f"layers.{i}.S_rows"):
            after = g.reshape(g.Concat(*states, axis=0), width, *self.state_shape())
            g.output(f"layers.{i}.S_rows", after)

        return self.gated(g.Concat(*outputs, axis=0), x, prefix)

    def gated(self, mixed: ir.Value, x: ir.Value, prefix: str) -> ir.Value:
        """What the delta rule gave (fp32) through the gated norm and out_proj, [W, H]."""
        g, low, config, width = self.g, self.low, self.config, self.width
        value_heads, value_dim = config.linear_value_heads, config.linear_value_dim
        mixed = g.reshape(mixed, width, value_heads, value_dim)
        gate = g.fp32(g.linear(x, f"{prefix}.in_proj_z.weight"))
        gate = low.silu(g.reshape(gate, width, value_heads, value_dim))
        scale = g.weight(f"{prefix}.norm.weight", "fp32")  # plain w here, not 1 + w
        normed = g.Mul(g.Mul(low.rms(mixed, config.norm_eps), scale), gate)
        flat = g.reshape(g.lower(normed), width, value_heads * value_dim)
        return g.linear(flat, f"{prefix}.out_proj.weight")

    def state_shape(self) -> tuple[int, int, int]:
        """[Hv, dk, dv]."""
        config = self.config
        return config.linear_value_heads, config.linear_key_dim, config.linear_value_dim

    def committed_state(self, i: int) -> ir.Value:
        """S after the rows of the last call that were kept, [1, Hv, dk, dv] fp32.

        The log of rejected rows may hold anything, NaN included, hence Where and not a product.
        """
        g, width, (heads, dk, dv) = self.g, self.options.width, self.state_shape()
        mask = g.reshape(self.was_kept, width, 1, 1, 1)

        def kept_rows(log: ir.Value, otherwise: float) -> list[ir.Value]:
            return g.split(g.Where(mask, log, g.scalar(otherwise)), 0, *[1] * width)

        key, delta, decay = (
            g.input(f"layers.{i}.{name}") for name in ("log_key", "log_delta", "log_decay")
        )
        log = (
            kept_rows(g.reshape(self.per_value_head(key, width), width, heads, dk, 1), 0.0),
            kept_rows(g.reshape(delta, width, heads, 1, dv), 0.0),
            kept_rows(g.reshape(decay, width, heads, 1, 1), 1.0),
        )
        S = g.reshape(g.input(f"layers.{i}.S"), 1, heads, dk, dv)
        return self.low.fold(S, log)

    def per_value_head(self, x: ir.Value, rows: int = 0) -> ir.Value:
        """[R, Hk, dk] -> [R, Hv, 1, dk]: value head h reads key head h // G."""
        g, rows, (heads, dk, _) = self.g, rows or self.width, self.state_shape()
        key_heads = self.config.linear_key_heads
        x = g.reshape(x, rows, key_heads, 1, dk)
        if heads > key_heads:
            x = g.Expand(x, g.ints(rows, key_heads, heads // key_heads, dk))
        return g.reshape(x, rows, heads, 1, dk)

    def conv(self, x: ir.Value, i: int) -> ir.Value:
        """The causal convolution over q, k and v [W, C]; its window is a state, read at `kept`."""
        g, config, width = self.g, self.config, self.width
        history = config.conv_kernel - 1
        u = g.linear(x, f"layers.{i}.linear_attn.in_proj_qkv.weight")  # raw: before conv and silu
        columns = g.Add(g.input("kept"), g.int32(*range(history)))
        past = g.Gather(g.input(f"layers.{i}.window"), columns, axis=1)  # [C, 3]
        window = g.Concat(g.Transpose(past, perm=[1, 0]), u, axis=0)  # [3 + W, C]
        g.output(f"layers.{i}.window.next", g.Transpose(self.window_columns(window), perm=[1, 0]))
        weight = f"layers.{i}.linear_attn.conv1d.weight"
        return self.low.conv(window, weight, width, config.conv_kernel)

    def window_columns(self, window: ir.Value) -> ir.Value:
        """What of the conv's inputs [3 + W, C] the next call may read; it reads from `kept` on."""
        return window

    def delta_inputs(
        self, x: ir.Value, qkv: ir.Value, prefix: str
    ) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value, ir.Value]:
        """What the delta rule reads, fp32, of x [W, H] and the conv's output [W, C].

        Query and key [W, Hk, dk], value [W, Hv * dv], logarithm of the decay and beta [W, Hv].
        """
        g, low, config, width = self.g, self.low, self.config, self.width
        key_heads, dk, dv = config.linear_key_heads, config.linear_key_dim, config.linear_value_dim
        heads = config.linear_value_heads
        sizes = (key_heads * dk, key_heads * dk, heads * dv)
        query, key, value = g.split(g.fp32(qkv), -1, *sizes)
        query = low.unit(g.reshape(query, width, key_heads, dk))
        query = g.Mul(query, g.scalar(dk**-0.5))
        key = low.unit(g.reshape(key, width, key_heads, dk))

        beta = g.fp32(g.Sigmoid(g.linear(x, f"{prefix}.in_proj_b.weight")))
        a = g.fp32(g.linear(x, f"{prefix}.in_proj_a.weight"))
        rate = low.softplus(g.Add(a, g.weight(f"{prefix}.dt_bias", "fp32")))
        log_decay = g.Neg(g.Mul(g.Exp(g.weight(f"{prefix}.A_log", "fp32")), rate))
        return query, key, value, log_decay, beta

    def delta_rows(self, x: ir.Value, qkv: ir.Value, prefix: str) -> tuple[DeltaRows, ir.Value]:
        """Split x [W, H] and the conv's output [W, C] into the rows of the delta rule, fp32.

        Also returns the normalised keys [W, Hk, dk] for the log.
        """
        g, width, (heads, dk, dv) = self.g, self.width, self.state_shape()
        query, key, value, log_decay, beta = self.delta_inputs(x, qkv, prefix)
        decay = g.Exp(log_decay)

        def rows(t: ir.Value, *shape: int) -> list[ir.Value]:
            return g.split(g.reshape(t, width, *shape), 0, *[1] * width)

        query, each_key = self.per_value_head(query), self.per_value_head(key)
        overlap = g.ReduceSum(g.Mul(query, each_key), g.ints(-1), keepdims=1)
        return DeltaRows(
            asked=rows(g.Concat(query, each_key, axis=2), heads, 2, dk),
            key=rows(each_key, heads, dk, 1),
            value=rows(value, heads, 1, dv),
            decay=rows(decay, heads, 1, 1),
            beta=rows(beta, heads, 1, 1),
            overlap=rows(overlap, heads, 1, 1),
        ), key

    def verify(self, hidden: ir.Value) -> None:
        """Greedy choice per row, and how many drafted rows it confirms from the front."""
        self.judge(self.g.linear(hidden, self.config.head))

    def judge(self, logits: ir.Value) -> None:
        """What follows from the logits [W, V]."""
        g, width = self.g, self.width
        logits = g.fp32(logits)
        next_ids = self.chosen(logits)
        accepted = self.accepted(next_ids) if width > 1 else g.int32(0)
        next_kept = g.Add(accepted, g.int32(1))
        g.output("next_ids", next_ids)
        g.output("accepted", accepted)
        g.output("pending", g.Gather(next_ids, accepted, axis=0))
        g.output("next_kept", next_kept)
        g.output("next_position", g.Add(self.position, next_kept))
        if g.wants("logits"):
            g.output("logits", logits)

    def chosen(self, logits: ir.Value) -> ir.Value:
        """The token behind each row, int32 [W], of fp32 logits [W, V].

        The largest logit, or, where the bundle can sample and the temperature is not 0, a draw.
        """
        g = self.g
        best = self.low.greedy(logits)
        if not self.options.sampling:
            return best
        temperature = g.input("temperature")
        share = g.Gather(g.input("uniform"), self.positions, axis=0)
        size = (self.width, self.config.vocab_size)
        drawn = sample(self.low, logits, size, share, temperature)
        draws = g.And(g.Greater(temperature, g.scalar(0.0)), g.GreaterOrEqual(best, g.int32(0)))
        return g.Where(draws, drawn, best)

    def accepted(self, next_ids: ir.Value) -> ir.Value:
        """Index of the first row j >= 1 whose id the row before would not have chosen, minus 1.

        Rows from `rows` on are no drafts, nor are ids below 0. The minimum is taken in fp32, which
        every TensorRT reduces, and counts are small.
        """
        g, width = self.g, self.width
        drafted = g.Slice(g.input("ids"), g.ints(1), g.ints(width), g.ints(0))
        chosen = g.Slice(next_ids, g.ints(0), g.ints(width - 1), g.ints(0))
        drafts = g.Sub(g.input("rows"), g.int32(1))
        index = g.int32(*range(width - 1))
        confirmed = g.And(g.Equal(drafted, chosen), g.GreaterOrEqual(drafted, g.int32(0)))
        confirmed = g.And(confirmed, g.Less(index, drafts))
        first_wrong = g.Where(confirmed, g.scalar(width - 1), g.cast(index, "fp32"))
        return g.cast(self.low.smallest(first_wrong), "int32")
