"""A lossless SentencePiece tokenizer: BPE with byte fallback, no normalisation, no dummy prefix.

Every token but UNK, BOS and EOS stands for a fixed string of bytes, so a text's bytes are the concatenation of its
tokens' bytes, and bits per byte can be summed exactly. UNK is never produced.
"""

import io
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import sentencepiece as spm

UNK, BOS, EOS = 0, 1, 2
_SPECIAL = 3
LEAST_VOCAB = 256 + _SPECIAL + 1  # one character
_SPACE = "\u2581"  # SentencePiece writes a space as this character, and so cannot tell the two apart
_CUT = 4000  # characters of one training sentence


class Tokenizer:
    """Encoder and decoder of one SentencePiece model.

    model: the serialised model. ValueError where it is not one, or not a lossless one.
    """

    def __init__(self, model: bytes) -> None:
        self.model = model
        try:
            self._processor = spm.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ValueError(
                f"not a readable SentencePiece model ({error}): train one with `python -m recipes.prepare`"
            ) from None
        p = self._processor
        if (p.unk_id(), p.bos_id(), p.eos_id()) != (UNK, BOS, EOS):
            raise ValueError(
                f"the tokenizer has unk, bos, eos = {p.unk_id()}, {p.bos_id()}, {p.eos_id()}; expected 0, 1, 2: "
                "train one with `python -m recipes.prepare`"
            )
        byte_ids = [i for i in range(_SPECIAL, len(self)) if p.is_byte(i)]
        if len(byte_ids) != 256:
            raise ValueError(
                f"the tokenizer has {len(byte_ids)} byte tokens, expected 256 (byte fallback): train one with "
                "`python -m recipes.prepare`"
            )
        self._space_ids = [byte_ids[b] for b in _SPACE.encode()]

    def __len__(self) -> int:
        return self._processor.get_piece_size()

    @cached_property
    def token_bytes(self) -> list[bytes]:
        """The bytes each token stands for; empty for UNK, BOS and EOS."""
        p, table = self._processor, []
        for i in range(len(self)):
            if i < _SPECIAL or p.is_control(i):
                table.append(b"")
            elif p.is_byte(i):
                table.append(bytes([int(p.id_to_piece(i)[3:5], 16)]))
            else:
                table.append(p.id_to_piece(i).replace(_SPACE, " ").encode())
        return table

    @cached_property
    def byte_counts(self) -> np.ndarray:
        """UTF-8 bytes of each token, int64 [vocab]; 0 for UNK, BOS and EOS."""
        return np.array([len(b) for b in self.token_bytes], dtype=np.int64)

    def encode(self, text: str) -> list[int]:
        """Token ids of the text, without BOS or EOS. ValueError where decoding them would not give the text back."""
        parts = text.split(_SPACE)
        ids = self._processor.encode(parts[0])
        for part in parts[1:]:
            ids += self._space_ids
            ids += self._processor.encode(part)
        if b"".join(map(self.token_bytes.__getitem__, ids)) != text.encode():
            raise ValueError("the tokenizer does not give this text back: train one with `python -m recipes.prepare`")
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; BOS and EOS give nothing, a cut character's bytes the replacement character."""
        return b"".join(map(self.token_bytes.__getitem__, ids)).decode("utf-8", errors="replace")


def check_vocab_size(vocab_size: int) -> None:
    """ValueError for a vocabulary that no corpus fits into."""
    if vocab_size < LEAST_VOCAB:
        raise ValueError(
            f"vocab_size {vocab_size} is too small: 256 bytes, 3 special tokens and one for each character of the "
            f"corpus need {LEAST_VOCAB} at least; use for example 512"
        )


def train_tokenizer(texts: Iterable[str], vocab_size: int, max_bytes: int) -> Tokenizer:
    """Train on the first `max_bytes` of the texts. Raises ValueError where the vocabulary does not fit the corpus."""
    check_vocab_size(vocab_size)
    model, problems = io.BytesIO(), []
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=_noting(_sentences(texts, max_bytes), problems),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            character_coverage=0.9999,
            unk_id=UNK,
            bos_id=BOS,
            eos_id=EOS,
            pad_id=-1,
            max_sentence_length=8 * _CUT,
            minloglevel=2,
        )
    except RuntimeError as error:
        if problems:  # of the corpus: SentencePiece hands on the text alone of an error in its sentences
            raise problems[0] from None
        reason = str(error).split("] ")[-1].split(" Increase")[0].strip()
        raise ValueError(
            f"vocab_size {vocab_size} does not fit this corpus ({reason}): choose another, or a larger corpus"
        ) from None
    return Tokenizer(model.getvalue())


def _noting(items: Iterator[str], problems: list[Exception]) -> Iterator[str]:
    try:
        yield from items
    except Exception as error:
        problems.append(error)
        raise


def _sentences(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    taken = 0
    for text in texts:
        for line in text.split("\n"):
            for first in range(0, len(line), _CUT):
                yield line[first : first + _CUT]
        taken += len(text.encode())
        if taken >= max_bytes:
            return
