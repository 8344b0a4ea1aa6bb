"""What a checkpoint is evaluated on: the run's own data, and a grid of recall tasks."""

import sys
from itertools import product
from pathlib import Path

import yaml
from jsonargparse import Namespace

from data import MQARDataModule
from vla_lm.checkpoint_files import is_neutral, run_config
from vla_lm.config import ModelConfig


def run_data(checkpoint: Path) -> tuple[str, dict, Path]:
    """The run's data module (class path and arguments; none for a lone checkpoint), and the folder for the results."""
    if (config := run_config(checkpoint)) is None:
        print(f"no config.yaml of a run with {checkpoint}: recall in the paper format", file=sys.stderr)
        return "", {}, checkpoint if is_neutral(checkpoint) else checkpoint.parent
    try:
        return (data := yaml.safe_load(config.read_text())["data"])["class_path"], data["init_args"], config.parent
    except (yaml.YAMLError, TypeError, KeyError):
        raise ValueError(f"{config} is not a run's configuration: put the run's own back, or move it away") from None


def recall_cells(args: Namespace, source: str, settings: dict,
                 config: ModelConfig) -> tuple[str, list[tuple[int, int, MQARDataModule]]]:
    """The format that the run was trained on, and (pairs, length, data module) of each cell of the grid that fits."""
    task = {key: settings[key] for key in ("format", "filler")} if source.endswith("MQARDataModule") else {}
    if config.style == "paper" and (longest := max(args.lengths)) > (known := config.max_positions):
        raise ValueError(f"--lengths {longest} is beyond the model's learned positions: give lengths up to {known}")
    cells = []
    for pairs, length in product(args.pairs, args.lengths):
        try:
            data = MQARDataModule(vocab_size=config.vocab_size, n_pairs=pairs, length=length, val_rows=args.rows,
                                  val_batch_rows=args.batch_rows, seed=args.seed, **task)
            cells.append((pairs, length, data))
        except ValueError as error:
            problem = error
    if not cells:
        raise ValueError(f"no cell of the grid fits: {problem}")
    return task.get("format", "paper"), cells
