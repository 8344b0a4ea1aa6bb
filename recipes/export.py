"""Export a checkpoint of any strategy to its neutral form: safetensors and JSON, on a CPU.

    python -m recipes.export runs/NAME --to safetensors
    python -m recipes.export runs/NAME/checkpoints/step=000500.ckpt --to safetensors --out exports/NAME

Writes step=000500.neutral beside the checkpoint, or the folder --out. It holds weights and optimizer states in float32
by parameter name and all else that a resume needs, so training goes on from it under any strategy and number of ranks.
"""

import shlex
import sys
from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from recipes.console import bad_input
from vla_lm.checkpoint_files import is_neutral, size
from vla_lm.checkpoints import check_trusted, complete_checkpoint
from vla_lm.native import export


def parse(argv: list[str] | None) -> Namespace:
    parser = ArgumentParser(prog="python -m recipes.export", description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", type=str, help="A run's folder (its newest checkpoint), or a checkpoint.")
    parser.add_argument("--to", choices=["safetensors"], default="safetensors", help="Format of the export.")
    parser.add_argument("--out", type=str | None, help="Folder to write; else step=N.neutral beside it.")
    parser.add_argument("--trust_pickle", "--trust-pickle", action="store_true",
                        help="Read a DeepSpeed folder that lies in no run's folder; its pickles can run any code.")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    with bad_input():
        path = complete_checkpoint(args.checkpoint, verify=True)
        if is_neutral(path):
            raise ValueError(f"{path} is in the neutral form already: copy its folder as it is")
        check_trusted(path, args.trust_pickle)
        out = export(path, Path(args.out) if args.out else None)
    name = shlex.quote(str(out))
    print(f"{path} is exported to {out}, {size(out) / 1e6:,.1f} MB\n"
          f"  go on     python -m recipes.pretrain --resume {name}\n  evaluate  python -m recipes.evaluate {name}")


if __name__ == "__main__":
    main(sys.argv[1:])
