"""The command `variants`: graphs of a bundle whose draft is read in other ways, for `tune`."""

from __future__ import annotations

import argparse
from pathlib import Path

from eagle_chain.engines.config import DraftConfig
from eagle_chain.engines.contract import engine_specs
from eagle_chain.engines.fields import read_json
from eagle_chain.engines.manifest import Manifest
from eagle_chain.engines.outcome import Outcome
from eagle_chain.engines.strict_json import decode


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `eagle-chain variants` takes."""
    parser.add_argument("bundle", metavar="BUNDLE", type=Path, help="what `export` wrote")
    parser.add_argument(
        "plan",
        metavar="PLAN",
        type=Path,
        help="JSON file: name of a graph -> the draft config it is made with. The name is that of "
        "an engine, with anything behind a dot: draft_step.3",
    )
    parser.add_argument(
        "-o", "--output", metavar="FOLDER", type=Path, required=True, help="where graphs are put"
    )
    parser.add_argument("--capacity", type=int, help="of the graphs (all the bundle has)")


def run(arguments: argparse.Namespace) -> Outcome:
    """Author every graph of the plan over the weights that the bundle names; none is read."""
    from eagle_chain.export.bundle import check_graph, write_graph
    from eagle_chain.export.graph import build_graphs

    manifest = Manifest.load(arguments.bundle)
    options, mtp = manifest.options, manifest.mtp
    if arguments.capacity is not None:
        options = options.at(arguments.capacity)
    written = []
    for name, plain in read_json(arguments.plan).items():
        engine, draft = name.partition(".")[0], decode(DraftConfig, plain)
        graphs = build_graphs(manifest.trunk, draft, manifest.weights, options, mtp, [engine])
        spec = engine_specs(manifest.trunk, draft, options, mtp)[engine]
        check_graph(graphs[engine], spec, options.profile)
        path = arguments.output / f"{name}.onnx"
        write_graph(path, graphs[engine])
        written.append(str(path))
    return Outcome({"graphs": written})
