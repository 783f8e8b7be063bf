"""Train an EAGLE-3 draft and an MTP head on text that the trunk wrote itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from corpus import Corpus
from decode import TrunkText, empty_text, generate
from evaluate import Acceptance, acceptance, before_repeat, before_stop, drafts
from heads import DraftHead, EagleConfig, EagleHead, MtpHead, unrolled_loss
from optim import Schedule, optimisers
from torch import Tensor, nn
from train_trunk import WARM_UP, mixed
from trunk_model import Trunk

STEP_WEIGHT = 0.8  # step s of the unrolled chain counts 0.8^s
TEMPERATURES = {0.0: 0.2, 0.7: 0.45, 1.0: 0.35}  # share of the sequences written at each


@dataclass(frozen=True)
class HeadRun:
    """The settings of one head's training."""

    steps: int | None
    minutes: float | None
    batch: int  # sequences a step
    depth: int  # unrolled steps
    muon_lr: float
    adam_lr: float
    compile: bool
    seed: int


def write_text(
    trunk: Trunk,
    corpus: Corpus,
    aux_layers: Sequence[int],
    sequences: int,
    batch: int,
    prompt: int,
    new_tokens: int,
    seed: int,
) -> TrunkText:
    """Let the trunk continue training prompts; states are kept in bf16."""
    device = trunk.embed_tokens.weight.device
    picks = torch.Generator().manual_seed(seed)
    noise = torch.Generator(device).manual_seed(seed)
    kept = torch.bfloat16 if device.type == "cuda" else torch.float32
    text = empty_text(sequences, prompt + new_tokens, trunk, len(aux_layers), kept)
    share = torch.tensor(list(TEMPERATURES.values()))
    levels = torch.tensor(list(TEMPERATURES))
    for start in range(0, sequences, batch):
        rows = text.rows(slice(start, start + batch))
        prompts = corpus.windows(len(rows.tokens), prompt, picks)
        order = torch.multinomial(share, len(prompts), replacement=True, generator=picks)
        generate(trunk, prompts, levels[order].to(device), aux_layers, rows, noise)
        print(f"text: {start + len(prompts)} of {sequences} sequences", flush=True)
    return text


def choose_draft_ids(text: TrunkText, vocab: int, draft_vocab: int, specials: int) -> Tensor:
    """Pick the special tokens and the most frequent others of the text, ascending."""
    counts = torch.bincount(text.tokens.flatten(), minlength=vocab).cpu()
    counts[:specials] = counts.max() + 1
    chosen = counts.argsort(descending=True, stable=True)[:draft_vocab]
    inside = counts[chosen].sum() / counts.sum()
    print(f"draft vocabulary: {draft_vocab} tokens, {inside:.2%} of the text", flush=True)
    return chosen.sort().values


def start_eagle(trunk: Trunk, config: EagleConfig, draft_ids: Tensor) -> EagleHead:
    """Make a new draft whose head is the trunk's, cut down."""
    head = EagleHead(config, draft_ids)
    initialise(head)
    with torch.no_grad():
        head.lm_head.weight.copy_(trunk.embed_tokens.weight.cpu()[draft_ids])
        head.norm.weight.copy_(1 + trunk.norm.weight.cpu())
    return head


def start_mtp(trunk: Trunk) -> MtpHead:
    """Make a new MTP head."""
    head = MtpHead(trunk.config)
    initialise(head)
    with torch.no_grad():
        head.norm.weight.copy_(trunk.norm.weight.cpu())
    return head


@torch.no_grad()
def initialise(head: nn.Module) -> None:
    """Give the matrices their starting weights."""
    for module in head.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.6 * module.in_features**-0.5)


def train_head(
    name: str, head: EagleHead | MtpHead, trunk: Trunk, text: TrunkText, run: HeadRun
) -> None:
    """Train in place against the trunk's distributions."""
    embedding = trunk.embed_tokens.weight.detach()
    device = embedding.device
    head.to(device)
    generator = torch.Generator().manual_seed(run.seed)
    weight = STEP_WEIGHT ** torch.arange(run.depth, device=device)
    weight = weight / weight.sum()
    loss_of = torch.compile(unrolled_loss, dynamic=False) if run.compile else unrolled_loss

    def backward() -> Tensor:
        index = torch.randint(len(text.tokens), (run.batch,), generator=generator)
        with mixed(device):
            losses = loss_of(head, embedding, text.rows(index.to(device)), run.depth)
        torch.autograd.backward((losses * weight).sum())
        return losses.detach()

    for _ in range(WARM_UP if run.compile else 1):
        backward()
        head.zero_grad(set_to_none=True)
    print(f"{name}: ready", flush=True)
    body = optimisers(head, run.muon_lr, run.adam_lr, ["lm_head.weight"])
    schedule = Schedule(body, run.steps, run.minutes)
    said = 0.0
    while schedule.progress < 1:
        losses = backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        schedule.apply()
        if schedule.step % 10 == 0:
            values = losses.tolist()
            if schedule.seconds > said:
                shown = " ".join(f"{value:.3f}" for value in values)
                rows = schedule.step * run.batch * text.tokens.shape[1] / schedule.seconds
                print(
                    f"{name}: {schedule.progress:6.1%} step {schedule.step} losses {shown} "
                    f"{rows / 1e3:.0f} k rows/s",
                    flush=True,
                )
                said = schedule.seconds + 10


def held_out_text(
    trunk: Trunk,
    corpus: Corpus,
    aux_layers: Sequence[int],
    prompts: int,
    prompt: int,
    new_tokens: int,
    seed: int,
) -> dict[str, TrunkText]:
    """Write greedy continuations of held-out prompts for each register, in float32."""
    device = trunk.embed_tokens.weight.device
    picks = torch.Generator().manual_seed(seed)
    noise = torch.Generator(device).manual_seed(seed)
    texts = {}
    for name in corpus.held_out:
        rows = corpus.held_out_windows(name, prompts, prompt, picks)
        text = empty_text(prompts, prompt + new_tokens, trunk, len(aux_layers), torch.float32)
        generate(trunk, rows, torch.zeros(prompts, device=device), aux_layers, text, noise)
        texts[name] = text
    return texts


@dataclass(frozen=True)
class Judged:
    """Acceptance on whole continuations, and on their parts before they repeat themselves."""

    whole: Acceptance
    fresh: Acceptance


def evaluate_head(
    head: DraftHead, trunk: Trunk, texts: dict[str, TrunkText], prompt: int, k: int, eos: int
) -> dict[str, Judged]:
    """Acceptance of chains of k on texts that `held_out_text` wrote."""
    embedding = trunk.embed_tokens.weight
    results = {}
    for name, text in texts.items():
        parts = [text.rows(index) for index in torch.split(torch.arange(len(text.tokens)), 32)]
        drafted = torch.cat([drafts(head, embedding, part, k) for part in parts])
        ends = before_stop(text.tokens, prompt, [eos])
        fresh = [min(pair) for pair in zip(ends, before_repeat(text.tokens, prompt), strict=True)]
        results[name] = Judged(
            acceptance(drafted, text.tokens, prompt, ends),
            acceptance(drafted, text.tokens, prompt, fresh),
        )
    return results
