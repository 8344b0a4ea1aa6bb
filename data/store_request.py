"""What a token store is asked to be made of, checked before anything is written."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from data.corpus import Corpus
from data.tokenizer import Tokenizer, check_vocab_size


@dataclass(frozen=True)
class StoreRequest:
    """What a store is made of.

    corpus: documents to read.
    vocab_size: vocabulary to train; None with `tokenizer`.
    tokenizer: path of an existing SentencePiece model to use instead of training one.
    heldout: share of documents kept for validation, in [0, 1).
    tokenizer_bytes: train the tokenizer on this many bytes from the corpus's beginning.
    """

    corpus: Corpus
    vocab_size: int | None = 4096
    tokenizer: str | None = None
    heldout: float = 0.05
    tokenizer_bytes: int = 50_000_000

    def __post_init__(self) -> None:
        check_settings(self.vocab_size, self.heldout)
        if self.vocab_size is None and self.tokenizer is None:
            raise ValueError("set vocab_size to train a tokenizer, or tokenizer to the path of a SentencePiece model")

    def check_sources(self) -> None:
        """What shows without reading the corpus: its files are there, the tokenizer too, and it fits vocab_size."""
        self.corpus.check()
        if self.tokenizer is not None:
            self.given_tokenizer()

    def given_tokenizer(self) -> Tokenizer:
        """The tokenizer that is used instead of training one."""
        tokenizer = Tokenizer(read_model(self.tokenizer))
        if self.vocab_size not in (None, len(tokenizer)):
            raise ValueError(
                f"{self.tokenizer} has {len(tokenizer)} tokens, vocab_size asks for {self.vocab_size}: set "
                f"vocab_size to null or {len(tokenizer)}"
            )
        return tokenizer

    def settings(self) -> dict:
        found = {**asdict(self.corpus), **{k: v for k, v in vars(self).items() if k != "corpus"}}
        return json.loads(json.dumps(found))


def check_settings(vocab_size: int | None, heldout: float) -> None:
    """ValueError for what no store can be made with."""
    if vocab_size is not None:
        check_vocab_size(vocab_size)
    if not 0 <= heldout < 1:
        raise ValueError(f"heldout must be a share in [0, 1), got {heldout}")


def read_model(path: str) -> bytes:
    if not os.path.isfile(path):
        raise FileNotFoundError(
            f"no SentencePiece model at {path}: give the path of a tokenizer.model, or leave tokenizer null to train "
            "one"
        )
    return Path(path).read_bytes()
