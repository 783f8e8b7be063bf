"""The trunk reference against transformers, and the rules that only our contract has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle_chain.engines.errors import InputError
from eagle_chain.engines.spec import Options
from eagle_chain.export import reference
from eagle_chain.export.checkpoint import open_pair
from eagle_chain.export.eager import TORCH_TYPES, load_weights, trunk_session, zero_states
from tests.toy_pair import save, trunk_config, trunk_parts, write_pair
from tests.trunk_checks import (
    ALLOWED,
    WIDTH,
    Case,
    Run,
    check_log,
    check_prefill,
    check_resume,
    check_single,
    check_verify,
    near,
    near_states,
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(save(tmp_path_factory.mktemp("fp32"), *trunk_parts()))


@pytest.fixture(scope="module")
def bf16_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(save(tmp_path_factory.mktemp("bf16"), *trunk_parts(dtype="bf16")), "bf16")


@pytest.mark.parametrize("check", [check_prefill, check_single, check_verify, check_resume])
def test_fp32_like_transformers(check: Any, case: Case) -> None:
    check(reference, case)


@pytest.mark.parametrize("check", [check_single, check_verify])
def test_bf16_like_transformers(check: Any, bf16_case: Case) -> None:
    check(reference, bf16_case)


@pytest.mark.parametrize("name", ["case", "bf16_case"])
def test_log_gives_the_bits_of_S_rows(name: str, request: pytest.FixtureRequest) -> None:
    check_log(reference, request.getfixturevalue(name))


VARIANTS: dict[str, dict[str, Any]] = {
    "as many key heads as value heads, like 0.8B": {
        "linear_num_key_heads": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "tied": True,
    },
    "three value heads per key head, like 27B": {
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 1,
    },
    "whole head rotates, other theta and epsilon": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 1.0,
            "mrope_section": [6, 5, 5],
        },
        "rms_norm_eps": 1e-3,
    },
    "conv over three columns, head_dim = hidden / heads": {
        "linear_conv_kernel_dim": 3,
        "head_dim": 16,
    },
    "flat config, no interval": {"flat": True, "full_attention_interval": None},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_sizes_of_the_family(variant: str, tmp_path: Path) -> None:
    folder = save(tmp_path, *trunk_parts(layers=4, seed=3, **VARIANTS[variant]))
    check_resume(reference, Case(folder, aux_layers=(0, 1, 2)))


def test_aux_layers_are_block_outputs_in_a_deep_trunk(tmp_path: Path) -> None:
    """[1, 15, 28] as outputs = hidden_states[2], [16], [29] = [2, 16, 29] as boundaries."""
    small = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 320}
    folder, _ = write_pair(tmp_path, layers=32, sizes=small, draft_sizes={"draft_vocab_size": 16})
    case = Case(folder, aux_layers=(1, 15, 28))
    ids = case.ids[:WIDTH]
    out, want = Run(reference, case).call(ids), case.ask(ids)
    streams = torch.cat([want.streams[i] for i in (2, 16, 29)], -1)
    near(out.features, streams, ALLOWED["fp32"], "features")


@pytest.mark.parametrize("length", [1, 2, 3, 4, 63, 64, 65, 127, 128, 129])
def test_prompt_lengths(length: int, case: Case) -> None:
    """Prefill then decode == prefill in two pieces == transformers' one call over everything."""
    want = case.ask(case.ids[: length + 1])
    run = Run(reference, case)
    run.prefill(case.ids[:length])
    next_token = case.ids[length : length + 1]
    out = run.call(next_token)
    run.keep(1)
    near(out.logits[0], want.logits[-1], ALLOWED["fp32"], "logits")
    states = run.live(out)
    near_states(states, want.states(), ALLOWED["fp32"])

    pieces = Run(reference, case)
    pieces.prefill(case.ids[: length // 2])
    pieces.prefill(case.ids[length // 2 : length])
    again = pieces.call(next_token)
    pieces.keep(1)
    near(again.logits[0], out.logits[0], ALLOWED["fp32"], "logits in two pieces")
    near_states(pieces.live(again), states, ALLOWED["fp32"])


@pytest.mark.parametrize("length", [1, 3, 7, 9])
def test_padding_rows_leave_no_trace(length: int, case: Case) -> None:
    """Whatever stands in the rows past `rows`, later calls give the same bits."""
    results = []
    for pad in (11, 300, -1):
        run = Run(reference, case)
        run.prefill(case.ids[:length], pad=pad)
        out = run.call(case.ids[length : length + WIDTH])
        run.keep(WIDTH)
        results.append((out, run.live(out)))
    for out, states in results[1:]:
        assert torch.equal(out.logits, results[0][0].logits)
        assert all(torch.equal(states[name], results[0][1][name]) for name in states)


@pytest.mark.parametrize("kept", range(WIDTH + 1))
def test_rejected_rows_may_hold_nan(kept: int, case: Case) -> None:
    """The log, window and KV of rows that were not kept do not reach the next call."""
    run = Run(reference, case)
    run.prefill(case.ids[:7])
    start = run.position
    run.call(case.ids[start : start + WIDTH])
    run.keep(kept)
    clean = run.call(case.ids[run.position : run.position + WIDTH])

    poisoned = Run(reference, case)
    poisoned.prefill(case.ids[:7])
    poisoned.call(case.ids[start : start + WIDTH])
    poisoned.keep(kept)
    for name, state in poisoned.states.items():
        part = name.rsplit(".", 1)[1]
        if part.startswith("log"):
            state[kept:] = torch.nan
        elif part == "window":
            state[:, kept + 3 :] = torch.nan
        elif part in ("key", "value"):
            state[:, :, start + kept : start + WIDTH] = torch.nan
    out = poisoned.call(case.ids[run.position : run.position + WIDTH])
    assert torch.equal(out.logits, clean.logits)
    for name in ("layers.0.S", "layers.0.window"):
        assert torch.equal(out.states[name], clean.states[name])


def plain(case: Case, prompt: Tensor, count: int) -> list[int]:
    """Greedy decoding with one valid row a call."""
    run = Run(reference, case)
    out = run.prefill(prompt)[-1]
    tokens = [int(out.next_ids[run.kept - 1])]
    while len(tokens) < count:
        out = run.call(torch.tensor(tokens[-1:]))
        run.keep(1)
        tokens.append(int(out.next_ids[0]))
    return tokens


def test_a_chain_by_hand(case: Case) -> None:
    """7-token prompt, W = 5, accepted 0, 4, 2: counters as in the design, tokens as plain's."""
    prompt = case.ids[:7]
    tokens = plain(case, prompt, 16)
    run = Run(reference, case)
    seen = []
    for ids in prompt.split(WIDTH):
        seen.append((run.position, run.kept, len(ids)))
        out = run.call(ids)
        run.keep(len(ids))
    emitted = [int(out.next_ids[run.kept - 1])]
    for right in (0, 4, 2):
        seen.append((run.position, run.kept, WIDTH))
        drafts = tokens[len(emitted) : len(emitted) + WIDTH - 1]
        drafts = [t if i < right else (t + 1) % 512 for i, t in enumerate(drafts)]
        out = run.call(torch.tensor(emitted[-1:] + drafts))
        assert int(out.accepted) == right
        assert int(out.next_kept) == right + 1
        assert int(out.next_position) == run.position + right + 1
        assert int(out.pending) == int(out.next_ids[right])
        emitted += out.next_ids[: right + 1].tolist()
        run.keep(right + 1)
    assert seen == [(0, 0, 5), (5, 5, 2), (7, 2, 5), (8, 1, 5), (13, 5, 5)]
    assert (run.position, run.kept) == (16, 3)
    assert emitted == tokens[: len(emitted)]


@pytest.mark.parametrize("rows", range(1, WIDTH + 1))
@pytest.mark.parametrize("right", range(WIDTH))
def test_accepted_counts_from_the_front_within_rows(rows: int, right: int, case: Case) -> None:
    next_ids = torch.tensor([10, 20, 30, 40, 50])
    ids = torch.tensor([1, 10, 20, 30, 40])
    if right < WIDTH - 1:
        ids[right + 1] = 99  # later rows are right again and must not count
    assert reference.count_accepted(ids, next_ids, rows) == min(right, rows - 1)


def test_no_token_embeds_as_token_0_and_is_never_accepted(case: Case) -> None:
    run = Run(reference, case)
    out = run.call(torch.tensor([3, -1, -1, -1, -1]))
    same = Run(reference, case).call(torch.tensor([3, 0, 0, 0, 0]))
    assert torch.equal(out.logits, same.logits)
    assert int(out.accepted) == 0
    assert reference.count_accepted(torch.tensor([3, -1]), torch.tensor([-1, -1]), 2) == 0


def test_rows_that_are_not_finite_give_no_token(case: Case) -> None:
    table = case.weights["embed_tokens.weight"].clone()
    table[77] = torch.nan
    broken = dataclasses.replace(case)
    broken.__dict__["weights"] = case.weights | {"embed_tokens.weight": table}
    out = Run(reference, broken).call(torch.tensor([3, 4, 77, 5, 6]))
    assert out.next_ids[2:].tolist() == [-1, -1, -1]
    assert int(out.accepted) == 0


def test_ties_go_to_the_first_token() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0], [0.0, torch.inf, 1.0]])
    assert reference.greedy(logits).tolist() == [1, 0, -1]


def test_gradients_reach_every_weight_through_two_calls(case: Case) -> None:
    weights = {name: t.clone().requires_grad_() for name, t in case.weights.items()}
    run = Run(reference, case)
    states, position, kept = run.states, 0, 0
    for ids in case.ids[: 2 * WIDTH].split(WIDTH):
        out = reference.trunk_step(
            weights, case.config, (1, 3, 4), ids, position, WIDTH, kept, states
        )
        states, position, kept = out.states, position + WIDTH, WIDTH
    (out.logits.logsumexp(-1).sum() + out.features.sum()).backward()
    for name, weight in weights.items():
        assert weight.grad is not None and weight.grad.isfinite().all(), name
        assert weight.grad.any(), name


def test_states_are_not_written_to(case: Case) -> None:
    run = Run(reference, case)
    run.prefill(case.ids[:7])
    before = {name: state.clone() for name, state in run.states.items()}
    given = run.states
    run.call(case.ids[7:12])
    assert all(torch.equal(given[name], before[name]) for name in before)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_session_gives_what_the_spec_says(dtype: str, tmp_path: Path) -> None:
    (config, trunk), (draft, _) = open_pair(*write_pair(tmp_path, dtype="bf16"))
    options = Options(WIDTH, 32, dtype, debug=("logits", "S_rows"))
    session = trunk_session(load_weights(trunk, dtype), config, draft.aux_layers, options)
    counters = {"position": 0, "rows": WIDTH, "kept": 0}
    feeds = {name: torch.tensor([n], dtype=torch.int32) for name, n in counters.items()}
    feeds |= {"ids": torch.arange(WIDTH, dtype=torch.int32), **zero_states(session.spec)}
    outputs = session.run(feeds)
    assert list(outputs) == [t.name for t in session.spec.all_outputs]
    for tensor in session.spec.all_outputs:
        got = outputs[tensor.name]
        assert (got.dtype, got.shape) == (TORCH_TYPES[tensor.dtype], tensor.shape)
        assert got.isfinite().all()
    wrong = {"position: got .*int64": feeds | {"position": torch.tensor([0])}}
    wrong["kept: got None"] = {name: t for name, t in feeds.items() if name != "kept"}
    wrong["extra: got"] = feeds | {"extra": torch.zeros(1)}
    wrong["ids: got"] = feeds | {"ids": torch.zeros(4, dtype=torch.int32)}
    for match, bad in wrong.items():
        with pytest.raises(InputError, match=match):
            session.run(bad)


def test_a_call_past_the_buffer_is_an_error(case: Case) -> None:
    run = Run(reference, case)
    run.position = 161
    with pytest.raises(IndexError, match="rows 161 to 165 do not fit 165 slots"):
        run.call(case.ids[:WIDTH])


def test_toy_config_is_lively() -> None:
    """The sizes that a port could confuse differ in the toy."""
    text = trunk_config()["text_config"]
    assert text["head_dim"] != text["hidden_size"] // text["num_attention_heads"]
    assert text["linear_num_key_heads"] != text["linear_num_value_heads"]
    assert text["linear_key_head_dim"] != text["linear_value_head_dim"]
