"""Latency, peak memory and error of each contender at given shapes, forward and forward + backward."""

from dataclasses import asdict

import torch
from rich.table import Table

from recipes.benchmarks.contenders import Contender, make_inputs, vla_row
from recipes.benchmarks.measure import Shape, median_ms, peak_bytes, reason
from recipes.benchmarks.record import Record, code_digest, setting

SMALL = 200  # tokens of the comparison with float64


def measure(row: Contender, shape: Shape, dtype: torch.dtype, device: torch.device, readout: str,
            record: Record) -> dict:
    """{"row": its name, "label", "forward": pass, "both": pass}; a pass is {"ms", "peak_bytes"} or {"refused": why}.

    forward is without gradient; both is forward and the gradient of every floating-point input. peak_bytes: what the
    pass takes at its peak beyond its inputs, None on a CPU.
    """
    found = {"row": row.name, "label": row.label}
    for name in ("forward", "both"):
        refusal = row.refusal(name, shape, device)
        if refusal is not None:
            found[name] = {"refused": refusal}
            continue
        what = {"experiment": "operator", "row": row.name, "pass": name, **asdict(shape), **setting(dtype, device)}
        if row.ours is not None:
            what |= {"readout": readout, "code": code_digest()}
        found[name] = record.once(what, lambda name=name: _numbers(row, shape, dtype, device, readout, name))
    return found


def _numbers(row, shape, dtype, device, readout, name) -> dict:
    try:
        call, leaves = row.prepare(make_inputs(shape, dtype, device) | {"readout": readout})
        with torch.no_grad():
            weight = torch.randn_like(call())

        def forward():
            with torch.no_grad():
                call()

        def both():
            torch.autograd.grad(call(), leaves, weight, allow_unused=True)

        run = forward if name == "forward" else both
        numbers = {"ms": median_ms(run, device), "peak_bytes": peak_bytes(run, device)}
    except ImportError:
        raise
    except Exception as error:  # whatever a peer's own guards raise is the answer
        numbers = {"refused": reason(error)}
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # raises after an illegal access, when nothing more can be measured
        torch.cuda.empty_cache()
    return numbers


def error(row: Contender, width: int, dtype: torch.dtype, device: torch.device, readout: str, record: Record) -> dict:
    """Largest errors of o and of the gradients, relative to their largest entry, of one of VLA's rows against float64.

    Both start from the same numbers, [1, 200, 2, width], rounded to `dtype`.
    """
    shape = Shape(1, SMALL, 2, width)
    what = {"experiment": "error", "row": row.name, **asdict(shape), **setting(dtype, device), "readout": readout,
            "code": code_digest()}

    def compare():
        narrow = make_inputs(shape, dtype, device)
        wide = {name: x.detach().double().requires_grad_() for name, x in narrow.items()}
        exact = vla_row(row.name, row.label, **row.ours | {"backend": "chunked"})
        backward = row.refusal("both", shape, device) is None
        try:
            with torch.set_grad_enabled(backward):
                (call, leaves), (truth_call, truth_leaves) = (
                    contender.prepare(x | {"readout": readout}) for contender, x in ((row, narrow), (exact, wide)))
                o, truth = call(), truth_call()
            result = {"o": _relative(o, truth)}
            if backward:
                weight = torch.randn_like(o)
                pairs = zip(torch.autograd.grad(o, leaves, weight),
                            torch.autograd.grad(truth, truth_leaves, weight.double()))
                result["gradients"] = max(_relative(x, y) for x, y in pairs)
            return result
        except Exception as failure:
            return {"refused": reason(failure)}

    return record.once(what, compare)


def _relative(x, truth) -> float:
    x, truth = x.detach().double(), truth.detach()
    return float((x - truth).abs().max() / truth.abs().max())


def table(title: str, rows: list[dict], errors: dict[str, dict]) -> Table:
    """Rows of `measure`; errors by row name. Each pass's peak memory stands right of its time."""
    result = Table(title=title)
    result.add_column("", no_wrap=True)
    for column in ("forward, ms", "peak, MB", "forward + backward, ms", "peak, MB", "error of o", "of gradients"):
        result.add_column(column, justify="right")
    reasons = []
    for row in rows:
        cells = []
        for name in ("forward", "both"):
            found = row[name]
            if "refused" in found:
                reasons.append(f"{row['label']}, {'forward' if name == 'forward' else 'backward'}: {found['refused']}")
            peak = found.get("peak_bytes")
            cells += [f"{found['ms']:.3f}" if "ms" in found else "refused",
                      "" if peak is None else f"{peak / 1e6:,.0f}"]
        found = errors.get(row["row"], {})
        cells += [f"{found[name]:.1e}" if name in found else "" for name in ("o", "gradients")]
        result.add_row(row["label"], *cells)
    result.caption = "\n".join(dict.fromkeys(reasons))
    result.caption_justify = "left"
    return result
