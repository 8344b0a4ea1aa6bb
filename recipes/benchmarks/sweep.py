"""Latency over the sequence length at a constant number of tokens, and where each row passes softmax attention."""

import math
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.table import Table

from recipes.benchmarks import operators
from recipes.benchmarks.measure import Shape


def run(rows, lengths, tokens, heads, dim, dtype, device, readout, record, progress) -> dict[int, list[dict]]:
    """{T: rows of operators.measure} with B = tokens / T; each of the lengths divides tokens."""
    found = {}
    for T in progress(lengths):
        shape = Shape(tokens // T, T, heads, dim)
        found[T] = [operators.measure(row, shape, dtype, device, readout, record) for row in rows]
    return found


def curve(found: dict[int, list[dict]], row: str, name: str) -> dict[int, float]:
    """{T: milliseconds} of one row and pass."""
    return {T: r[name]["ms"] for T, rows in sorted(found.items()) for r in rows
            if r["row"] == row and "ms" in r.get(name, {})}


def crossing(times: dict[int, float], other: dict[int, float]) -> float | None:
    """From which T on `times` stays below `other`, log-log interpolated; the first common T if always, else None."""
    lengths = sorted(times.keys() & other.keys())
    if not lengths or times[lengths[-1]] >= other[lengths[-1]]:
        return None
    gap = {T: math.log(times[T] / other[T]) for T in lengths}
    above = [T for T in lengths if gap[T] >= 0]
    if not above:
        return lengths[0]
    left = above[-1]
    right = next(T for T in lengths if T > left)
    share = gap[left] / (gap[left] - gap[right])
    return math.exp(math.log(left) + share * (math.log(right) - math.log(left)))


def _labels(found):
    return {r["row"]: r["label"] for rows in found.values() for r in rows}


def crossings(found) -> dict[str, dict[str, float | None]]:
    """{row: {pass: T from which it is faster than SDPA}}."""
    return {row: {name: crossing(curve(found, row, name), curve(found, "sdpa", name)) for name in ("forward", "both")}
            for row in _labels(found) if row != "sdpa"} if "sdpa" in _labels(found) else {}


def table(found, tokens: int) -> Table:
    lengths, crossed = sorted(found), crossings(found)
    result = Table(title=f"latency over T at B·T = {tokens:,}: forward / forward + backward, ms")
    result.add_column("", no_wrap=True)
    for T in lengths:
        result.add_column(f"{T:,}", justify="right")
    result.add_column("below SDPA from T", justify="right")

    def show(value, form):
        return "–" if value is None else format(value, form)

    for row, label in _labels(found).items():
        times = [curve(found, row, name) for name in ("forward", "both")]
        cells = [" / ".join(show(ms.get(T), ".2f") for ms in times) for T in lengths]
        result.add_row(label, *cells, " / ".join(show(crossed[row][name], ",.0f") for name in ("forward", "both"))
                       if row in crossed else "")
    return result


def save_figure(found, tokens: int, title: str, path: Path) -> dict:
    """Writes the figure to `path`; dotted lines: from which T on a row stays below SDPA. Returns what it shows."""
    canvas = Figure(figsize=(11, 4.5), layout="constrained")
    crossed, lowest, legend, dotted = crossings(found), min(found), {}, None
    for axes, name, heading in zip(canvas.subplots(1, 2), ("forward", "both"), ("forward", "forward + backward")):
        for i, (row, label) in enumerate(_labels(found).items()):
            times = curve(found, row, name)
            if not times:
                continue
            # One colour for a row in both halves, also where it has no backward pass.
            line, = axes.plot(list(times), list(times.values()), marker="o", ms=3, lw=2.5 if row == "vla" else 1.2,
                              color="black" if row == "sdpa" else f"C{i}")
            legend[label] = line
            at = crossed.get(row, {}).get(name)
            if at is not None and at > lowest:
                axes.axvline(at, color=line.get_color(), ls=":", lw=1)
                dotted = Line2D([], [], color="gray", ls=":", lw=1)
                axes.annotate(f"{at:,.0f}", (at, 1.01), xycoords=("data", "axes fraction"), rotation=90, fontsize=7,
                              color=line.get_color(), ha="center", va="bottom")
        axes.set(xscale="log", yscale="log", xlabel=f"T (B·T = {tokens:,})", ylabel="ms")
        axes.set_title(heading, pad=28)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.grid(alpha=0.3)
    if dotted:
        legend["below SDPA from this T on"] = dotted
    axes.legend(legend.values(), legend.keys(), fontsize=7)
    canvas.suptitle(title, fontsize=10)
    canvas.savefig(path, dpi=150)
    return {"tokens": tokens, "lengths": found, "below_sdpa_from": crossed}
