"""An evaluation as people read it: tables for the terminal and one figure.

The results are the plain dictionary that ``recipes.evaluate`` writes as evaluation.json:

    mqar       {format, rows, vocab_size, grid: [{n_pairs, length, accuracy, exact_match, loss}]}
    documents  {loss, bits_per_byte, targets, by_position: [{start, end, loss, bits_per_byte, targets}]},
               where there were documents
"""

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table


def tables(results: dict[str, Any]) -> list[Table]:
    """One table for the recall grid and one for the documents' positions, where the results have them."""
    mqar = results["mqar"]
    cells = {(cell["n_pairs"], cell["length"]): cell for cell in mqar["grid"]}
    pairs, lengths = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    recall = Table(title=f"MQAR ({mqar['format']} format), accuracy per query / whole rows right, "
                         f"{mqar['rows']} rows a cell, chance {1 / mqar['vocab_size']:.4f}")
    recall.add_column("pairs", justify="right")
    for length in lengths:
        recall.add_column(f"T = {length}", justify="right")
    for n_pairs in pairs:
        row = [cells.get((n_pairs, length)) for length in lengths]
        recall.add_row(str(n_pairs), *(f"{cell['accuracy']:.3f} / {cell['exact_match']:.3f}"
                                       if cell else "does not fit" for cell in row))
    if "documents" not in results:
        return [recall]
    documents = results["documents"]
    positions = Table(title=f"held-out documents: loss {documents['loss']:.4f} nats a token, "
                            f"{documents['bits_per_byte']:.4f} bits a byte, {documents['targets']:,} tokens")
    for name in ("position in the row", "loss", "bits a byte", "tokens"):
        positions.add_column(name, justify="right")
    for bucket in documents["by_position"]:
        positions.add_row(f"{bucket['start']} to {bucket['end'] - 1}", f"{bucket['loss']:.4f}",
                          f"{bucket['bits_per_byte']:.4f}", f"{bucket['targets']:,}")
    return [recall, positions]


def figure(results: dict[str, Any]) -> Figure:
    """Recall as a heat map over pairs and lengths; beside it bits per byte by position, where there were documents."""
    grid = results["mqar"]["grid"]
    pairs, lengths = (sorted({cell[axis] for cell in grid}) for axis in ("n_pairs", "length"))
    both = "documents" in results
    canvas = Figure(figsize=(10 if both else 5.5, 4), layout="constrained")
    left, *right = canvas.subplots(1, 2 if both else 1, squeeze=False)[0]
    image = left.imshow([[next((cell["accuracy"] for cell in grid if (cell["n_pairs"], cell["length"]) == (n, t)),
                               float("nan")) for t in lengths] for n in pairs],
                        vmin=0, vmax=1, cmap="viridis", origin="lower", aspect="auto")
    for cell in grid:
        left.text(lengths.index(cell["length"]), pairs.index(cell["n_pairs"]), f"{cell['accuracy']:.2f}",
                  ha="center", va="center", color="black" if cell["accuracy"] > 0.6 else "white")
    left.set(xticks=range(len(lengths)), xticklabels=lengths, yticks=range(len(pairs)), yticklabels=pairs,
             xlabel="sequence length T", ylabel="pairs to recall", title="MQAR accuracy per query")
    canvas.colorbar(image, ax=left)
    for axes in right:
        buckets = [bucket for bucket in results["documents"]["by_position"] if bucket["targets"]]
        axes.plot([(bucket["start"] + bucket["end"]) / 2 for bucket in buckets],
                  [bucket["bits_per_byte"] for bucket in buckets], marker="o")
        axes.set(xlabel="position in the row (tokens)", ylabel="bits per byte",
                 title="held-out documents", xscale="log")
        ends = sorted({bucket["start"] or 1 for bucket in buckets} | {bucket["end"] for bucket in buckets})
        axes.set_xticks(ends, [str(end) for end in ends])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    return canvas


def save_figure(results: dict[str, Any], path: Path) -> None:
    """Writes the figure as PNG, aside first, then renamed."""
    partial = path.with_name(f"{path.name}.partial")
    figure(results).savefig(partial, format="png", dpi=120)
    partial.replace(path)
