"""Train the demo pair, or a draft for another small trunk: command line and stages.

    python demo/train.py tokens   --corpus corpus.jsonl.xz --out tokens.npz
    python demo/train.py trunk    --corpus tokens.npz --trunk demo/trunk
    python demo/train.py heads    --corpus tokens.npz --trunk demo/trunk --draft demo/draft
    python demo/train.py evaluate --corpus tokens.npz --trunk demo/trunk --draft demo/draft

A stage reads and writes folders, so each can be run again alone. `smoke` runs all of them with a
few steps on a tiny pair. `docs/training.md` has the recipe and what it gave.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from corpus import EOS, Corpus, load, special_id, tokenise
from folders import (
    SIZES,
    add_mtp,
    draft_json,
    has_mtp,
    read_draft,
    read_json,
    read_mtp,
    read_trunk,
    trunk_json,
    write_draft,
    write_json,
    write_trunk,
)
from heads import DraftHead, EagleConfig
from tokenizers import Tokenizer
from train_heads import (
    HeadRun,
    choose_draft_ids,
    evaluate_head,
    held_out_text,
    start_eagle,
    start_mtp,
    train_head,
    write_text,
)
from train_trunk import TrunkRun, held_out_losses, train_trunk
from trunk_model import Trunk, TrunkConfig, initialise

HERE = Path(__file__).parent


def tokens_stage(args: argparse.Namespace) -> None:
    """Tokenise a corpus once, for the other stages."""
    streams = tokenise(args.corpus, args.tokenizer)
    np.savez_compressed(args.out, allow_pickle=False, **streams)
    for name, ids in streams.items():
        print(f"{name}: {len(ids)} tokens")
    print(f"wrote {args.out}")


def open_corpus(args: argparse.Namespace) -> tuple[Corpus, torch.device]:
    """Load the corpus to the chosen device and fix what makes runs repeatable."""
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    return load(args.corpus, args.tokenizer, device), device


def trunk_stage(args: argparse.Namespace) -> None:
    """Train the trunk and write its folder."""
    corpus, device = open_corpus(args)
    torch.set_float32_matmul_precision("high")
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    eos = special_id(tokenizer, EOS)
    config = trunk_json(SIZES[args.size], tokenizer.get_vocab_size(), eos)
    trunk = Trunk(TrunkConfig.from_json(config))
    initialise(trunk)
    trunk.to(device)
    count = sum(p.numel() for p in trunk.parameters())
    print(f"trunk: {count / 1e6:.2f} M parameters on {device}", flush=True)
    run = TrunkRun(
        steps=args.steps,
        minutes=None if args.steps else args.minutes,
        batch=args.batch,
        window=args.window,
        muon_lr=0.02,
        adam_lr=3e-3,
        compile=args.compile,
        seed=args.seed,
    )
    result: dict[str, object] = dict(train_trunk(trunk, corpus, run))
    write_trunk(args.trunk, config, trunk, args.tokenizer)
    torch.set_float32_matmul_precision("highest")
    shipped = read_trunk(args.trunk, device)
    result["held_out"] = held_out_losses(shipped, corpus, args.window, 64, args.seed)
    report(args, "trunk", result)
    print(f"wrote {args.trunk}")


def heads_stage(args: argparse.Namespace) -> None:
    """Train the draft, the MTP head, or both, for a trunk folder."""
    corpus, device = open_corpus(args)
    torch.set_float32_matmul_precision("high")
    trunk = read_trunk(args.trunk, device)
    layers = len(trunk.layers)
    aux_layers = args.aux_layers or [1, layers // 2 - 1, layers - 2]
    start = time.monotonic()
    text = write_text(
        trunk,
        corpus,
        aux_layers,
        sequences=args.sequences,
        batch=args.text_batch,
        prompt=args.prompt,
        new_tokens=args.new_tokens,
        seed=args.seed,
    )
    rate = text.tokens.numel() / (time.monotonic() - start)
    print(f"text: {text.tokens.numel() / 1e6:.1f} M tokens, {rate / 1e3:.0f} k/s", flush=True)

    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    eos = special_id(tokenizer, EOS)
    config = draft_json(trunk.config, args.draft_ffn, args.draft_vocab, aux_layers, eos)

    def run(minutes: float) -> HeadRun:
        return HeadRun(
            steps=args.steps,
            minutes=None if args.steps else minutes,
            batch=args.batch,
            depth=args.depth,
            muon_lr=0.02,
            adam_lr=2e-3,
            compile=args.compile,
            seed=args.seed,
        )

    if args.only != "mtp":
        specials = sum(t.special for t in tokenizer.get_added_tokens_decoder().values())
        ids = choose_draft_ids(text, trunk.config.vocab, args.draft_vocab, specials)
        eagle = start_eagle(trunk, EagleConfig.from_json(config), ids)
        train_head("eagle", eagle, trunk, text, run(args.minutes))
        write_draft(args.draft, config, eagle)
        print(f"wrote {args.draft}", flush=True)
    if args.only != "eagle":
        mtp = start_mtp(trunk)
        train_head("mtp", mtp, trunk, text, run(args.mtp_minutes))
        add_mtp(args.trunk, mtp)
        print(f"wrote {args.trunk}", flush=True)
    del text
    evaluate(args, corpus, device)


def evaluate_stage(args: argparse.Namespace) -> None:
    """Measure greedy acceptance of a pair of folders on held-out prompts."""
    corpus, device = open_corpus(args)
    evaluate(args, corpus, device)


def evaluate(args: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
    """Print and report acceptance by register, head and prompt length, in float32."""
    torch.set_float32_matmul_precision("highest")
    trunk = read_trunk(args.trunk, device)
    heads: dict[str, DraftHead] = {"eagle": read_draft(args.draft, device)}
    if has_mtp(args.trunk):
        heads["mtp"] = read_mtp(args.trunk, device)
    aux = EagleConfig.from_json(read_json(args.draft / "config.json")).aux_layers
    eos = special_id(Tokenizer.from_file(str(args.tokenizer)), EOS)
    result: dict[str, object] = {"k": args.k, "new_tokens": args.judge_tokens}
    for prompt in args.judge_prompts:
        new_tokens = args.judge_tokens + args.k + 1  # the last chains reach past what is counted
        texts = held_out_text(trunk, corpus, aux, args.judge_count, prompt, new_tokens, args.seed)
        for name, head in heads.items():
            found = evaluate_head(head, trunk, texts, prompt, args.k, eos)
            for register, judged in found.items():
                for part, value in (("whole", judged.whole), ("fresh", judged.fresh)):
                    by = [round(share, 4) for share in value.by_position]
                    result[f"{name}.{register}.prompt{prompt}.{part}"] = {
                        "acceptance_length": round(value.length, 4),
                        "acceptance_by_position": by,
                        "rounds": value.rounds,
                    }
                    shown = " ".join(f"{share:.3f}" for share in by)
                    print(
                        f"{name:5} {register:4} prompt {prompt:4} {part}: {value.length:.3f} "
                        f"tokens a pass, by position {shown} ({value.rounds} rounds)",
                        flush=True,
                    )
    report(args, "evaluate", result)


def smoke_stage(args: argparse.Namespace) -> None:
    """Run every stage with a few steps on a tiny pair."""
    for stage in (trunk_stage, heads_stage):
        stage(args)


def report(args: argparse.Namespace, name: str, result: dict[str, object]) -> None:
    """Print a stage's result and, if asked, write it as JSON."""
    print(f"{name}: {result}", flush=True)
    if args.report:
        args.report.mkdir(parents=True, exist_ok=True)
        write_json(args.report / f"{name}.json", result)


def add_common(parser: argparse.ArgumentParser, device: str) -> None:
    """Add the options that every training stage has."""
    parser.add_argument("--corpus", type=Path, required=True, help=".jsonl, .jsonl.xz or .npz")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        default=HERE / "trunk" / "tokenizer.json",
        help="tokenizer.json (default: the demo trunk's)",
    )
    parser.add_argument("--trunk", type=Path, required=True, help="trunk folder")
    parser.add_argument("--device", default=device, help="torch device (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--report", type=Path, help="folder for the results as JSON")


def add_training(parser: argparse.ArgumentParser, minutes: float, batch: int) -> None:
    """Add the options of a stage that trains."""
    gpu = torch.cuda.is_available()
    parser.add_argument(
        "--minutes", type=float, default=minutes, help="training time (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, help="number of steps, instead of --minutes")
    parser.add_argument("--batch", type=int, default=batch, help="default: %(default)s")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=gpu,
        help="use torch.compile (default: on a GPU)",
    )


def add_judging(parser: argparse.ArgumentParser) -> None:
    """Add the options of the acceptance measurement."""
    parser.add_argument("--draft", type=Path, required=True, help="draft folder")
    parser.add_argument("-k", type=int, default=4, help="drafted tokens a round (default: 4)")
    parser.add_argument(
        "--judge-prompts",
        type=int,
        nargs="+",
        default=[64, 512],
        help="prompt lengths of the measurement (default: 64 512)",
    )
    parser.add_argument(
        "--judge-count", type=int, default=128, help="held-out prompts a register (default: 128)"
    )
    parser.add_argument(
        "--judge-tokens", type=int, default=128, help="tokens after each prompt (default: 128)"
    )


def add_heads(parser: argparse.ArgumentParser) -> None:
    """Add the options of the heads and of the text that the trunk writes for them."""
    parser.add_argument(
        "--sequences", type=int, default=40960, help="texts to train on (default: %(default)s)"
    )
    parser.add_argument(
        "--text-batch", type=int, default=4096, help="texts written at once (default: %(default)s)"
    )
    parser.add_argument(
        "--prompt", type=int, default=64, help="corpus tokens in a text (default: %(default)s)"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=256, help="tokens written (default: %(default)s)"
    )
    parser.add_argument(
        "--aux-layers",
        type=int,
        nargs=3,
        help="trunk layers whose outputs are the features (default: 1, n/2 - 1, n - 2)",
    )
    parser.add_argument(
        "--draft-ffn", type=int, default=640, help="MLP width of the draft (default: %(default)s)"
    )
    parser.add_argument(
        "--draft-vocab", type=int, default=4096, help="tokens it can draft (default: %(default)s)"
    )
    parser.add_argument("--depth", type=int, default=5, help="unrolled steps (default: 5)")
    parser.add_argument("--only", choices=["eagle", "mtp"], help="train one head (default: both)")
    parser.add_argument(
        "--mtp-minutes",
        type=float,
        default=1.2,
        help="training time of the MTP head (default: %(default)s)",
    )


def parse() -> argparse.Namespace:
    """Read the command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    stages = parser.add_subparsers(required=True, metavar="STAGE")

    stage = stages.add_parser("tokens", help=tokens_stage.__doc__)
    stage.add_argument("--corpus", type=Path, required=True, help=".jsonl or .jsonl.xz")
    stage.add_argument("--tokenizer", type=Path, default=HERE / "trunk" / "tokenizer.json")
    stage.add_argument("--out", type=Path, required=True, help=".npz to write")
    stage.set_defaults(run=tokens_stage)

    stage = stages.add_parser("trunk", help=trunk_stage.__doc__)
    add_common(stage, device)
    add_training(stage, minutes=4.5, batch=64)
    stage.add_argument("--size", choices=SIZES, default="demo", help="default: %(default)s")
    stage.add_argument("--window", type=int, default=512, help="default: %(default)s")
    stage.set_defaults(run=trunk_stage)

    stage = stages.add_parser("heads", help=heads_stage.__doc__)
    add_common(stage, device)
    add_training(stage, minutes=2.4, batch=128)
    add_heads(stage)
    add_judging(stage)
    stage.set_defaults(run=heads_stage)

    stage = stages.add_parser("evaluate", help=evaluate_stage.__doc__)
    add_common(stage, device)
    add_judging(stage)
    stage.set_defaults(run=evaluate_stage)

    stage = stages.add_parser("smoke", help=smoke_stage.__doc__)
    add_common(stage, "cpu")
    add_training(stage, minutes=0.0, batch=4)
    add_heads(stage)
    add_judging(stage)
    stage.add_argument("--size", choices=SIZES, default="tiny", help="default: %(default)s")
    stage.add_argument("--window", type=int, default=64, help="default: %(default)s")
    stage.set_defaults(
        run=smoke_stage,
        aux_layers=[1, 2, 3],
        draft_ffn=128,
        draft_vocab=1024,
        steps=8,
        compile=False,
        sequences=16,
        text_batch=8,
        prompt=16,
        new_tokens=24,
        judge_prompts=[16],
        judge_count=4,
        judge_tokens=16,
    )
    return parser.parse_args()


def main() -> None:
    """Run one stage."""
    args = parse()
    try:
        args.run(args)
    except (OSError, ValueError) as error:
        sys.exit(f"train.py: {error}")


if __name__ == "__main__":
    main()
