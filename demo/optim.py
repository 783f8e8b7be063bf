"""Optimisers and the learning-rate schedule: Muon for matrices, AdamW for the rest."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

MIN_MUON_ROWS = 16  # smaller projections (decay and beta of a few heads) go to AdamW


def orthogonalise(
    g: Tensor,  # [n, rows, columns]
) -> Tensor:
    """Bring the singular values of each matrix near one with five Newton-Schulz steps."""
    x: Tensor = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised; equal shapes are stacked and treated in one batch."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95) -> None:
        super().__init__(list(params), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Apply one update."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for shape, params in by_shape.items():
                self._update(shape, params, group["lr"], group["momentum"])

    def _update(self, shape: torch.Size, params: list[Tensor], lr: float, momentum: float) -> None:
        grads = [p.grad for p in params if p.grad is not None]
        moments = [self.state[p].setdefault("moment", torch.zeros_like(p)) for p in params]
        torch._foreach_lerp_(moments, grads, 1 - momentum)
        nesterov = torch._foreach_lerp(grads, moments, momentum)
        update = orthogonalise(torch.stack(nesterov)).float()
        scale = -lr * max(1.0, shape[0] / shape[1]) ** 0.5
        torch._foreach_add_(params, list(update.unbind()), alpha=scale)


def optimisers(
    model: nn.Module, muon_lr: float, adam_lr: float, vocabulary: Iterable[str]
) -> list[torch.optim.Optimizer]:
    """Muon for the body matrices; AdamW for those named in `vocabulary` and everything else."""
    names = set(vocabulary)
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in model.named_parameters():
        body = p.ndim == 2 and min(p.shape) >= MIN_MUON_ROWS and name not in names
        (matrices if body else others).append(p)
    fused = others[0].is_cuda
    adam = torch.optim.AdamW(others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)
    return [Muon(matrices, muon_lr), adam]


class Schedule:
    """Linear warm-up, then linear decay to zero, over a number of steps or of minutes."""

    def __init__(
        self,
        optimisers: list[torch.optim.Optimizer],
        steps: int | None,
        minutes: float | None,
        warmup: float = 0.02,
    ) -> None:
        if (steps is None) == (minutes is None):
            raise ValueError("give either a number of steps or of minutes")
        self.optimisers, self.steps, self.minutes, self.warmup = optimisers, steps, minutes, warmup
        self.base = [[g["lr"] for g in o.param_groups] for o in optimisers]
        self.step, self.start = 0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the schedule was made."""
        return time.monotonic() - self.start

    @property
    def progress(self) -> float:
        """Share of the training that is done, 0 to 1."""
        if self.steps is not None:
            return self.step / self.steps
        assert self.minutes is not None, "checked when made"
        return min(1.0, self.seconds / (60 * self.minutes))

    def apply(self) -> None:
        """Set the learning rates for the coming step, update, and clear the gradients."""
        now = self.progress
        factor = min(1.0, (now + 1e-3) / self.warmup) * (1 - now)
        for optimiser, bases in zip(self.optimisers, self.base, strict=True):
            for group, base in zip(optimiser.param_groups, bases, strict=True):
                group["lr"] = base * factor
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        self.step += 1
