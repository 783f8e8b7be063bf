"""The MTP head: reference against a float64 oracle, graphs against the reference, chain exact."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import torch

from eagle_chain.engines.bound import with_bound_weights
from eagle_chain.engines.cli import main
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.spec import Options
from eagle_chain.export import eager, reference
from eagle_chain.export.bundle import Pair, weight_table
from eagle_chain.export.checkpoint import open_mtp, open_trunk
from eagle_chain.export.graph import STANDARD_PROFILES, build_graphs
from eagle_chain.runtime.drafters import EagleDrafter
from eagle_chain.runtime.load import Engines, chosen_drafter, open_engines
from eagle_chain.runtime.tokenizer import Tokenizer
from tests.mtp_oracle import MtpOracle
from tests.onnx_engine import Arrays, OnnxEngine
from tests.toy import Paced, Script, Scripted
from tests.toy_pair import exported, save, trunk_parts, write_pair, write_tokenizer

DEMO = Path(__file__).parents[1] / "demo"
WIDTH, CAPACITY, VOCAB = 5, 48, 512
SOURCE = Path(str(reference.__file__)).read_text()
# position, rows that become part of the sequence, single steps after them
ROUNDS = ((0, 5, 0), (5, 2, 3), (7, 1, 3), (8, 5, 2), (13, 3, 3))
MUTANTS = {
    "norms without 1 +": ("(1.0 + weight.to(f32))", "weight.to(f32)"),
    "recurrence before the norm": (
        'g_next = centred_norm(h[row : row + 1], weights["mtp.norm.weight"], eps)\n'
        "    logits = F.linear(g_next, head).to(f32)",
        'g_next = h[row : row + 1]\n    logits = F.linear(centred_norm(g_next, weights["'
        'mtp.norm.weight"], eps), head).to(f32)',
    ),
    "hidden before the embedding": ("torch.cat([e, n], -1)", "torch.cat([n, e], -1)"),
    "norms swapped": ('weights["mtp.pre_fc_norm_hidden.weight"]', 'weights["mtp.norm.weight"]'),
    "no output gate": ("mixed * gate.reshape(rows, -1).sigmoid()", "mixed"),
    "gate rows first": (
        "query, gate = torch.split(fused, dim, -1)",
        "gate, query = torch.split(fused, dim, -1)",
    ),
    "embedding not shifted": ("embed(embedding, ids)", "embed(embedding, ids.roll(1))"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("mtp")
    trunk, _ = write_pair(folder, layers=4, aux=[0, 1, 2], tokenizer=True)
    assert trunk == folder / "trunk"
    return folder


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    config, trunk = open_trunk(folder / "trunk")
    return Pair(config, None, trunk, None, mtp=open_mtp(trunk, config))


def weights_of(pair: Pair, dtype: str = "fp32") -> dict[str, torch.Tensor]:
    assert pair.mtp is not None
    weights = eager.load_weights(pair.trunk, dtype) | eager.load_weights(pair.mtp, dtype)
    return {n: t for n, t in weights.items() if not n.startswith("layers.")}


def oracle_of(pair: Pair) -> MtpOracle:
    config = pair.trunk_config
    return MtpOracle(
        {name: tensor.numpy() for name, tensor in weights_of(pair).items()},
        heads=config.attention_heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rotary_dim=config.rotary_dim,
        theta=config.rope_theta,
        eps=config.norm_eps,
    )


# --- the reference ---


def check_rounds(module: Any, pair: Pair) -> None:
    """Extends and single steps as a chain does them; logits, recurrence and KV of every row."""
    oracle, weights = oracle_of(pair), weights_of(pair)
    spec = engine_specs(pair.trunk_config, None, Options(WIDTH, CAPACITY), True)["mtp"]
    states, random = eager.zero_states(spec), torch.Generator().manual_seed(2)
    head = weights.get("lm_head.weight", weights["embed_tokens.weight"])

    def call(*given: Any) -> Any:
        table = weights["embed_tokens.weight"]
        return module.mtp_step(weights, table, head, pair.trunk_config, *given)

    def check(out: Any, want: tuple[Any, Any], position: int) -> None:
        for got, expected in ((out.logits[0], want[0]), (out.g_next[0], want[1])):
            assert np.abs(got.double().numpy() - expected).max() < 5e-5, position
        assert int(out.token) == int(np.argmax(want[0]))
        assert int(out.next_position) == position + 1

    for position, kept, singles in ROUNDS:
        ids = torch.randint(0, VOCAB, (WIDTH,), generator=random)
        hidden = torch.randn(WIDTH, pair.trunk_config.hidden_size, generator=random)
        for i in range(kept):
            want = oracle.step(int(ids[i]), hidden[i].double().numpy(), position + i)
        out = call(ids, hidden, position, kept - 1, states)
        check(out, want, position + kept - 1)
        for slot in range(position + kept):
            for part, rows in (("key", oracle.keys), ("value", oracle.values)):
                got = out.states[f"mtp.{part}"][0, :, slot].double().numpy()
                assert np.abs(got - np.stack(rows[slot])).max() < 5e-5
        for here in range(position + kept, position + kept + singles):
            want = oracle.step(int(out.token), out.g_next[0].double().numpy(), here)
            out = call(out.token, out.g_next, here, 0, out.states)
            check(out, want, here)
        states = out.states


def test_the_reference_agrees_with_the_oracle(pair: Pair) -> None:
    check_rounds(reference, pair)


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    trunk, _ = write_pair(tmp_path, layers=4, aux=[0, 1, 2], tied=True)
    config, checkpoint = open_trunk(trunk)
    check_rounds(reference, Pair(config, None, checkpoint, None, mtp=open_mtp(checkpoint, config)))


@pytest.mark.parametrize("name", MUTANTS)
def test_the_oracle_notices_every_mutant(
    pair: Pair, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = MUTANTS[name]
    assert SOURCE.count(old) >= 1, "the mutant no longer fits"
    module = ModuleType("mutant")
    monkeypatch.setitem(sys.modules, "mutant", module)  # where dataclass looks for it
    exec(compile(SOURCE.replace(old, new), "mutant", "exec"), module.__dict__)
    with pytest.raises(AssertionError):
        check_rounds(module, pair)


# --- the graphs ---

MADE = ("trunk", "mtp", "mtp_step", "prefill", "mtp_prefill")


def graphs(pair: Pair, options: Options) -> dict[str, onnx.ModelProto]:
    table = weight_table(pair)
    return build_graphs(pair.trunk_config, pair.draft_config, table, options, mtp=True)


def rounds_through(extend: Any, step: Any, hidden_size: int) -> Iterator[Arrays]:
    """Everything that extends and steps give, states carried on."""
    random, states = np.random.default_rng(3), {}
    for position, kept, singles in ROUNDS:
        ids = random.integers(0, VOCAB, WIDTH)
        hidden = random.normal(size=(WIDTH, hidden_size)).astype(np.float32)
        out, states = extend(states, ids=ids, g=hidden, position=[position], row=[kept - 1])
        yield out
        for _ in range(singles):
            at = {"position": out["next_position"], "row": [0]}
            out, states = step(states, ids=out["token"], g=out["g_next"], **at)
            yield out


def through_reference(pair: Pair, rows: int) -> Callable[..., tuple[Arrays, Arrays]]:
    session = eager.mtp_session(
        weights_of(pair), pair.trunk_config, rows, Options(WIDTH, CAPACITY, debug=("logits",))
    )
    dtypes = {t.name: eager.TORCH_TYPES[t.dtype] for t in session.spec.all_inputs}

    def run(states: Arrays, **inputs: Any) -> tuple[Arrays, Arrays]:
        given = {n: torch.as_tensor(np.asarray(v)).to(dtypes[n]) for n, v in inputs.items()}
        held = {n: torch.from_numpy(a.copy()) for n, a in states.items()}
        out = session.run(eager.zero_states(session.spec) | held | given)
        arrays = {name: tensor.numpy() for name, tensor in out.items()}
        return arrays, {s.input: arrays[s.output] for s in session.spec.states}

    return run


@pytest.mark.parametrize("profile", STANDARD_PROFILES)
def test_the_graphs_agree_with_the_reference(pair: Pair, folder: Path, profile: str) -> None:
    made = graphs(pair, Options(WIDTH, CAPACITY, profile=profile, debug=("logits",)))
    ours = (OnnxEngine(made[name], {"trunk": folder / "trunk"}).run for name in ("mtp", "mtp_step"))
    theirs = (through_reference(pair, rows) for rows in (WIDTH, 1))
    size = pair.trunk_config.hidden_size
    for got, want in zip(rounds_through(*ours, size), rounds_through(*theirs, size), strict=True):
        assert got["token"] == want["token"] and got["next_position"] == want["next_position"]
        for name in ("g_next", "logits", "mtp.key.next", "mtp.value.next"):
            assert np.abs(got[name] - want[name]).max() < 1e-4 * np.abs(want[name]).max(), name


@pytest.mark.parametrize("profile", STANDARD_PROFILES)
def test_a_wide_call_over_a_prompt_leaves_the_kv_of_narrow_ones(
    pair: Pair, folder: Path, profile: str
) -> None:
    """64 and 23 rows of a prompt against calls of 5, rows behind the valid ones full of NaN."""
    wide, length = 64, 87
    made = graphs(pair, Options(WIDTH, 128, profile=profile, prefill=wide))
    extend, read = (
        OnnxEngine(made[name], {"trunk": folder / "trunk"}).run for name in ("mtp", "mtp_prefill")
    )
    random, size = np.random.default_rng(4), pair.trunk_config.hidden_size
    ids = random.integers(0, VOCAB, length + WIDTH)
    hidden = random.normal(size=(length + WIDTH, size)).astype(np.float32)
    want: Arrays = {}
    for at in range(0, length, WIDTH):
        rows = slice(at, at + WIDTH)
        _, want = extend(want, ids=ids[rows], g=hidden[rows], position=[at], row=[0])
    got: Arrays = {}
    for at in (0, wide):
        rows = min(wide, length - at)
        block = np.full((wide, size), np.nan, np.float32)
        block[:rows] = hidden[at : at + rows]
        padded = [*ids[at : at + rows], *[-1] * (wide - rows)]
        _, got = read(got, ids=padded, hidden=block, position=[at], rows=[rows])
    for part in ("mtp.key", "mtp.value"):
        assert np.abs(got[part] - want[part])[:, :, :length].max() < 1e-4, part


@pytest.mark.parametrize("profile", ["portable", "standard", "ort-cuda", "ort-fused"])
@pytest.mark.parametrize("width", [1, 2, 9])
def test_every_width_is_valid_onnx(pair: Pair, profile: str, width: int) -> None:
    dtype = "bf16" if profile.startswith("ort") else "fp32"
    options = Options(width, CAPACITY, dtype, profile, prefill=32)
    specs = engine_specs(pair.trunk_config, None, options, True)
    made = graphs(pair, options)
    assert made.keys() == specs.keys() == set(MADE)
    for name, model in made.items():
        onnx.checker.check_model(with_bound_weights(model))
        assert [o.name for o in model.graph.output] == [t.name for t in specs[name].all_outputs]


# --- the chain ---


@pytest.fixture(scope="module")
def engines(folder: Path) -> Engines:
    """The toy trunk alone: no EAGLE draft."""
    flags = "--capacity", str(CAPACITY), "--debug", "logits"
    return open_engines(exported([folder / "trunk"], folder / "alone", *flags), threads=1)


def test_a_bundle_without_a_draft_has_the_other_drafters(engines: Engines) -> None:
    manifest = engines.manifest
    assert manifest.draft is None and manifest.mtp
    assert manifest.specs.keys() == set(MADE)
    assert engines.drafters == ("mtp", "ngram", "none") and chosen_drafter(manifest, None) == "mtp"
    assert "features" not in {t.name for t in manifest.specs["trunk"].outputs}
    assert manifest.ignored == {"visual": 2}
    with pytest.raises(InputError, match="holds no EAGLE draft: export it with one"):
        engines.chain(drafter="eagle")


@pytest.mark.parametrize("ks", [[4], [1], [4, 0, 0, 0, 0, 0, 0, 1, 2]])
def test_guesses_are_those_of_the_oracle_after_every_accept_count(
    engines: Engines, pair: Pair, ks: list[int]
) -> None:
    """Rows from the trunk's true hidden states, then the head's own output."""
    prompt = [int(i) for i in np.random.default_rng(5).integers(0, VOCAB, 7)]
    plain = engines.chain(drafter="none")
    truth, hidden = list(prompt), []
    for round in plain.rounds(prompt, max_new_tokens=30, k=0):
        cache = plain.cache
        hidden += list(cache.outputs[cache.parity]["hidden"].read()[: cache.kept])
        truth += round.tokens
    # the prompt's first call has gone when its round is there
    first = [plain_hidden(engines, prompt[: n + 1]) for n in range(len(prompt))]
    hidden = [*first, *hidden[len(hidden) - (len(truth) - 1 - len(prompt)) :]]
    chain = engines.chain(drafter="mtp")
    own = chain.drafter
    assert isinstance(own, EagleDrafter)
    script = Script(chain.cache, truth, itertools.cycle([0, 4, 2, 1, 3]), vocab=VOCAB)
    drafter = chain.drafter = Scripted(own, script)
    chain._adaptive = Paced(ks)  # type: ignore[assignment]
    result = chain.generate(prompt, max_new_tokens=30, k="auto")
    assert result.tokens == truth[7:]
    checked = 0
    for n, guesses in drafter.guesses:
        oracle = oracle_of(pair)
        for i in range(n):
            logits, out = oracle.step(truth[i + 1], hidden[i].astype(np.float64), i)
        for j, guess in enumerate(guesses):
            top = np.sort(logits)[-2:]
            if top[1] - top[0] < 1e-3:  # too close for fp32
                break
            assert guess == int(np.argmax(logits)), (n, j)
            checked += 1
            logits, out = oracle.step(guess, out, n + j)
    assert checked > 8


def plain_hidden(engines: Engines, prompt: list[int]) -> Any:
    """The trunk's hidden state after the last token of a prompt."""
    chain = engines.chain(drafter="none")
    chain.generate(prompt, max_new_tokens=1)
    cache = chain.cache
    return cache.outputs[cache.parity]["hidden"].read()[cache.kept - 1]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Engines:
    bundle = tmp_path_factory.mktemp("demo") / "bundle"
    exported((DEMO / "trunk", DEMO / "draft"), bundle, "--capacity", "256")
    return open_engines(bundle, threads=1)


def test_the_shipped_head_is_right_most_of_the_time_and_exact(demo: Engines) -> None:
    """Identical tokens by eagle, mtp, ngram and none, with every k; counts as the head is good."""
    assert demo.drafters == ("eagle", "mtp", "ngram", "none")
    tokenizer = Tokenizer(DEMO / "trunk")
    for text, least in (("<|py|>import os\n\n\ndef main():\n", 0.6), ("<|book|>The whale", 0.5)):
        prompt = tokenizer.encode(text)
        plain = demo.chain(drafter="none").generate(prompt, max_new_tokens=100)
        assert plain.stats.acceptance_length == 1
        for name in ("eagle", "mtp", "ngram"):
            chain = demo.chain(drafter=name)
            for k in (1, 4, "auto"):
                result = chain.generate(prompt, max_new_tokens=100, k=k)  # type: ignore[arg-type]
                assert result.tokens == plain.tokens, (name, k)
                if name == "mtp":
                    assert result.stats.acceptance_by_position[0] > least


def test_scratch_kv_and_replay_are_exact_with_mtp(demo: Engines) -> None:
    prompt = Tokenizer(DEMO / "trunk").encode("<|doc|>Installation\n")
    plain = demo.chain(drafter="none").generate(prompt, max_new_tokens=60).tokens
    lengths = {}
    for draft_kv, rollback in itertools.product(("kept", "scratch"), ("log", "replay")):
        chain = demo.chain(drafter="mtp", draft_kv=draft_kv, rollback=rollback)  # type: ignore[arg-type]
        result = chain.generate(prompt, max_new_tokens=60)
        assert result.tokens == plain
        lengths[draft_kv, rollback] = result.stats.acceptance_length
    assert lengths["kept", "log"] == lengths["kept", "replay"]
    assert lengths["kept", "log"] > lengths["scratch", "log"]  # type: ignore[operator]


# --- files ---


def test_no_mtp_leaves_it_out(folder: Path, tmp_path: Path) -> None:
    words = ("export", str(folder / "trunk"), "-o", str(tmp_path / "b"), "--capacity", "32")
    assert main([*words, "--no-mtp"]) == 0
    manifest = Manifest.load(tmp_path / "b")
    assert manifest.specs.keys() == {"trunk", "prefill"} and manifest.arguments[-1] == "--no-mtp"
    assert manifest.ignored == {"visual": 2, "mtp": 15}
    assert not any(name.startswith("mtp.") for name in manifest.weights)
    command = manifest.export_command(tmp_path / "b")
    assert f"export {folder / 'trunk'} -o" in command, "no draft, no second folder"
    chain = open_engines(tmp_path / "b", threads=1).chain()
    assert chain.generate([1, 2, 3], max_new_tokens=5).stats.drafted == 0


def test_an_option_of_a_draft_needs_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("export", str(folder / "trunk"), "-o", str(folder / "no"), "--rotary-dim", "8")
    assert main(list(words)) == 2
    assert "--rotary-dim is about a draft, and no DRAFT is named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("mtp.fc.weight"), "1 tensor missing: mtp.fc.weight"),
        (
            lambda t: t.update({"mtp.embed_tokens.weight": torch.zeros(VOCAB, 64)}),
            "1 tensor unexpected: mtp.embed_tokens.weight",
        ),
        (
            lambda t: t.update({"mtp.fc.weight": torch.zeros(64, 64)}),
            "shape [64, 64], expected [64, 128]",
        ),
    ],
    ids=["missing", "own embedding", "misshapen"],
)
def test_a_head_that_is_not_whole_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any, words: str
) -> None:
    config, tensors = trunk_parts(layers=4)
    change(tensors)
    trunk = save(tmp_path / "trunk", config, tensors)
    write_tokenizer(trunk)
    capsys.readouterr()
    assert main(["export", str(trunk), "-o", str(tmp_path / "b"), "--capacity", "32"]) == 2
    error = capsys.readouterr().err
    assert words in error and "--no-mtp leaves the head out" in error
    assert not (tmp_path / "b").exists()
    assert (
        main(["export", str(trunk), "-o", str(tmp_path / "b"), "--capacity", "32", "--no-mtp"]) == 0
    )


def test_a_head_in_another_shard_is_found(tmp_path: Path) -> None:
    trunk, _ = write_pair(tmp_path, layers=4, aux=[0, 1, 2], shards=3, tokenizer=True)
    words = ["export", str(trunk), "-o", str(tmp_path / "b"), "--capacity", "32"]
    assert main([*words, "--weights", "copy"]) == 0
    engines = open_engines(tmp_path / "b", threads=1)
    tokens = engines.chain().generate([5, 6, 7], max_new_tokens=9).tokens
    assert tokens == engines.chain(drafter="none").generate([5, 6, 7], max_new_tokens=9).tokens
