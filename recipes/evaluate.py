"""Evaluate a checkpoint: recall over a grid of pairs and lengths and, for a run on documents, loss by position.

    python -m recipes.evaluate runs/NAME
    python -m recipes.evaluate runs/NAME/checkpoints/step=000500.ckpt --pairs 4 8 16 --lengths 64 256

Prints tables and writes evaluation.json and evaluation.png into the run's folder (beside a lone checkpoint).
"""

import json
from pathlib import Path

import yaml
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.progress import track

from callbacks.run_folder import write_aside
from data import DocumentsDataModule, MQARDataModule
from recipes.errors import bad_input
from vla_lm.checkpoints import load_model
from vla_lm.evaluation import mqar, perplexity, report


def parse(argv: list[str] | None):
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=str, help="A run's folder (its newest complete checkpoint), or a checkpoint.")
    parser.add_argument("--pairs", type=list[int], default=[4, 8, 16], help="Pairs to recall, one row of the grid each.")
    parser.add_argument("--lengths", type=list[int], default=[32, 64, 128], help="Sequence lengths, one column each.")
    parser.add_argument("--samples", type=int, default=512, help="Test sequences in each cell of the grid.")
    parser.add_argument("--batch_rows", type=int, default=64, help="Sequences evaluated at once.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the test sequences.")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu or cuda.")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    console = Console()
    with bad_input():
        model = load_model(args.checkpoint, device=args.device)
        source = Path(args.checkpoint)
