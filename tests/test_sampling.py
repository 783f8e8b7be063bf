"""Drawing tokens: the graph against NumPy's cumulated softmax, and the distribution it gives."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from numpy.typing import NDArray

from eagle_chain.engines.cli import main as command
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import EngineSpec, TensorSpec
from eagle_chain.export.builder import GraphBuilder
from eagle_chain.export.lowering import Portable
from eagle_chain.export.sampling import sample
from eagle_chain.export.standard import Standard
from eagle_chain.runtime import Engines, load, open_engines
from eagle_chain.runtime.exactness import Script
from eagle_chain.runtime.request import RequestOptions

DEMO = Path(__file__).resolve().parents[1] / "demo"
PROMPT = [1, 200, 300, 400, 500, 600, 700]

Floats = NDArray[np.float32]


class Sampler:
    """The sampling part of a trunk graph alone."""

    def __init__(self, rows: int, vocab: int, profile: type[Portable] = Portable) -> None:
        spec = EngineSpec(
            "sampler",
            (
                TensorSpec("logits", "fp32", (rows, vocab)),
                TensorSpec("share", "fp32", (rows,)),
                TensorSpec("temperature", "fp32", (1,)),
            ),
            (TensorSpec("ids", "int32", (rows,)),),
        )
        g = GraphBuilder(spec, {}, "fp32", profile.opset)
        inputs = (g.input(t.name) for t in spec.inputs)
        logits, share, temperature = inputs
        g.output("ids", sample(profile(g), logits, (rows, vocab), share, temperature))
        self.model = g.model()
        onnx.checker.check_model(self.model, full_check=True)
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(self.model.SerializeToString(), options)

    def __call__(  # noqa: D102
        self, logits: Floats, share: Floats, temperature: float
    ) -> NDArray[np.int32]:
        fed = {
            "logits": logits.astype(np.float32),
            "share": share.astype(np.float32),
            "temperature": np.array([temperature], np.float32),
        }
        ids: NDArray[np.int32] = self.session.run(None, fed)[0]
        return ids


def softmax(logits: Floats, temperature: float) -> NDArray[np.float64]:
    scaled = logits.astype(np.float64) / temperature
    mass = np.exp(scaled - scaled.max(-1, keepdims=True))
    shares: NDArray[np.float64] = mass / mass.sum(-1, keepdims=True)
    return shares


@pytest.mark.parametrize("profile", [Portable, Standard])
@pytest.mark.parametrize("vocab", [1, 7, 511, 512, 513, 5000])
@pytest.mark.parametrize("temperature", [0.05, 1.0, 8.0])
def test_a_draw_lies_where_numpy_puts_it(
    profile: type[Portable], vocab: int, temperature: float
) -> None:
    random = np.random.default_rng(vocab)
    logits = random.standard_normal((4, vocab)).astype(np.float32) * 3
    sampler = Sampler(4, vocab, profile)
    edges = np.cumsum(softmax(logits, temperature), -1)
    for _ in range(50):
        share = random.random(4, np.float32)
        for row, found in enumerate(sampler(logits, share, temperature)):
            # fp32 sums move an edge a little: the draw must lie between the edges within that
            below = edges[row, found - 1] if found else 0.0
            assert below - 1e-5 <= share[row] <= edges[row, found] + 1e-5


@pytest.mark.parametrize("share", [0.0, 0.5, float(np.nextafter(np.float32(1), np.float32(0)))])
@pytest.mark.parametrize("vocab", [300, 1025])
def test_a_token_without_mass_is_never_drawn(share: float, vocab: int) -> None:
    logits = np.full((2, vocab), -1e4, np.float32)
    possible = [vocab // 3, vocab - 2]
    logits[:, possible] = [0.0, 1.0]
    found = Sampler(2, vocab)(logits, np.full(2, share, np.float32), 1.0)
    assert set(found.tolist()) <= set(possible)


def test_the_draws_have_the_distribution_of_the_softmax() -> None:
    vocab, draws = 600, 40_000
    random = np.random.default_rng(5)
    logits = random.standard_normal(vocab).astype(np.float32) * 2
    sampler = Sampler(100, vocab)
    batch = np.tile(logits, (100, 1))
    ids = np.concatenate(
        [sampler(batch, random.random(100, np.float32), 0.9) for _ in range(draws // 100)]
    )
    expected = softmax(logits, 0.9) * draws
    common = expected >= 5
    seen = np.bincount(ids, minlength=vocab)
    seen = np.append(seen[common], seen[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    statistic = float(((seen - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)  # four standard deviations


def test_rows_do_not_see_each_other() -> None:
    random = np.random.default_rng(2)
    logits = random.standard_normal((5, 700)).astype(np.float32)
    share = random.random(5, np.float32)
    sampler = Sampler(5, 700)
    together = sampler(logits, share, 1.0)
    for row in range(5):
        other = random.standard_normal((5, 700)).astype(np.float32)
        other[0], shares = logits[row], random.random(5, np.float32)
        shares[0] = share[row]
        assert sampler(other, shares, 1.0)[0] == together[row]


# --- chains that draw --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["portable", "standard"])
def bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("drawn") / "b"
    words = [str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(folder), "--profile"]
    options = ["--capacity", "128", "--sampling"]
    assert command(["export", *words, request.param, *options]) == 0
    return folder, request.param


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_drafts_do_not_change_what_is_drawn(bundle: tuple[Path, str], temperature: float) -> None:
    chain = load(bundle[0], threads=1)
    for seed in (0, 2**64 - 1):
        options: RequestOptions = {"max_new_tokens": 24, "temperature": temperature, "seed": seed}
        plain = chain.generate(PROMPT, k=0, **options)
        for k in (1, 4):
            drafted = chain.generate(PROMPT, k=k, **options)
            assert drafted.tokens == plain.tokens
            assert drafted.stats.accepted > 0  # or drafts were never put to the test


def test_the_seed_settles_the_tokens_and_temperature_0_is_greedy(bundle: tuple[Path, str]) -> None:
    chain = load(bundle[0], threads=1)

    def tokens(temperature: float, seed: int) -> list[int]:
        return chain.generate(
            PROMPT, max_new_tokens=30, temperature=temperature, seed=seed, stop_ids=()
        ).tokens

    greedy = tokens(0.0, 3)
    drawn = [tokens(1.0, seed) for seed in (3, 4, 3)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert greedy not in drawn
    assert tokens(0.0, 9) == greedy == tokens(1e-4, 5)


def test_an_appended_request_goes_on_with_the_numbers_of_its_positions(
    bundle: tuple[Path, str],
) -> None:
    chain = load(bundle[0], threads=1)
    options: RequestOptions = {"temperature": 1.0, "seed": 11, "stop_ids": ()}
    whole = chain.generate(PROMPT, max_new_tokens=30, **options).tokens
    first = chain.generate(PROMPT, max_new_tokens=13, **options).tokens
    rest = chain.generate([first[-1]], max_new_tokens=17, append=True, **options).tokens
    assert first + rest == whole


def test_the_first_token_has_the_distribution_of_the_trunk(tmp_path: Path) -> None:
    """Chi-square over seeds, through the whole chain: prompt, trunk and draw."""
    folder = tmp_path / "b"
    words = [str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(folder)]
    options = ["--capacity", "32", "--sampling", "--debug", "logits"]
    assert command(["export", *words, *options]) == 0
    chain, prompt, draws = load(folder, threads=1, drafter="none"), PROMPT[:3], 600
    seen: Counter[int] = Counter()
    for seed in range(draws):
        result = chain.generate(prompt, max_new_tokens=1, temperature=1.5, seed=seed, k=0)
        seen[result.tokens[0]] += 1
    chain.generate(prompt, max_new_tokens=1)
    logits = chain.cache.outputs[chain.cache.parity]["logits"].read()[len(prompt) - 1]
    expected = softmax(logits[None], 1.5)[0] * draws
    common = np.flatnonzero(expected >= 5)
    counts = np.array([seen[int(i)] for i in common])
    counts = np.append(counts, draws - counts.sum())
    wanted = np.append(expected[common], draws - expected[common].sum())
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    freedom = len(wanted) - 1
    assert freedom >= 3
    assert statistic < freedom + 4 * np.sqrt(2 * freedom)


def test_a_bundle_that_cannot_draw_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    assert command(["export", str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(folder)]) == 0
    chain = load(folder, threads=1)
    with pytest.raises(InputError, match=r"temperature is 0\.7, but this bundle .* --sampling"):
        chain.generate(PROMPT, temperature=0.7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature is -1.0, expected a number from 0 up"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "seed": -1}, "seed is -1, expected 0 to"),
        ({"temperature": 1.0, "seed": 1 << 64}, "expected 0 to 2\\^64 - 1"),
    ],
)
def test_bad_numbers_are_refused(bundle: tuple[Path, str], options: Any, words: str) -> None:
    chain = load(bundle[0], threads=1)
    with pytest.raises(InputError, match=words):
        chain.generate(PROMPT, **options)


def test_the_command_draws_and_checks(
    bundle: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", str(bundle[0]), "--prompt", "<|book|>The whale", "--max-new-tokens", "24"]
    drawing = ["--temperature", "1.0", "--seed", "5", "--check", "--threads", "1", "--json"]
    assert command([*words, *drawing]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["exact"] is True and report["accepted"] > 0


def test_a_prompt_in_wide_calls_leads_to_the_same_draws(tmp_path: Path) -> None:
    folder = tmp_path / "b"
    words = [str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(folder), "--capacity", "128"]
    assert command(["export", *words, "--sampling", "--prefill", "32"]) == 0
    chain, prompt = load(folder, threads=1), [*range(100, 180)]
    options: RequestOptions = {"max_new_tokens": 20, "temperature": 0.8, "seed": 1}
    assert chain.generate(prompt, k=0, **options).stats.trunk_calls < 30
    assert chain.generate(prompt, k=0, **options).tokens == chain.generate(prompt, **options).tokens


# --- while a sequence moves from capacity to capacity --------------------------------------------

SIZES, LONG, NEW = (40, 52, 80), [*range(100, 133)], 44


@pytest.fixture(scope="module", params=["fp32", "q8_0/q5_1"])
def grown(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    folder = tmp_path_factory.mktemp("grown") / "b"
    words = [str(DEMO / "trunk"), str(DEMO / "draft"), "-o", str(folder), "--kv", request.param]
    options = ["--capacity", ",".join(map(str, SIZES)), "--sampling", "--prefill", "32"]
    assert command(["export", *words, *options]) == 0
    return open_engines(folder, threads=1)


@pytest.fixture(scope="module")
def drawn(grown: Engines) -> list[int]:
    """What plain decoding draws."""
    return grown.chain(drafter="none").generate(LONG, k=0, **DRAWING).tokens


DRAWING: RequestOptions = {"max_new_tokens": NEW, "temperature": 0.6, "seed": 6, "stop_ids": ()}


def test_every_capacity_draws_by_the_numbers_of_the_positions(grown: Engines) -> None:
    chain = grown.chain(drafter="none")
    list(chain.stream(LONG, **{**DRAWING, "seed": 1}))  # other numbers are in the tables now
    visited = {chain.cache.capacity for _ in chain.rounds(LONG, k=0, **DRAWING)}
    assert visited == set(SIZES)
    numbers = np.random.Generator(np.random.Philox(key=6)).random(SIZES[-1] + 5, np.float32)
    for rung, size in zip(chain._ladder._rungs, SIZES, strict=True):
        assert rung is not None
        table = rung.cache.inputs[0]["uniform"].read()
        assert table.tobytes() == numbers[: size + 5].tobytes()


@pytest.mark.parametrize("drafter", ["eagle", "mtp", "ngram"])
@pytest.mark.parametrize(("k", "ahead"), [(4, False), (4, True), ("auto", False), ("auto", True)])
def test_drafts_change_no_draw_across_capacities(
    grown: Engines, drawn: list[int], drafter: Any, k: Any, ahead: bool
) -> None:
    """Whether the host decides, or the device as on a GPU."""
    chain = grown.chain(drafter=drafter, ahead=ahead)
    result = chain.generate(LONG, k=k, **DRAWING)
    assert result.tokens == drawn and chain.cache.capacity == SIZES[-1]
    assert result.stats.accepted > 0


@pytest.mark.parametrize("rollback", ["log", "replay"])
def test_accepted_counts_are_the_script_s_across_capacities(
    grown: Engines, drawn: list[int], rollback: Any
) -> None:
    chain = grown.chain(drafter="none", rollback=rollback)
    script = chain.drafter = Script(chain)
    script.truth = [*LONG, *drawn]
    tokens, seen = list[int](), Counter[int]()
    for round in chain.rounds(LONG, k=4, **DRAWING):
        tokens += round.tokens
        if round.drafted:
            assert round.accepted == script.planned
            seen[round.accepted] += 1
    assert tokens == drawn and min(seen[count] for count in range(5)) >= 1


@pytest.mark.parametrize("kept", [2, 9, 30])
def test_draws_go_on_from_a_prefix_file(
    grown: Engines, drawn: list[int], kept: int, tmp_path: Path
) -> None:
    """Saved at each capacity; taken up by a chain that has drawn by other numbers before."""
    first = grown.chain()
    assert first.generate(LONG, **{**DRAWING, "max_new_tokens": kept}).tokens == drawn[:kept]
    first.save(tmp_path / "prefix")
    rest: RequestOptions = {**DRAWING, "max_new_tokens": NEW - kept, "append": True}
    want = first.generate(drawn[kept - 1 : kept], **rest)
    chain = grown.chain(ahead=True)
    chain.generate(LONG, **{**DRAWING, "seed": 2})  # other numbers are in the tables now
    for k in (4, "auto", 0):
        chain.restore(tmp_path / "prefix")
        assert chain.cache.pending == drawn[kept - 1]
        result = chain.generate([drawn[kept - 1]], k=k, **rest)  # type: ignore[misc]
        assert result.tokens == want.tokens == drawn[kept:]
        assert k != 4 or result.stats.accepted == want.stats.accepted
