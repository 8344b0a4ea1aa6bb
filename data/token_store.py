"""Tokenised documents on disk, memory-mapped: made once, read by every rank and worker.

    STORE/tokenizer.model      the SentencePiece model
    STORE/tokens.bin           every document as BOS t1 … tn EOS, one after the other, uint16 (uint32 above 65,536 ids)
    STORE/offsets.npy          int64 [D+1], document d is tokens[offsets[d] : offsets[d+1]]
    STORE/document_bytes.npy   int64 [D], UTF-8 bytes of each document
    STORE/heldout.npy          bool [D], documents kept out of training
    STORE/store.json           settings, totals, hashes, file sizes; written last, its presence marks a complete store

A store is written in `STORE.partial` and renamed when complete, so a run killed at any moment leaves nothing that could
be taken for a store. Documents are held out by the hash of their text: the same ones in any order, copies on one side.
"""

import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from multiprocessing import get_context, parent_process
from pathlib import Path

import numpy as np

from data.corpus import Document
from data.progress import Progress
from data.store_request import StoreRequest, read_model
from data.tokenizer import BOS, EOS, Tokenizer, train_tokenizer

FORMAT = 1
_GROUP = 1 << 20  # characters a worker takes at once


@dataclass
class TokenStore:
    """A complete store, opened and checked.

    Raises FileNotFoundError where there is none and ValueError where it is half-written, truncated, or holds another
    tokenizer than the one it was made with.
    """

    path: Path
    info: dict = field(init=False)

    def __post_init__(self) -> None:
        self.path = Path(self.path)
        make = f"`python -m recipes.prepare --source SOURCE --vocab_size N --out {self.path}`"
        again = f"remove {self.path} and run {make} again"
        if not self.path.is_dir():
            raise FileNotFoundError(f"no token store at {self.path}: name another one, or make it with {make}")
        if not any((self.path / name).exists() for name in ("store.json", "tokens.bin", "tokenizer.model")):
            raise ValueError(f"the folder {self.path} holds no token store: name another one, or one that is not there")
        try:
            self.info = json.loads((self.path / "store.json").read_text())
            self.info["format"], self.info["files"], self.info["tokenizer_sha256"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            raise ValueError(f"the token store {self.path} is half-written (no complete store.json): {again}") from None
        if self.info.get("format") != FORMAT:
            raise ValueError(
                f"the token store {self.path} has format {self.info.get('format')}, this version reads {FORMAT}: "
                f"{again}"
            )
        for name, size in self.info["files"].items():
            found = (self.path / name).stat().st_size if (self.path / name).exists() else 0
            if found != size and not (name == "tokenizer.model" and found):  # another one is told by its hash below
                raise ValueError(
                    f"the token store {self.path} is truncated: {name} has {found} bytes, expected {size}: {again}"
                )
        if _sha(self.tokenizer_path.read_bytes()) != self.info["tokenizer_sha256"]:
            raise ValueError(
                f"the token store {self.path} was made with another tokenizer than its tokenizer.model: put the "
                f"original back, or {again}"
            )

    def __getstate__(self) -> dict:  # a worker maps the files itself instead of receiving a copy of the tokens
        return {"path": self.path, "info": self.info}

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.model"

    @property
    def vocab_size(self) -> int:
        return self.info["vocab_size"]

    @property
    def fingerprint(self) -> str:
        """Short hash of the corpus's texts, the tokenizer and the held-out split."""
        return self.info["fingerprint"]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.tokenizer_path.read_bytes())

    @cached_property
    def tokens(self) -> np.ndarray:
        return np.memmap(self.path / "tokens.bin", dtype=self.info["dtype"], mode="r")

    @cached_property
    def offsets(self) -> np.ndarray:
        return np.load(self.path / "offsets.npy")

    @cached_property
    def document_bytes(self) -> np.ndarray:
        return np.load(self.path / "document_bytes.npy")

    @cached_property
    def heldout(self) -> np.ndarray:
        return np.load(self.path / "heldout.npy")


def prepare_store(
    path: str | Path, request: StoreRequest, workers: int | None = None, check_content: bool = False
) -> tuple[TokenStore, bool]:
    """Make the store, or open an equal one that is there already; returns it and whether it was made now.

    workers: tokenising processes, default one per core.
    check_content: compare the content of the corpus as well as the settings.
    Raises ValueError where another store is there: nothing is overwritten.
    """
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, or null for one per core, got {workers}")
    path = Path(path)
    if path.exists():
        return _open_equal(path, request, check_content), False
    request.check_sources()
    with _folders_of(path), _alone(path):
        if path.exists():
            return _open_equal(path, request, check_content), False
        partial = path.with_name(path.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
        partial.mkdir()
        try:
            _write(partial, request, workers or usable_cores())
            os.rename(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        return TokenStore(path), True


def usable_cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1  # macOS has none


def _open_equal(path: Path, request: StoreRequest, check_content: bool) -> TokenStore:
    store = TokenStore(path)
    wanted, there = request.settings(), store.info["settings"]
    different = [f"{k} {there.get(k)!r} there, {wanted[k]!r} asked for" for k in wanted if there.get(k) != wanted[k]]
    if (
        request.tokenizer is not None
        and not different
        and _sha(read_model(request.tokenizer)) != store.info["tokenizer_sha256"]
    ):
        different = [f"tokenizer {request.tokenizer} has changed since"]
    if check_content and not different and request.corpus.identity() != store.info["corpus_identity"]:
        different = ["the corpus has changed since"]
    if different:
        raise ValueError(
            f"{store.path} holds another token store ({'; '.join(different)}): choose another folder, remove this one, "
            "or train on it as it is with source null"
        )
    return store


@contextmanager
def _folders_of(path: Path) -> Iterator[None]:
    """The folders above it are made and, where making the store fails, removed again, if nothing else has come in."""
    missing = [folder for folder in path.parents if not folder.exists()]  # the deepest first
    try:
        yield
    except BaseException:
        with suppress(OSError):
            for folder in missing:
                folder.rmdir()
        raise


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    # One process prepares a store; others wait and then find it. The kernel drops the lock of a killed process.
    lock_path = path.with_name(f".{path.name}.lock")
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)  # again, where the one that was waited for has tidied up
        with open(lock_path, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"Waiting for another process that prepares {path}", file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not (lock_path.exists() and os.path.samestat(os.fstat(lock.fileno()), lock_path.stat())):
                continue  # the one that was waited for has removed this file; take a new one
            try:
                yield
            finally:
                lock_path.unlink()
            return


def _write(folder: Path, request: StoreRequest, workers: int) -> None:
    corpus = request.corpus
    identity = corpus.identity()
    if request.tokenizer is not None:
        tokenizer = request.given_tokenizer()
    else:
        tokenizer = train_tokenizer((d.text for d in corpus), request.vocab_size, request.tokenizer_bytes)
    with open(folder / "tokenizer.model", "wb") as file:
        file.write(tokenizer.model)
        _sync(file)
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    lengths, sizes, hashes, texts_sha = [], [], [], hashlib.sha256()
    with open(folder / "tokens.bin", "wb") as file, Progress(corpus.total_bytes) as progress:
        for documents in _tokenise(corpus, tokenizer, workers):
            for ids, size, sha in documents:
                file.write(ids.astype(dtype).tobytes())
                lengths.append(len(ids)), sizes.append(size), hashes.append(int.from_bytes(sha[:8], "little"))
                texts_sha.update(sha)
                progress.advance(size, len(ids))
        _sync(file)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    heldout = _hold_out(np.array(hashes, dtype=np.uint64), request.heldout)
    _check_boundaries(folder / "tokens.bin", dtype, offsets)
    sizes = np.array(sizes, dtype=np.int64)
    for name, array in (("offsets", offsets), ("document_bytes", sizes), ("heldout", heldout)):
        with open(folder / f"{name}.npy", "wb") as file:
            np.save(file, array)
            _sync(file)
    spans = np.diff(offsets)
    tokenizer_sha = _sha(tokenizer.model)
    split = repr((texts_sha.hexdigest(), tokenizer_sha, request.heldout))
    info = {
        "format": FORMAT,
        "fingerprint": _sha(split.encode())[:16],
        "vocab_size": len(tokenizer),
        "dtype": dtype.name,
        "documents": len(lengths),
        "tokens": int(offsets[-1]),
        "bytes": int(sizes.sum()),
        "heldout_documents": int(heldout.sum()),
        "heldout_tokens": int(spans[heldout].sum()),
        "heldout_bytes": int(sizes[heldout].sum()),
        "texts_sha256": texts_sha.hexdigest(),
        "tokenizer_sha256": tokenizer_sha,
        "corpus_identity": identity,
        "settings": request.settings(),
        "files": {p.name: p.stat().st_size for p in sorted(folder.iterdir())},
    }
    with open(folder / "store.json", "w") as file:
        json.dump(info, file, indent=2)
        _sync(file)


def _tokenise(
    corpus: Iterable[Document], tokenizer: Tokenizer, workers: int
) -> Iterator[list[tuple[np.ndarray, int, bytes]]]:
    """(tokens with BOS and EOS, bytes, SHA-256) of every document in order, in groups."""
    groups = _groups(corpus)
    first = next(groups, [])
    second = next(groups, None) if workers > 1 else None
    if second is None:  # a small corpus is not worth starting processes
        _start_worker(tokenizer.model)
        yield from map(_encode_group, _chain([first], groups))
        return
    # Fresh interpreters: the parent may hold threads of torch or of a streaming reader, which a fork would not survive.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (tokenizer.model,)) as pool:
        waiting: deque = deque()
        try:
            for group in _chain([first, second], groups):
                waiting.append(pool.submit(_encode_group, group))
                if len(waiting) > 2 * workers:  # a bounded window: a streamed corpus must not pile up in memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise OSError(
                "a tokenising process was killed, perhaps for memory: prepare again with fewer workers"
            ) from None
        finally:
            for future in waiting:
                future.cancel()


def _chain(head: list, tail: Iterator) -> Iterator:
    yield from head
    yield from tail


def _groups(corpus: Iterable[Document]) -> Iterator[list[Document]]:
    group, size = [], 0
    for document in corpus:
        group.append(document)
        size += len(document.text)
        if size >= _GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group


_worker_tokenizer: Tokenizer


def _start_worker(model: bytes) -> None:
    global _worker_tokenizer
    _worker_tokenizer = Tokenizer(model)
    if (parent := parent_process()) is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent answers it
        # A killed parent cannot tell its workers to stop
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _encode_group(group: list[Document]) -> list[tuple[np.ndarray, int, bytes]]:
    done = []
    for document in group:
        try:
            ids = _worker_tokenizer.encode(document.text)
        except ValueError as error:
            raise ValueError(f"{document.where}: {error}") from None
        text = document.text.encode()
        done.append((np.array([BOS, *ids, EOS], dtype=np.uint32), len(text), hashlib.sha256(text).digest()))
    return done


def _hold_out(hashes: np.ndarray, share: float) -> np.ndarray:
    """Documents whose hash falls in the lowest `share` of the range; at least one on each side."""
    if share == 0:
        return np.zeros(len(hashes), dtype=bool)
    if len(np.unique(hashes)) < 2:
        raise ValueError(
            f"the corpus has {len(np.unique(hashes))} distinct document, a held-out split needs at least 2: add "
            "documents, or set heldout to 0"
        )
    heldout = hashes < np.uint64(min(int(share * 2**64), 2**64 - 1))
    if not heldout.any():
        return hashes == hashes.min()
    return heldout if not heldout.all() else hashes != hashes.max()


def _check_boundaries(path: Path, dtype: np.dtype, offsets: np.ndarray) -> None:
    # Every document starts with BOS and ends with EOS, and neither is anywhere else.
    tokens = np.memmap(path, dtype=dtype, mode="r")
    marks = sum(
        int((tokens[i : i + (1 << 24)] == mark).sum()) for i in range(0, len(tokens), 1 << 24) for mark in (BOS, EOS)
    )
    if not (
        (tokens[offsets[:-1]] == BOS).all()
        and (tokens[offsets[1:] - 1] == EOS).all()
        and marks == 2 * (len(offsets) - 1)
    ):
        raise ValueError(f"{path}: documents are not separated by BOS and EOS; remove the folder and prepare again")


def _sync(file) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
