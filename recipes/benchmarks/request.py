"""What can be asked of `python -m recipes.benchmark`, before anything is measured."""

import os
from pathlib import Path

from jsonargparse import Namespace

from recipes.benchmarks.contenders import CONTENDERS

# By device: cuda, cpu.
DEFAULTS = {
    "shapes": (["8x4096x16x64", "4x4096x16x128"], ["2x256x2x32"]),
    "dtype": ("bfloat16", "float32"),
    "rows": (list(CONTENDERS), ["vla-chunked", "vla-loop", "sdpa", "deltanet"]),
    "sweep": ([2**i for i in range(8, 18)], [64, 128, 256, 512]),
    "sweep_rows": (["vla", "vla-recurrent", "sdpa", "deltanet", "linear", "mesanet-30"], ["vla-chunked", "sdpa"]),
    "tokens": (131_072, 512),
    "heads": (16, 2),
    "dim": (64, 32),
    "decode": ([1_000, 1_000_000], [100, 2_000]),
    "decode_batch": (8, 1),
    "compile_jobs": (8, 0),
}


def check(args: Namespace) -> None:
    """ValueError for arguments that nothing could be measured with, or whose numbers would be lost; each with its mend."""
    for name, choices in (("device", ("auto", "cpu", "cuda")), ("readout", ("headwise", "normalized"))):
        if (value := getattr(args, name)) not in choices:
            raise ValueError(f"--{name} is {value!r}: choose {' or '.join(choices)}")
    if args.compile_jobs < 0:
        raise ValueError(f"--compile_jobs is {args.compile_jobs}: give a number of processes, or 0 to compile none ahead")
    for name in ("tokens", "heads", "dim", "decode_batch"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name} is {value}: give a whole number, at least 1")
    for name, none in (("sweep", "no curve"), ("decode", "no decoding")):
        if short := [value for value in getattr(args, name) if value < 1]:
            raise ValueError(f"--{name} has {short[0]}: give lengths of at least 1 token, or none at all for {none}")
    if args.sweep and min(args.sweep) > args.tokens:
        raise ValueError(f"--sweep begins at {min(args.sweep)} tokens and --tokens, which B*T is to be, is {args.tokens}: "
                         f"give shorter lengths, or --tokens of at least {min(args.sweep)}")
    for name, needs in (("rows", args.shapes), ("sweep_rows", args.sweep)):
        if needs and not getattr(args, name):
            other = "--shapes" if name == "rows" else "--sweep"
            raise ValueError(f"--{name} is empty: name a row, or give {other} with nothing after it for no such table")


def check_out(out: Path) -> None:
    """ValueError where the record, or the figure beside it, could not be written."""
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file in it, for example {out / 'record.json'}")
    if out.suffix == ".png":
        raise ValueError(f"--out {out} is the figure's name, the record is JSON: use {out.with_suffix('.json')}")
    there = next(folder for folder in out.absolute().parents if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ValueError(f"--out {out} cannot be written in {there}: name a file in a folder of yours")
