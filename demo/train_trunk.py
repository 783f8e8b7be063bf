"""Train a small Qwen3.5-shaped trunk on a corpus."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from corpus import Corpus
from optim import Schedule, optimisers
from torch import Tensor
from trunk_model import Trunk

LONG_SHARE = 0.1  # the last part of the training sees windows twice as long
WARM_UP = 3  # passes before the clock starts, so that compilation is not timed


@dataclass(frozen=True)
class TrunkRun:
    """The settings of one training run."""

    steps: int | None
    minutes: float | None
    batch: int  # windows a step
    window: int  # tokens a window
    muon_lr: float
    adam_lr: float
    compile: bool
    seed: int


def mixed(device: torch.device) -> torch.autocast:
    """Run matrix products in bf16 on a GPU; elsewhere everything stays float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def token_loss(trunk: Trunk, hidden: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of the next token."""
    logits = trunk.logits(hidden)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def train_trunk(trunk: Trunk, corpus: Corpus, run: TrunkRun) -> dict[str, float]:
    """Train in place; returns tokens, tokens per second and the last training loss."""
    device = trunk.embed_tokens.weight.device
    generator = torch.Generator().manual_seed(run.seed)
    loss_of = token_loss
    if run.compile:
        torch._dynamo.config.recompile_limit = 64
        for layer in trunk.layers:  # equal layers share one compilation
            layer.compile(dynamic=False)
        loss_of = torch.compile(token_loss, dynamic=False)

    def backward(batch: int, window: int) -> Tensor:
        ids = corpus.windows(batch, window + 1, generator)
        with mixed(device):
            hidden, _ = trunk(ids[:, :-1])
            loss = loss_of(trunk, hidden, ids[:, 1:])
        torch.autograd.backward(loss)
        return loss.detach()

    long = (max(1, run.batch // 2), 2 * run.window)
    for shape in ((run.batch, run.window), long):
        for _ in range(WARM_UP if run.compile else 1):
            backward(*shape)
            trunk.zero_grad(set_to_none=True)
        print(f"trunk: windows of {shape[1]} tokens ready", flush=True)

    body = optimisers(trunk, run.muon_lr, run.adam_lr, ["embed_tokens.weight"])
    schedule = Schedule(body, run.steps, run.minutes)
    tokens, said = 0, 0.0
    loss = torch.zeros(())
    while schedule.progress < 1:
        shape = long if schedule.progress > 1 - LONG_SHARE else (run.batch, run.window)
        loss = backward(*shape)
        torch.nn.utils.clip_grad_norm_(trunk.parameters(), 1.0)
        schedule.apply()
        tokens += shape[0] * shape[1]
        if schedule.step % 10 == 0:
            value = loss.item()  # also keeps the host from running far ahead of the clock
            if schedule.seconds > said:
                rate = tokens / schedule.seconds
                print(
                    f"trunk: {schedule.progress:6.1%} step {schedule.step} loss {value:.3f} "
                    f"{tokens / 1e6:.1f} M tokens {rate / 1e3:.0f} k/s",
                    flush=True,
                )
                said = schedule.seconds + 10
    return {
        "tokens": tokens,
        "steps": schedule.step,
        "tokens_per_second": tokens / schedule.seconds,
        "last_loss": loss.item(),
    }


@torch.no_grad()
def held_out_losses(
    trunk: Trunk, corpus: Corpus, window: int, count: int, seed: int
) -> dict[str, float]:
    """Nats per token on held-out windows of each register."""
    generator = torch.Generator().manual_seed(seed)
    losses = {}
    for name in corpus.held_out:
        ids = corpus.held_out_windows(name, count, window + 1, generator)
        parts = []
        for rows in torch.split(ids, 16):
            hidden, _ = trunk(rows[:, :-1])
            parts.append(token_loss(trunk, hidden, rows[:, 1:]) * len(rows))
        losses[name] = float(sum(parts)) / len(ids)
    return losses
