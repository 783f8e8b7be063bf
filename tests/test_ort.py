"""The chain on ONNX Runtime with a random pair: the same promises as on the toy, on real graphs.

Oracle: `OnnxEngine`, the graphs with NumPy arrays in and out, one token a call: no buffer, binding,
cache or loop of ours.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.manifest import Manifest
from eagle_chain.runtime import Engines, load, open_engines
from eagle_chain.runtime.buffers import HostMemory
from eagle_chain.runtime.cache import Cache
from eagle_chain.runtime.chain import Chain
from eagle_chain.runtime.ort import OrtBinding, OrtSession
from tests.onnx_engine import Arrays, OnnxEngine
from tests.toy import Script, Scripted
from tests.toy_pair import IM_END, exported, write_pair

VOCAB, WIDTH, CAPACITY = 512, 5, 80
FLAGS = ("--capacity", str(CAPACITY), "--aux-layers", "0,1,3")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), layers=4, aux=[0, 1, 3], tokenizer=True)


def export(pair: tuple[Path, Path], bundle: Path, *flags: str) -> Path:
    return exported(pair, bundle, *FLAGS, *flags)


@pytest.fixture(scope="module")
def bundle(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(pair, tmp_path_factory.mktemp("bundle") / "b", "--debug", "logits,S_rows")


@pytest.fixture(scope="module")
def loaded(bundle: Path) -> Engines:
    return open_engines(bundle, threads=1)


class Oracle:
    """Plain decoding and row-by-row drafting on the graphs alone."""

    def __init__(self, bundle: Path) -> None:
        folders = {name: bundle / "weights" / name for name in ("trunk", "draft")}
        self.graphs = {
            name: OnnxEngine(onnx.load(bundle / f"{name}.onnx", load_external_data=False), folders)
            for name in ("trunk", "encoder", "draft_step")
        }

    def step(self, states: Arrays, ids: list[int], position: int, kept: int) -> Any:
        """Run the trunk over some rows: all outputs, the next states."""
        padded = [*ids, *[-1] * (WIDTH - len(ids))]
        return self.graphs["trunk"].run(
            states, ids=padded, position=position, rows=len(ids), kept=kept
        )

    def decode(self, prompt: list[int], new: int) -> tuple[list[int], list[Arrays], list[Arrays]]:
        """Prompt + `new` tokens; the outputs of row 0 and the states after every token."""
        sequence, outputs, states = list(prompt), list[Arrays](), list[Arrays]()
        while len(sequence) < len(prompt) + new:
            n = len(outputs)
            out, after = self.step(states[-1] if n else {}, [sequence[n]], n, min(n, 1))
            outputs.append({name: out[name][0] for name in ("next_ids", "features", "logits")})
            states.append(after)
            if n + 1 >= len(prompt):
                sequence.append(int(out["next_ids"][0]))
        return sequence, outputs, states

    def guesses(self, tokens: list[int], outputs: list[Arrays], k: int) -> list[int]:
        """EAGLE's k guesses after `tokens`, all rows from true features, one row a call."""
        encoder, draft = self.graphs["encoder"], self.graphs["draft_step"]
        kv: Arrays = {}
        for i, token in enumerate(tokens[1:]):
            features = np.tile(outputs[i]["features"], (WIDTH, 1))
            g = encoder.run({}, features=features)[0]["g"][0]
            out, kv = draft.run(kv, ids=token, g=g, position=i)
        found = [int(out["token"][0])]
        for _ in range(k - 1):
            out, kv = draft.run(
                kv, ids=out["token"], g=out["g_next"], position=out["next_position"]
            )
            found.append(int(out["token"][0]))
        return found


@pytest.fixture(scope="module")
def oracle(bundle: Path) -> Oracle:
    return Oracle(bundle)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def scripted(
    loaded: Engines, truth: list[int], counts: Iterator[int], rollback: str = "log"
) -> tuple[Chain, Scripted]:
    """A chain whose drafts follow a script while EAGLE guesses beside it."""
    chain = loaded.chain(rollback=rollback, drafter="eagle")  # type: ignore[arg-type]
    script = Script(chain.cache, truth, counts, vocab=VOCAB)
    chain.drafter = made = Scripted(chain.drafter, script)
    return chain, made


@pytest.mark.parametrize("rollback", ["log", "replay"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_tokens_counts_guesses_and_states(
    loaded: Engines, oracle: Oracle, k: int, rollback: str
) -> None:
    ids = prompt(k, 7)
    truth, outputs, states = oracle.decode(ids, 40)
    chain, drafter = scripted(loaded, truth, itertools.cycle(range(k + 1)), rollback)
    rounds = []
    for round in chain.rounds(ids, max_new_tokens=38, k=k, stop_ids=()):
        rounds.append(round)
        n = len(chain.cache.tokens)
        for pair in loaded.manifest.specs["trunk"].states:
            if pair.rows_axis is not None:
                mine = chain.cache.tensors(0)[pair.input].read()[:, :, :n]
                assert mine.tobytes() == states[n - 1][pair.input][:, :, :n].tobytes()
    assert [t for r in rounds for t in r.tokens] == truth[7:45]
    assert [r.accepted for r in rounds[1:]] == drafter.script.planned
    assert set(drafter.script.planned) == set(range(k + 1))
    for n, guesses in drafter.guesses[::3]:
        assert guesses == oracle.guesses(truth[: n + 1], outputs, k)[: len(guesses)]


def test_the_next_state_is_the_row_of_the_oracle_bit_for_bit(loaded: Engines) -> None:
    """S of the next call equals `S_rows[kept - 1]` of this one, for every kept."""
    spec = loaded.manifest.specs["trunk"]
    names = [pair.input for pair in spec.states if pair.input.endswith(".S")]
    chain = loaded.chain(drafter="none")
    for seed, kept in itertools.product(range(3), range(1, WIDTH + 1)):
        chain.reset()
        chain.extend(prompt(seed, 6 + seed))
        chain._decoder._call(prompt(9 + seed, WIDTH))
        chain.cache.commit(kept, 3)
        outputs = chain.cache.outputs[chain.cache.parity]
        rows = {name: outputs[f"{name}_rows"].read()[kept - 1] for name in names}
        chain._decoder._call([3])
        after = chain.cache.tensors(chain.cache.parity)
        for name in names:
            assert after[name].read().tobytes() == rows[name].tobytes()


def test_a_row_of_a_verify_is_row_0_of_a_padded_step_bit_for_bit(
    loaded: Engines, oracle: Oracle
) -> None:
    ids = prompt(3, 11)
    truth, outputs, _ = oracle.decode(ids, 30)
    chain, _ = scripted(loaded, truth, itertools.cycle([4, 1, 3]))
    rows = 0
    for round in chain.rounds(ids, max_new_tokens=29, stop_ids=()):
        cache = chain.cache
        out = cache.outputs[cache.parity]
        for name in ("logits", "features", "next_ids"):
            values = out[name].read()
            for row in range(cache.kept):
                want = outputs[cache.position + row][name]
                assert values[row].tobytes() == want.tobytes()
        rows += len(round.tokens)
    assert rows == 29


@pytest.mark.parametrize("threads", [1, 2])
def test_own_drafts_never_change_the_tokens(bundle: Path, oracle: Oracle, threads: int) -> None:
    chain = load(bundle, threads=threads)
    scratch = load(bundle, threads=threads, draft_kv="scratch", rollback="replay")
    for seed in range(4):
        ids = prompt(seed, 1 + 4 * seed)
        truth = oracle.decode(ids, 25)[0][len(ids) :]
        for k in range(WIDTH):
            assert chain.generate(ids, max_new_tokens=25, k=k, stop_ids=()).tokens == truth
        assert scratch.generate(ids, max_new_tokens=25, stop_ids=()).tokens == truth


def test_a_narrower_k_serves_on_a_wider_bundle(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wide = open_engines(export(pair, tmp_path / "wide", "--width", "9"), threads=1)
    ids = prompt(0, 13)
    truth = wide.chain(drafter="none").generate(ids, max_new_tokens=40, stop_ids=()).tokens
    for k in range(1, 9):
        chain, _ = scripted(wide, [*ids, *truth], itertools.cycle(range(k + 1)))
        result = chain.generate(ids, max_new_tokens=40, k=k, stop_ids=())
        assert result.tokens == truth and max(result.stats.accepted_at[:k]) > 0


def test_nan_in_every_state_does_not_outlive_a_reset(loaded: Engines, oracle: Oracle) -> None:
    chain = loaded.chain()
    ids = prompt(5, 9)
    truth = oracle.decode(ids, 12)[0][9:]
    for _ in range(2):
        for _, buffers in chain.cache._states:
            for buffer in buffers:
                buffer.write(np.nan)
        assert chain.generate(ids, max_new_tokens=12, stop_ids=()).tokens == truth


def test_snapshots_branch(loaded: Engines, oracle: Oracle) -> None:
    chain = loaded.chain()
    ids = prompt(6, 8)
    chain.reset()
    chain.extend(ids)
    kept = chain.snapshot()
    for seed in range(3):
        turn = prompt(20 + seed, 1 + 3 * seed)
        chain.rollback(kept)
        got = chain.generate(turn, max_new_tokens=8, append=True, stop_ids=()).tokens
        assert got == oracle.decode([*ids, *turn], 8)[0][-8:]


def test_a_snapshot_of_a_fine_tune_is_refused(bundle: Path, tmp_path: Path) -> None:
    """Same graphs, same shapes, other weights; the same bundle opened again is no other one."""
    tuned = write_pair(tmp_path, layers=4, aux=[0, 1, 3], seed=7, tokenizer=True)
    other = load(export(tuned, tmp_path / "tuned", "--debug", "logits,S_rows"), threads=1)
    chain, again = load(bundle, threads=1), load(bundle, threads=1)
    assert Manifest.load(bundle).graphs == Manifest.load(tmp_path / "tuned").graphs
    ids = prompt(0, 9)
    other.generate(ids, max_new_tokens=5)
    with pytest.raises(InputError, match="another bundle or drafter"):
        chain.rollback(other.snapshot())
    want = chain.generate(ids, max_new_tokens=5, stop_ids=()).tokens
    again.rollback(chain.snapshot())
    pending = again.cache.pending
    assert pending == want[-1]
    longer = chain.generate([pending], max_new_tokens=5, append=True, stop_ids=()).tokens
    assert again.generate([pending], max_new_tokens=5, append=True, stop_ids=()).tokens == longer


def test_prompts_up_to_the_capacity(loaded: Engines, oracle: Oracle) -> None:
    ids = prompt(7, CAPACITY)
    for length in (1, 5, CAPACITY - 6, CAPACITY - 1, CAPACITY):
        result = loaded.chain().generate(ids[:length], max_new_tokens=9, stop_ids=())
        new = min(9, CAPACITY - length)
        assert result.tokens == oracle.decode(ids[:length], new)[0][length:]
        assert result.finish_reason == ("length" if new == 9 else "capacity")


def test_stop_ids_are_the_configs_and_the_chat_end(loaded: Engines) -> None:
    assert loaded.stop_ids == set(loaded.manifest.trunk.eos_ids) | {IM_END}
    assert loaded.chain().stop_ids == loaded.stop_ids


# --- cost ---


def test_a_round_costs_little_beyond_its_calls(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 15 % over the ONNX Runtime calls, on a pair much smaller than any real one."""
    spent = 0.0
    run = OrtBinding.run

    def timed(self: OrtBinding) -> None:
        nonlocal spent
        start = time.perf_counter()
        run(self)
        spent += time.perf_counter() - start

    monkeypatch.setattr(OrtBinding, "run", timed)
    chain = load(bundle, threads=1)
    ratios = []
    for _ in range(5):
        spent = 0.0
        stats = chain.generate(prompt(0, 7), max_new_tokens=70, stop_ids=()).stats
        ratios.append((stats.prompt_seconds + stats.decode_seconds) / spent - 1)
    assert min(ratios) < 0.15


def resident() -> int:
    """Bytes of this process in memory, of garbage only what cannot be freed."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_15_opens_keep_memory_flat(bundle: Path) -> None:
    """A leak grows in every stretch, the allocator's own moods only in some."""
    growths = list[int]()
    for _ in range(3):
        start = resident()
        for _ in range(5):
            load(bundle, threads=1).generate(prompt(0, 1), max_new_tokens=2)
        growths.append(resident() - start)
    assert min(growths) < 256 * 1024


# --- what cannot be loaded ---


def test_weights_may_be_links_or_files_and_the_folder_may_be_anywhere(
    bundle: Path, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = export(pair, tmp_path / "copied", "--weights", "copy")
    assert (bundle / "weights" / "trunk").is_symlink()
    assert not (copied / "weights" / "trunk").is_symlink()
    ids = prompt(0, 5)
    want = load(bundle, threads=1).generate(ids, max_new_tokens=5, stop_ids=()).tokens
    folders = [copied]
    for target in (bundle, copied):
        link = tmp_path / f"link to {target.name}"
        link.symlink_to(target)
        folders += [link, Path(link.name)]
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        got = load(folder, threads=1).generate(ids, max_new_tokens=5, stop_ids=())
        assert got.tokens == want


def test_a_graph_of_another_spec_is_refused(bundle: Path) -> None:
    manifest = Manifest.load(bundle)
    spec = manifest.specs["encoder"]
    wrong = dataclasses.replace(
        spec,
        inputs=(dataclasses.replace(spec.inputs[0], shape=(4, 192)),),
        outputs=(dataclasses.replace(spec.outputs[0], name="h"),),
    )
    with pytest.raises(InputError) as caught:
        OrtSession(bundle / "encoder.onnx", wrong, HostMemory(), manifest.files)
    message = str(caught.value)
    assert "input features is fp32 [5, 192], expected fp32 [4, 192]" in message
    assert "output g is fp32 [5, 64], expected absent" in message
    assert "output h is absent, expected fp32 [5, 64]" in message


def test_a_graph_that_cannot_be_loaded_is_one_sentence(bundle: Path, tmp_path: Path) -> None:
    spec = Manifest.load(bundle).specs["encoder"]
    bad = tmp_path / "encoder.onnx"
    bad.write_bytes(b"not a graph")
    with pytest.raises(InputError, match="ONNX Runtime cannot load it"):
        OrtSession(bad, spec, HostMemory(), [])
    (tmp_path / "weights").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InputError, match="the weights cannot be read"):
        OrtSession(bad, spec, HostMemory(), ["weights"])


def test_bf16_and_ort_fused_have_no_cpu_kernels(pair: tuple[Path, Path], tmp_path: Path) -> None:
    half = export(pair, tmp_path / "bf16", "--dtype", "bf16")
    with pytest.raises(InputError, match=r"exported as bf16.*export it again with --dtype fp32"):
        load(half)
    fused = export(pair, tmp_path / "fused", "--profile", "ort-fused")
    with pytest.raises(InputError, match="export it again with --profile portable"):
        load(fused, "onnxruntime-cpu")


def test_fp16_runs_here_and_is_exact(pair: tuple[Path, Path], tmp_path: Path) -> None:
    half = open_engines(export(pair, tmp_path / "fp16", "--dtype", "fp16"), threads=1)
    ids = prompt(0, 9)
    truth = half.chain(drafter="none").generate(ids, max_new_tokens=30, stop_ids=()).tokens
    chain, _ = scripted(half, [*ids, *truth], itertools.cycle(range(5)))
    assert chain.generate(ids, max_new_tokens=30, stop_ids=()).tokens == truth


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "gpu"}, "backend is 'gpu', expected one of auto, onnxruntime-cpu"),
        ({"threads": 0}, "threads is 0, expected 1 to 1024"),
        ({"threads": 1_000_000}, "threads is 1000000, expected 1 to 1024"),
        ({"drafter": "tree"}, "drafter is 'tree', expected one of eagle, mtp, ngram, none"),
        ({"draft_kv": "ring"}, "draft_kv is 'ring', expected 'kept' or 'scratch'"),
        ({"rollback": "none"}, "rollback is 'none', expected 'log' or 'replay'"),
    ],
)
def test_options_that_do_not_exist(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(bundle, **options)
    assert message in str(caught.value)


def test_without_onnxruntime_one_sentence_says_what_to_install(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(sys, "prefix", "/somewhere")
    with pytest.raises(InputError, match=r"pip install '\.\[cpu\]'"):
        load(bundle)


def test_ctrl_c_while_onnxruntime_starts_is_an_interruption(
    bundle: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = "raise ImportError('initialization failed') from KeyboardInterrupt()"
    (tmp_path / "onnxruntime.py").write_text(text)
    monkeypatch.delitem(sys.modules, "onnxruntime", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        load(bundle)


def test_a_bound_cache_is_of_the_sessions_memory(loaded: Engines) -> None:
    class Elsewhere(HostMemory):
        device = "cuda:0"

    memory = Elsewhere()
    cache = Cache(loaded.sessions["trunk"].spec, HostMemory(), CAPACITY)
    session = loaded.sessions["trunk"]
    assert isinstance(session, OrtSession)
    away = object.__new__(OrtSession)
    away.__dict__ = {**session.__dict__, "memory": memory}
    with pytest.raises(InputError, match="ids is on cpu, the engine runs on cuda:0"):
        away.bind(cache.tensors(0))


def test_an_old_onnxruntime_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to 1.24.0, and with it on Python 3.10, sessions cannot take mapped weights."""
    old = types.ModuleType("onnxruntime")
    old.__version__, old.SessionOptions = "1.23.2", object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "onnxruntime", old)
    with pytest.raises(InputError, match=r"onnxruntime 1\.23\.2 is too old: 1\.24\.1 or newer"):
        load(bundle, "onnxruntime-cpu")
