"""The command `export`: a trunk and a draft checkpoint in, a bundle out."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from eagle_chain.engines.cli import numbers
from eagle_chain.engines.description import pair_lines
from eagle_chain.engines.errors import InputError
from eagle_chain.engines.inspection import bundle_report
from eagle_chain.engines.kv import KV_TYPES
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.overrides import CONVENTIONS, DraftOverrides
from eagle_chain.engines.progress import human_bytes
from eagle_chain.engines.spec import (
    CUDA_PROFILES,
    DEBUG_OUTPUTS,
    DTYPES,
    MOST_WIDTH,
    PREFILL_STEP,
    PROFILES,
    Options,
    check_options,
)

CAPACITY = 4096  # default, as far as the trunk was made for so many positions
PREFILL = 256  # rows of a call over a prompt; docs/long-context.md says why of either
CUDA_PREFILL = 512  # of the profiles ort-*
LARGE = 2_000_000_000  # bytes of weights above which memory matters to most people


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain export` takes."""
    parser.add_argument("trunk", metavar="TRUNK", type=Path, help="folder of a Qwen3.5 checkpoint")
    parser.add_argument(
        "draft",
        metavar="DRAFT",
        type=Path,
        nargs="?",
        help="folder of its EAGLE-3 draft (none: the trunk's own head and look-up can still draft)",
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="BUNDLE",
        type=Path,
        required=True,
        help="folder to write; a bundle that is there is replaced: its TensorRT plans are kept if "
        "the graphs stay the same, else deleted",
    )
    parser.add_argument(
        "--width",
        type=int,
        default=Options.width,
        help=f"rows of a trunk call: 1 + the most drafts, at most {MOST_WIDTH} (5)",
    )
    parser.add_argument(
        "--capacity",
        metavar="TOKENS",
        type=numbers("a number of tokens, or several like 2048,8192,32768"),
        help="longest sequence in tokens; every call attends over the whole capacity, so time and "
        "memory grow with it. Several, like 2048,8192,32768: engines of each over the same "
        f"weights; a sequence that grows moves to the next ({CAPACITY}, or all the trunk has)",
    )
    parser.add_argument(
        "--prefill",
        metavar="ROWS",
        type=int,
        help="rows of a call over a prompt, in engines made for that; 0 for none: prompts then go "
        f"through the trunk in calls of the width ({CUDA_PREFILL} in the profiles ort-*, {PREFILL} "
        "in others, or as many as the capacity has)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=Options.dtype,
        help="of activations, and of KV without --kv: fp32 and fp16 run everywhere, bf16 needs a "
        "GPU; both 16-bit types halve the memory of weights and KV there (fp32)",
    )
    parser.add_argument(
        "--kv",
        choices=KV_TYPES,
        help="how KV rows of trunk and draft are stored; q8_0/q5_1: keys in 8.5 bits a value and "
        "values in 6, q8_0: both in 8.5 (as --dtype)",
    )
    parser.add_argument(
        "--profile",
        choices=PROFILES,
        default=Options.profile,
        help="operators to use. portable: opset 17, for anything. standard: opset 24, smaller "
        "graphs. ort-cuda: for ONNX Runtime 1.31 on an NVIDIA GPU, fp16 or bf16. ort-fused: "
        "kernels of our own for that, which nvcc compiles at the first load (portable)",
    )
    parser.add_argument(
        "--weights",
        choices=("link", "copy"),
        default="link",
        help="point at the checkpoint files, or copy them so that the bundle stands alone (link)",
    )
    parser.add_argument(
        "--sampling",
        action="store_true",
        help="let the trunk draw tokens too, for `generate --temperature`",
    )
    parser.add_argument(
        "--debug",
        type=_words,
        default=(),
        metavar="OUTPUTS",
        help=f"extra outputs for checks, with commas between: {', '.join(DEBUG_OUTPUTS)}",
    )
    parser.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="only the first N layers of the trunk, the draft reading as many of them: to check "
        "graphs and kernels, not to decode (all)",
    )
    parser.add_argument(
        "--no-mtp",
        action="store_true",
        help="leave out the trunk's own draft head, which is exported if the checkpoint has one",
    )
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    """What a draft's file cannot tell: the fields of `DraftOverrides`."""
    group = parser.add_argument_group(
        "in place of the draft's config",
        "a wrong value leaves the tokens as they are and only lowers acceptance",
    )
    group.add_argument(
        "--aux-layers",
        type=numbers("layers with commas between, like 1,15,28"),
        metavar="LAYERS",
        help="trunk layers that the draft reads the outputs of, like 1,15,28",
    )
    group.add_argument(
        "--aux-convention",
        choices=CONVENTIONS,
        help="what aux layer ids are, those of the config or of --aux-layers: outputs of these "
        "layers, or boundaries in front of them",
    )
    group.add_argument("--rope-theta", type=float, help="rotary base of the draft")
    group.add_argument("--rotary-dim", type=int, help="dims of a draft head that rotate")
    for name, meaning in (
        ("norm-output", "whether the draft's next hidden state is the normed one (EAGLE 3.1)"),
        ("norm-before-residual", "whether its residual is the normed hidden state"),
    ):
        group.add_argument(f"--{name}", type=_truth, metavar="true|false", help=meaning)


def run(arguments: argparse.Namespace) -> Outcome:
    """Read the checkpoints, say what will be made of them, write the bundle."""
    from eagle_chain.export.bundle import ignored_tensors, read_pair, write_bundle
    from eagle_chain.export.few_layers import first_layers
    from eagle_chain.export.kept_plans import held_plans, plan_lines

    overrides, draft = overrides_of(arguments), arguments.draft
    if draft is None and overrides.words():
        option = overrides.words()[0]
        raise InputError(f"{option} is about a draft, and no DRAFT is named")
    pair = read_pair(arguments.trunk, draft, overrides, mtp=not arguments.no_mtp)
    if arguments.layers is not None:
        pair = first_layers(pair, arguments.layers)
    options = _options(arguments, pair.trunk_config.max_positions)
    for _, _, checkpoint in pair.checkpoints:
        for notice in checkpoint.notices:
            print(f"notice   {notice}", file=sys.stderr)
    if not (arguments.trunk / "tokenizer.json").is_file():
        print(
            f"notice   {arguments.trunk}: has no tokenizer.json, so the bundle takes token ids "
            "only (generate --ids); put it there first, or into BUNDLE/tokenizer later",
            file=sys.stderr,
        )
    made = pair.trunk_config, pair.draft_config, ignored_tensors(pair), options, overrides
    for line in pair_lines(*made, mtp=pair.mtp is not None):
        print(line, flush=True)
    held = held_plans(arguments.output)
    manifest = write_bundle(
        arguments.output,
        pair,
        options,
        arguments.weights == "copy",
        (*_repeated(arguments), *overrides.words()),
    )
    weights = sum(file.size for file in manifest.files.values())
    print(
        f"wrote    {arguments.output}: {', '.join(manifest.graphs)}; weights "
        f"{human_bytes(weights)} {'copied' if arguments.weights == 'copy' else 'linked'}"
    )
    for line in plan_lines(arguments.output, held, manifest.plans):
        print(line)
    if options.dtype == "fp32" and weights > LARGE:
        print("         for a GPU, --dtype bf16 halves the memory of weights and KV")
    deleted = sorted(held.keys() - manifest.plans.keys())
    return Outcome({**bundle_report(arguments.output, manifest), "deleted_plans": deleted})


def overrides_of(arguments: argparse.Namespace) -> DraftOverrides:
    """The overrides among the parsed arguments of `export`."""
    given = {f.name: getattr(arguments, f.name) for f in fields(DraftOverrides)}
    return DraftOverrides(**given)


def _options(arguments: argparse.Namespace, positions: int) -> Options:
    *smaller, capacity = sorted(arguments.capacity or (min(CAPACITY, positions),))
    if capacity > positions:
        raise InputError(
            f"--capacity is {capacity}, the trunk was made for {positions} positions "
            "(max_position_embeddings); give at most that"
        )
    prefill = arguments.prefill
    if prefill is None:
        prefill = CUDA_PREFILL if arguments.profile in CUDA_PROFILES else PREFILL
        prefill = min(prefill, capacity // PREFILL_STEP * PREFILL_STEP)
        prefill = prefill if prefill >= arguments.width else 0  # calls of the width are as wide
    options = Options(
        width=arguments.width,
        capacity=capacity,
        dtype=arguments.dtype,
        profile=arguments.profile,
        debug=arguments.debug,
        kv=arguments.kv,
        prefill=prefill,
        sampling=arguments.sampling,
        smaller=tuple(smaller),
    )
    check_options(options)
    return options


def _repeated(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The options that differ from their defaults, as they are typed."""
    words = []
    for name, default in (
        ("width", Options.width),
        ("capacity", None),
        ("prefill", None),
        ("dtype", Options.dtype),
        ("kv", None),
        ("profile", Options.profile),
        ("sampling", False),
        ("weights", "link"),
        ("debug", ()),
        ("layers", None),
        ("no_mtp", False),
    ):
        value = getattr(arguments, name)
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value != default:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    return tuple(words)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(text.split(","))
    if not all(words):
        message = f"got {text!r}, wanted some of {', '.join(DEBUG_OUTPUTS)}"
        raise argparse.ArgumentTypeError(message)
    return words


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted true or false")
    return text == "true"
