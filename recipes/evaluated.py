"""What a checkpoint is evaluated on: the run's own data, and a grid of recall tasks."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryFile

import torch
import yaml
from jsonargparse import Namespace

from data import MQARDataModule
from vla_lm.checkpoint_files import is_neutral, run_config
from vla_lm.config import ModelConfig

PAIRS, LENGTHS = [4, 8, 16], [64, 128, 256]


def run_data(checkpoint: Path) -> tuple[str, dict, Path]:
    """The run's data module (class path and arguments; none for a lone checkpoint), and the folder for the results."""
    if (config := run_config(checkpoint)) is None:
        print(f"no config.yaml of a run with {checkpoint}: recall in the paper format", file=sys.stderr)
        return "", {}, checkpoint if is_neutral(checkpoint) else checkpoint.parent
    try:
        return (data := yaml.safe_load(config.read_text())["data"])["class_path"], data["init_args"], config.parent
    except (yaml.YAMLError, TypeError, KeyError):
        raise ValueError(f"{config} is not a run's configuration: put the run's own back, or move it away") from None


def check_writable(folder: Path) -> None:
    """ValueError where the folder takes no file of a figure's size."""
    try:
        with TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 17))
    except OSError as error:
        raise ValueError(f"{folder} cannot be written to ({error.strerror}): make room there, or evaluate a copy of "
                         "the checkpoint and its marker elsewhere") from None


@contextmanager
def in_memory(rows: int, length: int) -> Iterator[None]:
    """Around a cell of the grid: one that takes more memory than there is ends the process, exit code 3."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        print(f"stopped: not enough memory for {rows} rows of {length:,} tokens at once: give a smaller --batch_rows, "
              "or shorter --lengths", file=sys.stderr)
        sys.exit(3)


def recall_cells(args: Namespace, source: str, settings: dict,
                 config: ModelConfig) -> tuple[dict, list[tuple[int, int, MQARDataModule]]]:
    """The task, in the format that the run was trained on; (pairs, length, data module) of each cell that fits."""
    task = {key: settings[key] for key in ("format", "filler")} if source.endswith("MQARDataModule") else {}
    lengths, rows = args.lengths or LENGTHS, args.rows or (64 if source.endswith("DocumentsDataModule") else 512)
    cells, problems = [], []
    for pairs, length in product(args.pairs or PAIRS, lengths):
        if config.style == "paper" and length > config.max_positions:
            problems.append(f"length {length} is beyond the model's {config.max_positions} learned positions")
            continue
        try:
            data = MQARDataModule(vocab_size=config.vocab_size, n_pairs=pairs, length=length, val_rows=rows,
                                  val_batch_rows=args.batch_rows, seed=args.seed, **task)
            cells.append((pairs, length, data))
        except ValueError as error:
            problems.append(str(error))
    if not cells:
        raise ValueError(f"no cell of the grid fits: {problems[-1]}")
    return {"format": task.get("format", "paper"), "rows": rows, "vocab_size": config.vocab_size, "seed": args.seed,
            "left_out": [*dict.fromkeys(problems)], "grid": []}, cells


def keep_earlier(folder: Path, text: str) -> str | None:
    """Rename the results of another evaluation than `text`; their new names, None where none are in the way."""
    old = [path for kind in ("json", "png") if (path := folder / f"evaluation.{kind}").exists()]
    if not old or (old[0].suffix == ".json" and old[0].read_bytes() == text.encode()):
        return None
    stem = next(stem for stem in map("evaluation.{}".format, count(1)) if not any(folder.glob(f"{stem}.*")))
    return " and ".join(path.rename(path.with_stem(stem)).name for path in old)
