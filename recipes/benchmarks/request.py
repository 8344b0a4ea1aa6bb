"""What can be asked of `python -m recipes.benchmark`, before anything is measured."""

from argparse import SUPPRESS
from math import lcm
from pathlib import Path

import torch
from jsonargparse import ArgumentParser, Namespace

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


def parse(argv: list[str] | None, description: str) -> Namespace:
    """The arguments; what is left out has the default of the device that is asked for."""
    parser = ArgumentParser(prog="python -m recipes.benchmark", description=description)

    def add(name, text, nothing=None, **options):
        """An option whose default is the device's. nothing: what the name alone, with no value, asks for."""
        cuda, cpu = (" ".join(map(str, value)) if isinstance(value, list) else value for value in DEFAULTS[name])
        text += f" Left out: {cuda} on CUDA, {cpu} on a CPU."
        text += f" With nothing after it: {nothing}." if nothing else ""
        parser.add_argument(f"--{name}", help=text, default=SUPPRESS, **options)

    add("shapes", "Shapes BxTxHxD measured side by side.", "no such table", nargs="*")
    add("rows", f"Rows of that table, of {', '.join(CONTENDERS)}.", nargs="*")
    add("dtype", "bfloat16, float16 or float32.")
    parser.add_argument("--readout", type=str, default="headwise", help="VLA's read-out: headwise or normalized.")
    add("sweep", "Lengths T of the curve at constant B*T, which each divides.", "no curve", nargs="*", type=int)
    add("sweep_rows", "Rows of the curve, of the same.", nargs="*")
    add("tokens", "B*T of the curve: a multiple of each of its lengths.", type=int)
    add("heads", "Heads of the curve and of decoding.", type=int)
    add("dim", "Features of a head, likewise.", type=int)
    add("decode", "Tokens before the one decoded.", "no decoding", nargs="*", type=int)
    add("decode_batch", "Rows decoded at once.", type=int)
    add("compile_jobs", "Processes that compile the kernels ahead; 0: none.", type=int)
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu or cuda.")
    parser.add_argument("--out", type=str, default=SUPPRESS, help="The record, JSON, with the curve as PNG beside it. "
                        "Left out: benchmarks/<card>.json in the working folder.")
    args = parser.parse_args(argv)
    on_cpu = args.device == "cpu" or (args.device == "auto" and not torch.cuda.is_available())
    left_out = {name: values[on_cpu] for name, values in DEFAULTS.items() if name not in args}
    args = Namespace(**left_out, **{"out": None, **vars(args)})
    if "sweep" in left_out:  # a --tokens that none of them divides is `check`'s to refuse
        args.sweep = [T for T in args.sweep if args.tokens % T == 0] or args.sweep
    return args


def check(args: Namespace) -> None:
    """ValueError for what nothing could be measured with, or whose numbers would be lost; each with its mend."""
    for name, choices in (("device", ("auto", "cpu", "cuda")), ("readout", ("headwise", "normalized"))):
        if (value := getattr(args, name)) not in choices:
            raise ValueError(f"--{name} is {value!r}: choose {' or '.join(choices)}")
    if args.compile_jobs < 0:
        raise ValueError(f"--compile_jobs is {args.compile_jobs}: give a number of processes, or 0 to compile none "
                         "ahead")
    for name in ("tokens", "heads", "dim", "decode_batch"):
        if (value := getattr(args, name)) < 1:
            raise ValueError(f"--{name} is {value}: give a whole number, at least 1")
    for name, none in (("sweep", "no curve"), ("decode", "no decoding")):
        if short := [value for value in getattr(args, name) if value < 1]:
            raise ValueError(f"--{name} has {short[0]}: give lengths of at least 1 token, or none at all for {none}")
    if uneven := [T for T in args.sweep if args.tokens % T]:
        raise ValueError(f"--sweep has {uneven[0]}, which does not divide --tokens {args.tokens}, the B*T of the "
                         f"curve: give lengths that divide it, or as --tokens a multiple of {lcm(*args.sweep)}")
    for name, needs in (("rows", args.shapes), ("sweep_rows", args.sweep)):
        if needs and not getattr(args, name):
            other = "--shapes" if name == "rows" else "--sweep"
            raise ValueError(f"--{name} is empty: name a row, or give {other} with nothing after it for no such table")


def check_out(out: Path) -> None:
    """ValueError where the record, or the figure beside it, could not be written. Makes the folder they go to."""
    if out.suffix == ".png":
        raise ValueError(f"--out {out} is the figure's name, the record is JSON: use {out.with_suffix('.json')}")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file in it, for example {out / 'record.json'}")
    if (figure := out.with_suffix(".png")).is_dir():
        raise ValueError(f"--out {out} has its figure beside it and {figure} is a folder: give the record another name")
    probe = out.with_name(f"{out.name}.partial")  # what the record is first written to
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {out} cannot be written in {out.absolute().parent} ({error.strerror}): "
                         "name a file in a folder of yours") from None
