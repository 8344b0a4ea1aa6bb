"""An evaluation as people read it: tables for the terminal and one figure.

The results are the plain dictionary that ``recipes.evaluate`` writes as evaluation.json, with one of these or both:

    documents  {loss, bits_per_byte, targets, rows, all_rows, val_rows,
                by_position: [{start, end, loss, bits_per_byte, targets}]}
    mqar       {format, rows, vocab_size, left_out, grid: [{n_pairs, length, accuracy, exact_match, loss}]}
"""

from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table


def tables(results: dict[str, Any]) -> list[str | Table]:
    """A line that says what is shown and a table: of the documents' positions, of the recall grid."""
    # Lines and not titles: a title is wrapped at its table's width.
    shown = [f"{Path(results['checkpoint']).name} of {Path(results['checkpoint']).parent}"]
    shown += _positions(results["documents"]) if "documents" in results else []
    return shown + (_recall(results["mqar"]) if "mqar" in results else [])


def _positions(documents: dict[str, Any]) -> list[str | Table]:
    rows, own = documents["rows"], documents["val_rows"]
    said = f"held-out documents: {'all ' if documents['all_rows'] else ''}{rows} rows are read"
    if own is not None and own < rows:
        said += f"; the run's own heldout/bits_per_byte reads {own}, its data.val_rows"
    table = Table()
    for name in ("position in the row", "loss, nats", "bits a byte", "tokens"):
        table.add_column(name, justify="right")
    for name, part in [("all", documents), *((f"{x['start']} to {x['end'] - 1}", x) for x in documents["by_position"])]:
        table.add_row(name, f"{part['loss']:.4f}", f"{part['bits_per_byte']:.4f}", f"{part['targets']:,}")
    return [said, table]


def _recall(mqar: dict[str, Any]) -> list[str | Table]:
    cells = {(cell["n_pairs"], cell["length"]): cell for cell in mqar["grid"]}
    pairs, lengths = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    table = Table()
    table.add_column("pairs", justify="right")
    for length in lengths:
        table.add_column(f"T = {length}", justify="right")
    for n_pairs in pairs:
        row = [cells.get((n_pairs, length)) for length in lengths]
        table.add_row(str(n_pairs), *(f"{cell['accuracy']:.3f} / {cell['exact_match']:.3f}"
                                      if cell else "does not fit" for cell in row))
    left_out = [f"left out of the grid: {'; '.join(mqar['left_out'])}"] if mqar["left_out"] else []
    return [f"recall (MQAR, {mqar['format']} format): accuracy per query / rows with every query right; "
            f"{mqar['rows']} rows a cell, chance {1 / mqar['vocab_size']:.4f}", table, *left_out]


def figure(results: dict[str, Any]) -> Figure:
    """Bits per byte by position in the documents, recall as a heat map over pairs and lengths: those that there are."""
    parts = [(draw, results[name]) for name, draw in (("documents", _draw_positions), ("mqar", _draw_recall))
             if name in results]
    canvas = Figure(figsize=(10 if len(parts) > 1 else 5.5, 4), layout="constrained")
    for axes, (draw, part) in zip(canvas.subplots(1, len(parts), squeeze=False)[0], parts):
        draw(axes, part)
    return canvas


def _draw_positions(axes: Axes, documents: dict[str, Any]) -> None:
    buckets = [bucket for bucket in documents["by_position"] if bucket["targets"]]
    axes.plot([(bucket["start"] + bucket["end"]) / 2 for bucket in buckets],
              [bucket["bits_per_byte"] for bucket in buckets], marker="o")
    axes.set(xlabel="position in the row (tokens)", ylabel="bits per byte", title="held-out documents", xscale="log")
    ends = sorted({bucket["start"] or 1 for bucket in buckets} | {bucket["end"] for bucket in buckets})
    axes.set_xticks(ends, [str(end) for end in ends])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _draw_recall(axes: Axes, mqar: dict[str, Any]) -> None:
    grid = mqar["grid"]
    pairs, lengths = (sorted({cell[axis] for cell in grid}) for axis in ("n_pairs", "length"))
    image = axes.imshow([[next((cell["accuracy"] for cell in grid if (cell["n_pairs"], cell["length"]) == (n, t)),
                               float("nan")) for t in lengths] for n in pairs],
                        vmin=0, vmax=1, cmap="viridis", origin="lower", aspect="auto")
    for cell in grid:
        axes.text(lengths.index(cell["length"]), pairs.index(cell["n_pairs"]), f"{cell['accuracy']:.2f}",
                  ha="center", va="center", color="black" if cell["accuracy"] > 0.6 else "white")
    axes.set(xticks=range(len(lengths)), xticklabels=lengths, yticks=range(len(pairs)), yticklabels=pairs,
             xlabel="sequence length T", ylabel="pairs to recall", title="MQAR accuracy per query")
    axes.figure.colorbar(image, ax=axes)


def save_figure(results: dict[str, Any], path: Path) -> None:
    """Writes the figure as PNG, aside first, then renamed; on a full disk Pillow removes what it began."""
    partial = path.with_name(f"{path.name}.partial")
    figure(results).savefig(partial, format="png", dpi=120)
    partial.replace(path)
