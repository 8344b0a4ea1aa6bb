"""Measure VLA beside softmax attention and flash-linear-attention's operators, in one run.

    python -m recipes.benchmark                                   # everything, for the machine it runs on
    python -m recipes.benchmark --shapes 8x4096x16x64 4x4096x16x128 --rows vla sdpa deltanet --sweep --decode
    python -m recipes.benchmark --out recipes/benchmarks/h200.json  # the project's own record: goes on from what it has

Prints tables; writes the numbers to --out, or benchmarks/<card>.json in the working folder, and the latency over T
beside it as PNG. A later run with the same --out measures only what is new, and replaces only the tables it makes. What
is not installed, or refuses, is a row that says why.
"""

import sys
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track

from recipes.benchmarks import ahead, decode, operators, sweep
from recipes.benchmarks.contenders import pick
from recipes.benchmarks.machine import machine
from recipes.benchmarks.measure import Shape, pick_device, pick_dtype
from recipes.benchmarks.record import Record
from recipes.benchmarks.request import check, check_out, parse
from recipes.console import bad_input


def main(argv: list[str] | None = None) -> None:
    args, console = parse(argv, __doc__.splitlines()[0]), Console(width=None if sys.stdout.isatty() else 150)
    with bad_input():
        check(args)
        device = pick_device(args.device)
        dtype, shapes = pick_dtype(args.dtype), [Shape.parse(text) for text in args.shapes]
        rows, sweep_rows, host = pick(args.rows), pick(args.sweep_rows), machine(device)
        out = Path(args.out or f"benchmarks/{host['card'].split(' (')[0].replace(' ', '-').lower()}.json")
        check_out(out)
        record = Record(out)
    how, setting = (dtype, device, args.readout, record), {**host, "dtype": args.dtype, "readout": args.readout}
    if args.compile_jobs:
        one = [Shape(args.tokens // T, T, args.heads, args.dim) for T in args.sweep[:1]]
        ahead.compile_ahead([*product(rows, shapes), *product(sweep_rows, one)], *how[:3], args.compile_jobs, console)
    for shape in shapes:
        errors = {row.name: operators.error(row, shape.D, *how) for row in rows if row.ours}
        found = [operators.measure(row, shape, *how) for row in track(rows, str(shape), console=console)]
        console.print(operators.table(f"{shape} (B, T, H, D), {args.dtype}, {host['card']}", found, errors))
        record.add(str(shape), setting, rows=found, errors=errors)
    if args.sweep:
        found = sweep.run(sweep_rows, args.sweep, args.tokens, args.heads, args.dim, *how,
                          lambda those: track(those, "lengths", console=console))
        console.print(sweep.table(found, args.tokens))
        title = f"{host['card']}, {args.dtype}, {args.heads} heads of {args.dim}"
        shown = sweep.save_figure(found, args.tokens, title, out.with_suffix(".png"))
        record.add("sweep", setting, heads=args.heads, dim=args.dim, **shown)
    if args.decode:
        found = [decode.run(past, args.decode_batch, args.heads, args.dim, *how)
                 for past in track(args.decode, "decoding", console=console)]
        console.print(decode.table(found))
        record.add("decode", setting, rows=found)
    record.save()
    figure = f" and {out.with_suffix('.png').absolute()}" if args.sweep else ""
    console.print(f"written: {out.absolute()}{figure}", soft_wrap=True)


if __name__ == "__main__":
    main()
