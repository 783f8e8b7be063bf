"""A NumPy pair that keeps the contract of `engines/contract.py`: three-layer trunk, encoder, draft.

The formulas are those of the contract, not of a real model, and every row is computed on its own,
so a row's bits do not depend on its neighbours. `Toy.decode` and `Toy.draft_rows` say what a chain
must give; they share the row arithmetic with the sessions, but no buffer, cache, counter or loop.
"""
# ruff: noqa: D101, D102

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from eagle_chain.engines.config import DraftConfig, TrunkConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.spec import EngineSpec, Options, TensorSpec
from eagle_chain.runtime.adaptive import Fixed
from eagle_chain.runtime.buffers import Buffer, HostBuffer, HostMemory
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.capacity import Larger, Rung
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.drafters import Drafter, EagleDrafter, NoDrafter
from eagle_chain.runtime.prefill import Follower, Prefill
from eagle_chain.runtime.session import check_tensors

Array = NDArray[Any]
Tensors = dict[str, Array]
F = np.float32
LAYERS = ("linear_attention", "full_attention", "linear_attention")
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 3, 4
HEADS, HEAD_DIM = 2, 3
VOCAB, DRAFT_VOCAB, HIDDEN, TAPS = 31, 13, 12, 4


def trunk_config() -> TrunkConfig:
    return TrunkConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=8,
        layer_types=LAYERS,
        attention_heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        linear_key_heads=KEY_HEADS,
        linear_value_heads=VALUE_HEADS,
        linear_key_dim=KEY_DIM,
        linear_value_dim=VALUE_DIM,
        conv_kernel=TAPS,
        norm_eps=1e-6,
        rope_theta=1e4,
        rotary_dim=2,
        tied_head=False,
        max_positions=4096,
        eos_ids=(),
    )


def draft_config() -> DraftConfig:
    return DraftConfig(
        hidden_size=HIDDEN,
        intermediate_size=8,
        attention_heads=HEADS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        norm_eps=1e-6,
        rope_theta=1e4,
        rotary_dim=2,
        draft_vocab_size=DRAFT_VOCAB,
        vocab_size=VOCAB,
        trunk_hidden_size=HIDDEN,
        aux_layers=(0, 1, 2),
    )


def by_row(weight: Array, rows: Array) -> Array:
    """Multiply weight [O, I] by rows [R, I]: [R, O], each row summed in the same order."""
    return (weight * rows[:, None, :]).sum(-1, dtype=F)


def sigmoid(x: Array) -> Array:
    return (1 / (1 + np.exp(-np.maximum(x, F(-80))))).astype(F)


def choice(logits: Array) -> int:
    return int(logits.argmax()) if np.isfinite(logits).all() else -1


def fold(S: Array, log: Sequence[Array], kept: int) -> Array:
    """S [Hv, dk, dv] after the first `kept` rows of a log (keys, deltas, decays)."""
    for key, delta, decay in list(zip(*log, strict=True))[:kept]:
        key = np.repeat(key, VALUE_HEADS // KEY_HEADS, 0)
        S = S * decay[:, None, None] + key[:, :, None] * delta[:, None, :]
    return S


def attend(query: Array, key: Array, value: Array, last: int) -> Array:
    """One row over slots 0..last of KV [heads, slots, d]; a NaN in any slot of V comes through."""
    scores = (key * query[:, None, :]).sum(-1, dtype=F)
    scores = np.where(np.arange(key.shape[1]) <= last, scores, F(-1e30))
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True, dtype=F)
    return (value * weights[:, :, None]).sum(1, dtype=F).reshape(-1)


@dataclass
class Step:
    """What the oracle knows after one more token."""

    choice: int
    feature: Array
    states: Tensors


class CountingMemory(HostMemory):
    """Host memory that counts what it hands out."""

    def __init__(self) -> None:
        self.count = 0

    def allocate(self, spec: TensorSpec) -> HostBuffer:
        self.count += 1
        return super().allocate(spec)


@dataclass
class ToySession:
    """A session over one function of named arrays."""

    spec: EngineSpec
    memory: CountingMemory
    function: Callable[[Tensors], None]
    calls: list[dict[str, Any]] = field(default_factory=list)  # plain int32 inputs of every run
    fails: list[Exception] = field(default_factory=list)  # raised by the next runs

    def bind(self, tensors: Mapping[str, Buffer]) -> ToyBinding:
        check_tensors(self.spec, self.memory, tensors)
        arrays = {}
        for name, buffer in tensors.items():
            assert isinstance(buffer, HostBuffer)
            arrays[name] = buffer.array
        return ToyBinding(self, arrays)


@dataclass
class ToyBinding:
    session: ToySession
    arrays: Tensors

    def run(self) -> None:
        session = self.session
        ints = [t.name for t in session.spec.inputs if t.dtype == "int32"]
        session.calls.append({name: self.arrays[name].tolist() for name in ints})
        if session.fails:
            raise session.fails.pop()
        session.function(self.arrays)


class Toy:
    """Weights, sessions and oracles of one random pair."""

    def __init__(
        self,
        seed: int = 0,
        width: int = 5,
        capacity: int = 64,
        prefill: int = 0,
        smaller: tuple[int, ...] = (),
    ) -> None:
        rng = np.random.default_rng(seed)

        def matrix(*shape: int) -> Array:
            return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(F)

        config = trunk_config()
        self.seed, self.width, self.capacity = seed, width, capacity
        self.options = Options(width=width, capacity=capacity, prefill=prefill, smaller=smaller)
        self.specs = engine_specs(config, draft_config(), self.options)
        self.embedding = matrix(VOCAB, HIDDEN) * 4
        self.places = matrix(self.options.kv_rows, HIDDEN) * 4  # keeps greedy decoding from looping
        channels, attention = config.conv_channels, HEADS * HEAD_DIM
        self.layers = [
            {
                "qkv": matrix(channels, HIDDEN) * 2,
                "conv": matrix(channels, TAPS),
                "beta": matrix(VALUE_HEADS, HIDDEN),
                "decay": matrix(VALUE_HEADS, HIDDEN),
                "out": matrix(HIDDEN, VALUE_HEADS * VALUE_DIM) * 2,
            }
            if kind == "linear_attention"
            else {name: matrix(attention, HIDDEN) * 2 for name in ("query", "key", "value")}
            | {"out": matrix(HIDDEN, attention) * 2}
            for kind in LAYERS
        ]
        self.head = matrix(VOCAB, HIDDEN)
        self.fc = matrix(HIDDEN, 3 * HIDDEN)
        self.draft = {name: matrix(attention, 2 * HIDDEN) * 2 for name in ("query", "key", "value")}
        self.draft_out, self.draft_head = matrix(HIDDEN, attention), matrix(DRAFT_VOCAB, HIDDEN)
        self.target_ids = np.sort(rng.permutation(VOCAB)[:DRAFT_VOCAB])
        self.nan_at: set[int] = set()  # trunk rows at these positions are not numbers
        self.draft_nan_at: set[int] = set()
        self.memory = CountingMemory()
        functions = {
            "trunk": self.run_trunk,
            "encoder": self.run_encoder,
            "draft": self.run_draft,
            "draft_step": self.run_draft,
            "prefill": self.run_prefill,
            "draft_prefill": self.run_draft_prefill,
        }
        self.sessions = {
            name: ToySession(spec, self.memory, functions[self.options.of_engine(name)[0]])
            for name, spec in self.specs.items()
        }

    # --- sessions ---

    def run_trunk(self, t: Tensors) -> None:
        ids, (position,), (rows,), (kept,) = (t[n] for n in ("ids", "position", "rows", "kept"))
        h = self.layered(t, ids, position, kept)
        y = [choice(row) for row in by_row(self.head, h)]
        right = [int(i) >= 0 and i == c for i, c in zip(ids[1:rows], y, strict=False)]
        accepted = (*right, False).index(False)
        t["next_ids"][:] = y
        t["accepted"][:] = accepted
        t["pending"][:] = y[accepted]
        t["next_kept"][:] = accepted + 1
        t["next_position"][:] = position + accepted + 1

    def layered(self, t: Tensors, ids: Array, position: int, kept: int) -> Array:
        """All layers; sets features, hidden and the states."""
        slots = t["layers.1.key"].shape[2]
        assert position + len(ids) <= slots, "rows past the end of the KV buffer"
        h = self.embed(ids, position, self.nan_at)
        taps = []
        for i, (kind, w) in enumerate(zip(LAYERS, self.layers, strict=True)):
            mixer = self.linear if kind == "linear_attention" else self.full
            h = h + mixer(h, w, f"layers.{i}", t, position, kept)
            taps.append(h)
        t["features"][:] = np.concatenate(taps, 1)
        t["hidden"][:] = h
        return h

    def run_prefill(self, t: Tensors) -> None:
        """The rows one by one as ever, then folded; nothing is left of those that are not valid."""
        ids, (position,), (rows,), (kept,) = (t[n] for n in ("ids", "position", "rows", "kept"))
        wide = dict(t)
        for name in (n for n in t if n.endswith(".next")):
            if ".log_" in name:
                wide[name] = np.zeros((len(ids), *t[name].shape[1:]), F)
            elif name.endswith("window.next"):
                wide[name] = np.zeros((len(t[name]), TAPS - 1 + len(ids)), F)
        h = self.layered(wide, ids, position, kept)
        for i, kind in enumerate(LAYERS):
            at = f"layers.{i}"
            if kind == "full_attention":
                for part in ("key", "value"):
                    t[f"{at}.{part}.next"][:, :, position + rows : position + len(ids)] = 0
                continue
            log = [wide[f"{at}.{p}.next"] for p in ("log_key", "log_delta", "log_decay")]
            t[f"{at}.S.next"][:] = fold(t[f"{at}.S.next"], log, rows)
            for part in ("log_key", "log_delta", "log_decay", "window"):
                t[f"{at}.{part}.next"][:] = 0
            last = wide[f"{at}.window.next"][:, rows : rows + TAPS - 1]
            t[f"{at}.window.next"][:, : TAPS - 1] = last
        t["pending"][:] = choice(by_row(self.head, h[rows - 1 : rows])[0])
        t["next_kept"][:], t["next_position"][:] = 0, position + rows

    def embed(self, ids: Array, position: int, nan_at: set[int]) -> Array:
        h = self.embedding[np.maximum(ids, 0)] + self.places[position : position + len(ids)]
        for row in range(len(ids)):
            if ids[row] >= 0 and position + row in nan_at:
                h[row] = np.nan
        return h

    def linear(self, h: Array, w: Tensors, at: str, t: Tensors, position: int, kept: int) -> Array:
        log = [t[f"{at}.{part}"] for part in ("log_key", "log_delta", "log_decay")]
        S = fold(t[f"{at}.S"], log, kept)
        t[f"{at}.S.next"][:] = S
        past = t[f"{at}.window"][:, kept : kept + TAPS - 1]
        window = np.concatenate([past, by_row(w["qkv"], h).T], 1)
        t[f"{at}.window.next"][:] = window
        betas = sigmoid(by_row(w["beta"], h))
        decays = np.exp(-sigmoid(by_row(w["decay"], h))).astype(F)
        outputs = []
        for r in range(len(h)):
            mixed = (w["conv"] * window[:, r : r + TAPS]).sum(1, dtype=F)
            mixed = mixed * sigmoid(mixed)
            sizes = [KEY_HEADS * KEY_DIM, 2 * KEY_HEADS * KEY_DIM]
            query, key, value = (
                part.reshape(-1, d)
                for part, d in zip(
                    np.split(mixed, sizes), (KEY_DIM, KEY_DIM, VALUE_DIM), strict=True
                )
            )
            key = key / np.sqrt((key * key).sum(-1, keepdims=True, dtype=F) + F(1e-6))
            keys, queries = (np.repeat(x, VALUE_HEADS // KEY_HEADS, 0) for x in (key, query))
            decayed = S * decays[r][:, None, None]
            delta = betas[r][:, None] * (value - (decayed * keys[:, :, None]).sum(1, dtype=F))
            S = decayed + keys[:, :, None] * delta[:, None, :]
            outputs.append((S * queries[:, :, None]).sum(1, dtype=F).reshape(-1))
            t[f"{at}.log_key.next"][r] = key
            t[f"{at}.log_delta.next"][r] = delta
        t[f"{at}.log_decay.next"][:] = decays
        return by_row(w["out"], np.stack(outputs))

    def full(self, h: Array, w: Tensors, at: str, t: Tensors, position: int, kept: int) -> Array:
        rows = len(h)
        key, value = t[f"{at}.key.next"], t[f"{at}.value.next"]
        for name, cache in (("key", key), ("value", value)):
            new = by_row(w[name], h).reshape(rows, HEADS, HEAD_DIM)
            cache[0, :, position : position + rows] = new.transpose(1, 0, 2)
        queries = by_row(w["query"], h).reshape(rows, HEADS, HEAD_DIM)
        mixed = [attend(queries[r], key[0], value[0], position + r) for r in range(rows)]
        return by_row(w["out"], np.stack(mixed))

    def run_encoder(self, t: Tensors) -> None:
        t["g"][:] = by_row(self.fc, t["features"])

    def run_draft(self, t: Tensors) -> None:
        g, (position,), (row,) = (t[n] for n in ("g", "position", "row"))
        x = self.write_draft_rows(t, g)
        key, value = t["draft.key.next"], t["draft.value.next"]
        query = by_row(self.draft["query"], x[row : row + 1]).reshape(HEADS, HEAD_DIM)
        mixed = attend(query, key[0], value[0], position + row)[None]
        recurrence = g[row : row + 1] + by_row(self.draft_out, mixed)
        best = choice(by_row(self.draft_head, recurrence)[0])
        t["token"][:] = self.target_ids[best] if best >= 0 else -1
        t["g_next"][:] = recurrence
        t["next_position"][:] = position + row + 1

    def write_draft_rows(self, t: Tensors, g: Array) -> Array:
        """Set the draft's KV rows of this call; returns what they are made of."""
        ids, (position,) = t["ids"], t["position"]
        slots = t["draft.key"].shape[2]
        assert position + len(ids) <= slots, "rows past the end of the KV buffer"
        x = np.concatenate([self.embed(ids, position, self.draft_nan_at), g], 1)
        for name in ("key", "value"):
            new = by_row(self.draft[name], x).reshape(len(ids), HEADS, HEAD_DIM)
            t[f"draft.{name}.next"][0, :, position : position + len(ids)] = new.transpose(1, 0, 2)
        return x

    def run_draft_prefill(self, t: Tensors) -> None:
        (position,), (rows,) = t["position"], t["rows"]
        self.write_draft_rows(t, by_row(self.fc, t["features"]))
        for name in ("key", "value"):
            t[f"draft.{name}.next"][:, :, position + rows : position + len(t["ids"])] = 0

    # --- oracles ---

    def zeros(self, spec: EngineSpec) -> Tensors:
        dtypes = {"fp32": F, "int32": np.int32}
        return {
            t.name: np.zeros(t.shape, dtypes[t.dtype])
            for t in (*spec.all_inputs, *spec.all_outputs)
        }

    def decode(self, prompt: Sequence[int], new: int) -> tuple[list[int], list[Step]]:
        """Greedy decoding, one token a call; returns prompt + `new` tokens and a step per token."""
        sequence, steps = list(prompt), list[Step]()
        t = self.zeros(self.specs["trunk"])
        while len(sequence) < len(prompt) + new:
            n = len(steps)
            t["ids"][:] = [sequence[n], *[-1] * (self.width - 1)]
            t["position"][:], t["rows"][:], t["kept"][:] = n, 1, min(n, 1)
            for pair in self.specs["trunk"].states:
                if pair.in_place:
                    t[pair.output] = t[pair.input]
            self.run_trunk(t)
            for pair in self.specs["trunk"].states:
                t[pair.input], t[pair.output] = t[pair.output], t[pair.input]
            states = {pair.input: t[pair.input] for pair in self.specs["trunk"].states}
            live = live_states(states, 1, n + 1)
            steps.append(Step(int(t["next_ids"][0]), t["features"][0].copy(), live))
            if n + 1 >= len(prompt):
                sequence.append(steps[-1].choice)
        return sequence, steps

    def draft_rows(
        self, tokens: Sequence[int], features: Sequence[Array], k: int
    ) -> tuple[list[int], Tensors]:
        """The k guesses after `tokens`, whose rows all come from true features, and the draft KV.

        Row i pairs tokens[i + 1] with features[i]; there are len(tokens) - 1 rows.
        """
        t = self.zeros(self.specs["draft_step"])
        for part in ("key", "value"):
            t[f"draft.{part}.next"] = t[f"draft.{part}"]
        for i, token in enumerate(tokens[1:]):
            t["ids"][:], t["position"][:] = token, i
            t["g"][:] = by_row(self.fc, features[i][None])
            self.run_draft(t)
        n = len(tokens) - 1
        kv = {part: t[f"draft.{part}"][0, :, :n].copy() for part in ("key", "value")}
        guesses = [int(t["token"][0])]
        for _ in range(k - 1):
            t["ids"][:], t["g"][:] = t["token"], t["g_next"]
            t["position"][:] = t["next_position"]
            self.run_draft(t)
            guesses.append(int(t["token"][0]))
        return guesses[:k], kv

    # --- chains ---

    def session(self, name: str, capacity: int) -> ToySession:
        return self.sessions[self.options.engine(name, capacity)]

    def cache(self, capacity: int | None = None) -> Cache:
        capacity = capacity or self.capacity
        spec = self.session("trunk", capacity).spec
        return Cache(spec, self.memory, capacity, engines=self.seed)

    def eagle(self, cache: Cache, **options: Any) -> EagleDrafter:
        draft, step = (self.session(n, cache.capacity) for n in ("draft", "draft_step"))
        return EagleDrafter(cache, self.sessions["encoder"], draft, step, **options)

    def chain(self, drafter: Callable[[Cache], Drafter] | None = None, **options: Any) -> Chain:
        first, *sizes = self.options.capacities
        trunk, cache, made, prefill = self.parts(first, drafter or self.eagle)
        larger = [
            Larger(
                size,
                self.options.at(size).prefill,
                lambda size=size: Rung(*self.parts(size, drafter or self.eagle)),
            )
            for size in sizes
        ]
        options |= {"vocab_size": VOCAB, "prefill": prefill, "larger": larger}
        return Chain(trunk, cache, made, **options)

    def parts(
        self, capacity: int, drafter: Callable[[Cache], Drafter]
    ) -> tuple[ToySession, Cache, Drafter, Prefill | None]:
        cache = self.cache(capacity)
        made, prefill = drafter(cache), None
        if self.options.at(capacity).prefill:
            inner = made.drafter if isinstance(made, Scripted) else made
            follower = None
            if isinstance(inner, EagleDrafter) and not inner.scratch:
                follower = Follower(self.session("draft_prefill", capacity), inner.kv)
            prefill = Prefill(self.session("prefill", capacity), cache, follower)
        return self.session("trunk", capacity), cache, made, prefill

    def prompt(self, seed: int, length: int) -> list[int]:
        return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def live_states(states: Mapping[str, Array], kept: int, length: int) -> Tensors:
    """The part of the trunk's states that belongs to the sequence, as copies."""
    live: Tensors = {}
    for name, array in states.items():
        at, part = name.rsplit(".", 1)
        if part == "S":
            log = [states[f"{at}.{p}"] for p in ("log_key", "log_delta", "log_decay")]
            live[name] = fold(array, log, kept).copy()
        elif part == "window":
            live[name] = array[:, kept : kept + TAPS - 1].copy()
        elif part in ("key", "value"):
            live[name] = array[0, :, :length].copy()
    return live


def cache_states(cache: Cache, spec: EngineSpec) -> Tensors:
    """The trunk's state inputs of the next call."""
    tensors = cache.tensors(cache.parity)
    return {pair.input: tensors[pair.input].read() for pair in spec.states}


class Script(NoDrafter):
    """A drafter told the truth: right for as many tokens as `counts` says, then wrong.

    Args:
        cache: Of the chain.
        truth: Prompt and continuation as plain decoding gives them.
        counts: How many drafts to get right, one per round.
        wrong: Added to the true id to make a wrong one.
        vocab: Number of ids.
    """

    def __init__(
        self,
        cache: Cache,
        truth: Sequence[int],
        counts: Iterator[int],
        wrong: int = 1,
        vocab: int = VOCAB,
    ) -> None:
        self.cache, self.truth, self.counts = cache, truth, counts
        self.wrong, self.vocab = wrong, vocab
        self.planned: list[int] = []
        self.told: list[tuple[int, int]] = []  # length of the sequence, token said to follow it

    def observe(self, token: int) -> None:
        self.told.append((len(self.cache.tokens), token))

    def propose(self, token: int, k: int) -> list[int]:
        self.observe(token)
        n = len(self.cache.tokens)
        true = self.truth[n + 1 : n + 1 + k]
        right = min(next(self.counts), len(true))
        self.planned.append(right)
        wrong = [(token + self.wrong) % self.vocab for token in true[right:]]
        return [*true[:right], *wrong]


class Paced(Fixed):
    """Asks for drafts as a list says."""

    def __init__(self, ks: Sequence[int]) -> None:
        super().__init__(4)
        self.ks = itertools.cycle(ks)

    def choose(self) -> int:
        return next(self.ks)

    def repeats(self, k: int) -> bool:
        return False


class Over:
    """A drafter over another one, which it leads along the sequence."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter

    def observe(self, token: int) -> None:
        self.drafter.observe(token)

    def settle(self) -> None:
        self.drafter.settle()

    def reset(self) -> None:
        self.drafter.reset()


class Scripted(Over):
    """Another drafter's guesses are recorded, the script's are proposed."""

    def __init__(self, drafter: Drafter, script: Script) -> None:
        super().__init__(drafter)
        self.script = script
        self.guesses: list[tuple[int, list[int]]] = []  # length of the sequence, guesses

    def observe(self, token: int) -> None:
        self.script.observe(token)
        super().observe(token)

    def propose(self, token: int, k: int) -> list[int]:
        self.guesses.append((len(self.script.cache.tokens), self.drafter.propose(token, k)))
        return self.script.propose(token, k)
