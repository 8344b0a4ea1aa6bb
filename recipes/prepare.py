"""Make a token store from raw text: train a tokenizer, tokenise, hold documents out.

python -m recipes.prepare                                  # the built-in corpus into stores/sotu-4k
python -m recipes.prepare --source 'books/*.txt' --vocab_size 16384 --out stores/books-16k
"""

import shlex
import sys

from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table

from data.corpus import Corpus
from data.store_request import StoreRequest
from data.token_store import TokenStore, prepare_store
from recipes.room import no_room

DEFAULT_OUT, DEFAULT_VOCAB = "stores/sotu-4k", 4096


def main(args: list[str] | None = None) -> int:
    """Run with command-line arguments; returns the exit code (2 for bad input, with one message)."""
    options = _parser().parse_args(args)
    vocab_size = options.vocab_size
    if vocab_size is None and not options.tokenizer:
        vocab_size = DEFAULT_VOCAB
    try:
        corpus = Corpus(tuple(options.source), options.text_column, options.subset, options.split, options.max_bytes)
        request = StoreRequest(corpus, vocab_size, options.tokenizer, options.heldout)
        store, made = prepare_store(options.out, request, options.workers, check_content=True)
    except (ValueError, TypeError, OSError) as error:
        told = no_room(error)
        print(f"error: {f'{told} with --out' if told else error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was kept", file=sys.stderr)
        return 130
    _report(store, made, request)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="python -m recipes.prepare", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add(
        "--source",
        nargs="+",
        default=["sotu"],
        help="sotu (built in), files, folders or globs of .txt/.jsonl/.parquet, or hf:NAME",
    )
    add("--out", default=DEFAULT_OUT, help="folder of the store; never overwritten, an equal one is reused")
    add("--vocab_size", type=int | None, help=f"tokens of the tokenizer to train (default {DEFAULT_VOCAB})")
    add("--tokenizer", type=str | None, help="path of a SentencePiece model to use instead of training one")
    add(
        "--heldout",
        type=float,
        default=0.05,
        help="share of documents kept for validation, chosen by the hash of their text",
    )
    add("--text_column", default="text", help="field of .jsonl, .parquet and Hugging Face rows that holds the text")
    add("--subset", type=str | None, help="configuration of a Hugging Face data set")
    add("--split", default="train", help="split of a Hugging Face data set")
    add("--max_bytes", type=int | None, help="stop reading after this many bytes of text")
    add("--workers", type=int | None, help="processes that tokenise (default: one per core)")
    return parser


def _report(store: TokenStore, made: bool, request: StoreRequest) -> None:
    info = store.info
    table = Table(title=f"{'Made' if made else 'Already there, reused:'} {store.path}", title_justify="left")
    for column in ("", "documents", "tokens", "bytes", "bytes per token"):
        table.add_column(column, justify="left" if not column else "right")
    held_out = [info[f"heldout_{k}"] for k in ("documents", "tokens", "bytes")]
    whole = [info[k] for k in ("documents", "tokens", "bytes")]
    for name, row in (("training", [w - h for w, h in zip(whole, held_out)]), ("held out", held_out), ("all", whole)):
        table.add_row(name, *(f"{n:,}" for n in row), f"{row[2] / row[1]:.2f}" if row[1] else "-")
    Console().print(table)
    print(
        f"vocabulary {store.vocab_size:,}, {info['dtype']}; held out {held_out[2] / whole[2]:.1%} of the bytes; "
        f"fingerprint {store.fingerprint}"
    )
    command = "python -m recipes.pretrain --config configs/longdoc-tiny.yaml"
    if request != StoreRequest(Corpus(("sotu",))) or str(store.path) != DEFAULT_OUT:
        command += (f" --data.store {shlex.quote(str(store.path))} --data.source null"
                    f" --data.vocab_size {store.vocab_size}")
    print(f"\nNext: {command}")


if __name__ == "__main__":
    sys.exit(main())
