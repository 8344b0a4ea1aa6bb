"""One decoded token after a short and a long past: time, bytes of state, error; beside softmax attention's cache."""

from dataclasses import asdict

import torch
import torch.nn.functional as F
from rich.table import Table

from kernels import State, vla, vla_step
from recipes.benchmarks.measure import Shape, graph_ms, launched_ms, median_ms, reason
from recipes.benchmarks.record import Record, code_digest, setting

PIECE = 65_536  # tokens of the past worked on at once
CHECKED = 2  # heads compared with float64


def state_bytes(state: State) -> int:
    return sum(x.numel() * x.element_size() for x in (state.S, state.A, state.z, state.A_rest) if x is not None)


def run(past: int, batch: int, heads: int, dim: int, dtype, device, readout: str, record: Record) -> dict:
    """A token after `past` random ones, `unit` rule; the numbers are of one layer and `batch` rows.

    Returns past, batch, heads, dim and {"refused": why} or step_ms (launched from Python), graph_ms (CUDA only),
    sdpa_ms (softmax attention of one query on the cache; in a CUDA graph, too, where there is graph_ms), state_bytes
    and cache_bytes, and error: of o against float64, the norm of the difference relative to o's.
    """
    what = {"experiment": "decode", **asdict(Shape(batch, past, heads, dim)), **setting(dtype, device),
            "readout": readout, "code": code_digest()}

    def measure():
        try:
            with torch.no_grad():
                return _measure(past, batch, heads, dim, dtype, device, readout)
        except Exception as failure:
            return {"refused": reason(failure)}

    return {"past": past, "batch": batch, "heads": heads, "dim": dim, **record.once(what, measure)}


def _tokens(count, batch, heads, dim, dtype, device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(batch, count, heads, dim, generator=generator, device=device, dtype=dtype) for _ in range(4)]


def _measure(past, batch, heads, dim, dtype, device, readout) -> dict:
    options = dict(readout=readout, output_final_state=True)
    backend = "triton" if device.type == "cuda" else "chunked"
    state = wide = None
    for start in range(0, past, PIECE):
        x = _tokens(min(PIECE, past - start), batch, heads, dim, dtype, device, start)
        state = vla(*x, initial_state=state, backend=backend, **options).final_state
        few = (y[:1, :, :CHECKED].double() for y in x)
        wide = vla(*few, initial_state=wide, **options).final_state
        del x
    x = _tokens(1, batch, heads, dim, dtype, device, past + 1)
    first = vla_step(*x, state, readout=readout)  # from here on A is float64
    truth = vla_step(*(y[:1, :, :CHECKED].double() for y in x), wide, readout=readout)
    error = float((first.o[:1, :, :CHECKED] - truth.o).norm() / truth.o.norm())
    state = first.final_state

    q = x[0].transpose(1, 2)
    keys, values = (torch.randn(batch, heads, past, dim, device=device, dtype=dtype) for _ in range(2))
    times = _times(lambda: vla_step(*x, state, readout=readout),
                   lambda: F.scaled_dot_product_attention(q, keys, values), device)
    return {**times, "state_bytes": state_bytes(state), "cache_bytes": 2 * batch * past * heads * dim * dtype.itemsize,
            "error": error}


def _times(step, attention, device) -> dict:
    # On CUDA both in a graph: events around a single call would charge SDPA a cold cache that the graph spares VLA.
    if device.type == "cuda":
        return {"step_ms": launched_ms(step), "graph_ms": graph_ms(step), "sdpa_ms": graph_ms(attention)}
    return {"step_ms": launched_ms(step), "sdpa_ms": median_ms(attention, device)}


def table(rows: list[dict]) -> Table:
    """Rows of `run`."""
    result = Table(title="one decoded token, one layer")
    graphs = any("graph_ms" in row for row in rows)
    for column in ("past tokens", "rows", "VLA from Python, ms", "VLA in a CUDA graph, ms",
                   f"SDPA on its cache, {'in a CUDA graph, ' if graphs else ''}ms", "VLA's state, MB",
                   "SDPA's cache, MB", "error of o"):
        result.add_column(column, justify="right")
    for row in rows:
        if "refused" in row:
            result.add_row(f"{row['past']:,}", str(row["batch"]), row["refused"])
            continue
        graph = f"{row['graph_ms']:.4f}" if "graph_ms" in row else ""
        result.add_row(f"{row['past']:,}", str(row["batch"]), f"{row['step_ms']:.4f}", graph, f"{row['sdpa_ms']:.4f}",
                       f"{row['state_bytes'] / 1e6:.2f}", f"{row['cache_bytes'] / 1e6:,.2f}", f"{row['error']:.1e}")
    return result
