"""Measure VLA beside softmax attention and flash-linear-attention's operators, in one run.

    python -m recipes.benchmark                                   # everything, for the machine it runs on
    python -m recipes.benchmark --shapes 8x4096x16x64 4x4096x16x128 --rows vla sdpa deltanet --sweep --decode
    python -m recipes.benchmark --out benchmarks/h200.json        # goes on from what the file has

Prints tables; writes the numbers to --out and the latency over T beside it as PNG. What is not installed, or refuses,
is a row that says why.
"""

import sys
from itertools import product
from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace
from rich.console import Console
from rich.progress import track

from recipes.benchmarks import ahead, decode, operators, sweep
from recipes.benchmarks.contenders import CONTENDERS, pick
from recipes.benchmarks.measure import Shape, machine, pick_device, pick_dtype
from recipes.benchmarks.record import Record
from recipes.benchmarks.request import DEFAULTS, check, check_out
from recipes.console import bad_input

def parse(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="python -m recipes.benchmark", description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", help="Shapes BxTxHxD measured side by side; none given: no such table.")
    parser.add_argument("--rows", nargs="*", help=f"Rows of it, of {', '.join(CONTENDERS)}.")
    parser.add_argument("--dtype", type=str, help="bfloat16, float16 or float32.")
    parser.add_argument("--readout", type=str, default="headwise", help="VLA's read-out: headwise or normalized.")
    parser.add_argument("--sweep", type=int, nargs="*", help="Lengths T of the curve at constant B*T; none given: no curve.")
    parser.add_argument("--sweep_rows", nargs="*", help="Rows of the curve.")
    parser.add_argument("--tokens", type=int, help="B*T of the curve.")
    parser.add_argument("--heads", type=int, help="Heads of the curve and of decoding.")
    parser.add_argument("--dim", type=int, help="Features of a head, likewise.")
    parser.add_argument("--decode", type=int, nargs="*", help="Tokens before the one decoded; none given: no decoding.")
    parser.add_argument("--decode_batch", type=int, help="Rows decoded at once.")
    parser.add_argument("--compile_jobs", type=int, help="Processes that compile the kernels ahead; 0: none.")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu or cuda.")
    parser.add_argument("--out", type=str, default=None, help="The record, JSON; null: benchmarks/<card>.json.")
    args = parser.parse_args(argv)
    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    for name, values in DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, values[not cuda])
    return args


def main(argv: list[str] | None = None) -> None:
    args, console = parse(argv), Console(width=None if sys.stdout.isatty() else 150)
    with bad_input():
        check(args)
        device = pick_device(args.device)
        dtype, shapes = pick_dtype(args.dtype), [Shape.parse(text) for text in args.shapes]
        rows, sweep_rows, host = pick(args.rows), pick(args.sweep_rows), machine(device)
        out = Path(args.out or f"benchmarks/{host['card'].split(' (')[0].replace(' ', '-').lower()}.json")
        check_out(out)
        record, lengths = Record(out), [T for T in args.sweep if T <= args.tokens]
    report, setting = {"machine": host}, (dtype, device, args.readout, record)
    if args.compile_jobs:
        one = [Shape(args.tokens // T, T, args.heads, args.dim) for T in lengths[:1]]
        ahead.compile_ahead([*product(rows, shapes), *product(sweep_rows, one)], *setting[:3], args.compile_jobs, console)
    for shape in shapes:
        errors = {row.name: operators.error(row, shape.D, *setting) for row in rows if row.ours}
        found = [operators.measure(row, shape, *setting) for row in track(rows, str(shape), console=console)]
        console.print(operators.table(f"{shape} (B, T, H, D), {args.dtype}, {host['card']}", found, errors))
        report[str(shape)] = {"rows": found, "errors": errors}
    if lengths:
        found = sweep.run(sweep_rows, lengths, args.tokens, args.heads, args.dim, *setting,
                          lambda those: track(those, "lengths", console=console))
        console.print(sweep.table(found, args.tokens))
        title = f"{host['card']}, {args.dtype}, {args.heads} heads of {args.dim}"
        report["sweep"] = sweep.save_figure(found, args.tokens, title, out.with_suffix(".png"))
    if args.decode:
        found = [decode.run(past, args.decode_batch, args.heads, args.dim, dtype, device, record)
                 for past in track(args.decode, "decoding", console=console)]
        console.print(decode.table(found))
        report["decode"] = found
    record.save(report=report)
    console.print(f"written: {out}" + (f" and {out.with_suffix('.png')}" if lengths else ""), soft_wrap=True)


if __name__ == "__main__":
    main()
