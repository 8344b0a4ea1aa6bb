"""Evaluate a checkpoint: recall over a grid of pairs and lengths and, for a run on documents, loss by position.

    python -m recipes.evaluate runs/NAME
    python -m recipes.evaluate runs/NAME/checkpoints/step=000500.ckpt --pairs 4 8 16 --lengths 64 256

Takes every form of checkpoint. Writes evaluation.json and evaluation.png into the run's folder; for a checkpoint
outside one into an export's folder, or beside a lone file.
"""

import json
import os

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import track

from callbacks.run_folder import write_aside
from data import DocumentsDataModule
from recipes.console import bad_input
from recipes.evaluated import recall_cells, run_data
from vla_lm.checkpoints import check_data, checkpoint_step, complete_checkpoint, load_model
from vla_lm.evaluation import mqar, perplexity, report


def parse(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="python -m recipes.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=str,
                        help="A run's folder (its newest complete checkpoint), or a checkpoint.")
    parser.add_argument("--pairs", type=int, nargs="+", default=[4, 8, 16],
                        help="Pairs to recall, a row of the grid each.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256],
                        help="Sequence lengths, a column each.")
    parser.add_argument("--rows", type=int,
                        help="Test sequences in each cell of the grid; 512, or 64 for a run on documents.")
    parser.add_argument("--batch_rows", type=int, default=64, help="Sequences evaluated at once.")
    parser.add_argument("--held_out_rows", type=int | None, default=None, help="Rows of held-out documents; null: all.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the MQAR test sequences.")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu or cuda.")
    parser.add_argument("--trust_pickle", "--trust-pickle", action="store_true",
                        help="Read a DeepSpeed folder of elsewhere.")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args, console = parse(argv), Console()
    with bad_input():
        path = complete_checkpoint(args.checkpoint, verify=True)
        (source, settings, folder), documents = run_data(path), None
        args.rows = args.rows or (64 if source.endswith("DocumentsDataModule") else 512)
        model = load_model(path, args.device, args.trust_pickle, verify=False)
        shape, cells = recall_cells(args, source, settings, model.config)
        if not os.access(folder, os.W_OK):
            raise OSError(f"{folder} cannot be written to: evaluate a copy of the checkpoint and its marker elsewhere")
        if source.endswith("DocumentsDataModule"):
            documents = DocumentsDataModule(**settings | {"source": None, "val_rows": args.held_out_rows})
            documents.setup("validate")
            check_data(path, documents, args.trust_pickle)
    task = {"format": shape, "rows": args.rows, "vocab_size": model.config.vocab_size, "grid": []}
    results = {"checkpoint": str(path), "step": checkpoint_step(path), "model": model.config.to_dict(), "mqar": task}
    for pairs, length, data in track(cells, "recall", console=console):
        results["mqar"]["grid"] += [{"n_pairs": pairs, "length": length,
                                     **mqar.evaluate(model, data.val_dataloader()[0])}]
    for batches in documents.val_dataloader() if documents else []:  # none where no document was held out
        results["documents"] = perplexity.evaluate(model, track(batches, "held-out documents", console=console))
    write_aside(folder / "evaluation.json", json.dumps(results, indent=1))
    report.save_figure(results, folder / "evaluation.png")
    console.print(*report.tables(results))
    console.print(f"written: {folder / 'evaluation.json'} and {folder / 'evaluation.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
