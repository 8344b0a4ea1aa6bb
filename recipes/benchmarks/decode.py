"""One decoded token after a short and after a long past: time, bytes of state, error; beside softmax attention's cache."""

from dataclasses import asdict

import torch
import torch.nn.functional as F
from rich.table import Table

from kernels import State, vla, vla_step
from recipes.benchmarks.measure import Shape, launched_ms, machine, median_ms, reason
from recipes.benchmarks.record import Record, code_digest

PIECE = 65_536  # tokens of the past worked on at once
CHECKED = 2  # heads compared with float64


def state_bytes(state: State) -> int:
    return sum(x.numel() * x.element_size() for x in (state.S, state.A, state.z, state.A_rest) if x is not None)


def run(past: int, batch: int, heads: int, dim: int, dtype, device, record: Record) -> dict:
    """A token after `past` random ones, `unit` rule, headwise read-out; the numbers are of one layer and `batch` rows."""
    what = {"experiment": "decode", **asdict(Shape(batch, past, heads, dim)),
            "dtype": str(dtype).removeprefix("torch."), **machine(device), "code": code_digest()}

    def measure():
        try:
            with torch.no_grad():
                return _measure(past, batch, heads, dim, dtype, device)
        except Exception as failure:
            return {"refused": reason(failure)}

    return {"past": past, "batch": batch, **record.once(what, measure)}


def _tokens(count, batch, heads, dim, dtype, device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    return [torch.randn(batch, count, heads, dim, generator=generator, device=device, dtype=dtype) for _ in range(4)]


def _measure(past, batch, heads, dim, dtype, device) -> dict:
    options = dict(readout="headwise", output_final_state=True)
    backend = "triton" if device.type == "cuda" else "chunked"
    state = wide = None
    for start in range(0, past, PIECE):
        x = _tokens(min(PIECE, past - start), batch, heads, dim, dtype, device, start)
        state = vla(*x, initial_state=state, backend=backend, **options).final_state
        few = (y[:1, :, :CHECKED].double() for y in x)
        wide = vla(*few, initial_state=wide, **options).final_state
        del x
    x = _tokens(1, batch, heads, dim, dtype, device, past + 1)
    first = vla_step(*x, state, readout="headwise")  # from here on A is float64
    truth = vla_step(*(y[:1, :, :CHECKED].double() for y in x), wide, readout="headwise")
    error = float((first.o[:1, :, :CHECKED] - truth.o).norm() / truth.o.norm())
    state = first.final_state

    def step():
        vla_step(*x, state, readout="headwise")

    result = {"step_ms": launched_ms(step), "state_bytes": state_bytes(state), "error": error,
              "cache_bytes": 2 * batch * past * heads * dim * dtype.itemsize}
    if device.type == "cuda":
        from triton.testing import do_bench_cudagraph

        result["graph_ms"] = do_bench_cudagraph(step, return_mode="median")
    q = x[0].transpose(1, 2)
    keys, values = (torch.randn(batch, heads, past, dim, device=device, dtype=dtype) for _ in range(2))
    result["sdpa_ms"] = median_ms(lambda: F.scaled_dot_product_attention(q, keys, values), device)
    return result


def table(rows: list[dict]) -> Table:
    result = Table(title="one decoded token, one layer")
    for column in ("past tokens", "rows", "VLA from Python, ms", "in a CUDA graph, ms", "SDPA on its cache, ms", "VLA's state, MB",
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
