"""Evaluate a checkpoint: of a run on documents loss by position, of any other recall over a grid of pairs and lengths.

    python -m recipes.evaluate runs/NAME
    python -m recipes.evaluate runs/NAME/checkpoints/step=000500.ckpt --pairs 4 8 16 --lengths 64 256

Takes every form of checkpoint. Writes evaluation.json and evaluation.png into the run's folder; for a checkpoint
outside one into an export's folder, or beside a lone file. Other results there are kept, as evaluation.1.json and .png.
"""

import json
import sys

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import NonNegativeInt, PositiveInt
from rich.console import Console
from rich.progress import track

from callbacks.run_folder import write_aside
from data import DocumentsDataModule
from recipes.console import bad_input
from recipes.evaluated import LENGTHS, PAIRS, check_writable, in_memory, keep_earlier, recall_cells, run_data
from recipes.notices import quiet_notices
from vla_lm.checkpoints import check_data, checkpoint_step, complete_checkpoint, load_model
from vla_lm.evaluation import mqar, perplexity, report


def parse(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="python -m recipes.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=str,
                        help="A run's folder (its newest complete checkpoint), or a checkpoint.")
    parser.add_argument("--pairs", type=PositiveInt, nargs="+",
                        help=f"Pairs to recall, a row of the grid each; {' '.join(map(str, PAIRS))} when not given. "
                        "For a run on documents there is a grid with --pairs or --lengths alone.")
    parser.add_argument("--lengths", type=PositiveInt, nargs="+",
                        help=f"Sequence lengths, a column each; {' '.join(map(str, LENGTHS))} when not given.")
    parser.add_argument("--rows", type=PositiveInt,
                        help="Test sequences in each cell of the grid; 512, or 64 for a run on documents.")
    parser.add_argument("--batch_rows", type=PositiveInt, default=64, help="Sequences evaluated at once.")
    parser.add_argument("--held_out_rows", type=PositiveInt | None, default=None,
                        help="Rows of held-out documents; null: all.")
    parser.add_argument("--seed", type=NonNegativeInt, default=0, help="Seed of the MQAR test sequences.")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu or cuda.")
    parser.add_argument("--trust_pickle", "--trust-pickle", action="store_true",
                        help="Read a DeepSpeed folder of elsewhere.")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args, console = parse(argv), Console()
    quiet_notices()
    with bad_input():
        path = complete_checkpoint(args.checkpoint, verify=True)
        (source, settings, folder), loaders, task, cells = run_data(path), [], {}, []
        check_writable(folder)
        model = load_model(path, args.device, args.trust_pickle, verify=False)
        if on_documents := source.endswith("DocumentsDataModule"):
            documents = DocumentsDataModule(**settings | {"source": None, "val_rows": args.held_out_rows})
            documents.setup("validate")
            check_data(path, documents, args.trust_pickle)
            loaders = documents.val_dataloader()  # none where no document was held out
        if not on_documents or args.pairs or args.lengths:
            task, cells = recall_cells(args, source, settings, model.config)
        elif not loaders:
            raise ValueError(f"{documents.store_path} holds out no document, and a run on documents is evaluated on "
                             "recall only when asked to: give --pairs or --lengths")
    results = {"checkpoint": str(path), "step": checkpoint_step(path), "model": model.config.to_dict()}
    for batches in loaders:
        found = perplexity.evaluate(model, track(batches, "held-out documents", console=console))
        results["documents"] = {"all_rows": args.held_out_rows is None, "val_rows": settings.get("val_rows"), **found}
    for pairs, length, data in track(cells, "recall", console=console) if cells else []:
        with in_memory(min(args.batch_rows, task["rows"]), length):
            task["grid"] += [{"n_pairs": pairs, "length": length, **mqar.evaluate(model, data.val_dataloader()[0])}]
    if task:
        results["mqar"] = task
    console.print(*report.tables(results), sep="\n")
    text = json.dumps(results, indent=1)
    try:
        if kept := keep_earlier(folder, text):
            console.print(f"kept: the results that were there, now {kept}", soft_wrap=True)
        write_aside(folder / "evaluation.json", text)
        report.save_figure(results, folder / "evaluation.png")
    except OSError as error:
        print(f"stopped: the results could not be written into {folder} ({error.strerror or error}): make room there, "
              "then evaluate again", file=sys.stderr)
        sys.exit(3)
    console.print(f"written: {folder / 'evaluation.json'} and {folder / 'evaluation.png'}", soft_wrap=True)


if __name__ == "__main__":
    main()
