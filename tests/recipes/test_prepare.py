"""`python -m recipes.prepare`: what it prints, and exit code 2 with one message for bad input."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.token_store import TokenStore
from recipes.prepare import main


def test_makes_a_store_and_reports_it(tmp_path, capsys):
    out = tmp_path / "store"
    arguments = ["--max_bytes", "400000", "--vocab_size", "512", "--out", str(out), "--heldout", "0.3"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    info = TokenStore(out).info
    assert "Made" in text and f"{info['tokens']:,}" in text and f"{info['heldout_documents']}" in text
    assert f"{info['bytes'] / info['tokens']:.2f}" in text and info["fingerprint"] in text
    assert (
        f"Next: python -m recipes.pretrain --config configs/longdoc-tiny.yaml"
        f" --data.store {out} --data.source null --data.vocab_size 512" in text
    )
    assert main(arguments) == 0
    assert "Already there, reused" in capsys.readouterr().out
    assert main([*arguments[:-1], "0.1"]) == 2
    assert (
        "holds another token store (heldout 0.3 there, 0.1 asked for): choose another folder" in capsys.readouterr().err
    )


def test_several_sources_and_an_existing_tokenizer(tmp_path, capsys):
    text = " ".join(f"word{i % 50} and more {i}" for i in range(900))
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(text[i * 100 :])
    rows = [{"body": text[i * 333 :]} for i in range(6)]
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({**r, "text": "short " * (i + 2)}) + "\n" for i, r in enumerate(rows))
    )
    assert (
        main(
            [
                "--source",
                str(tmp_path / "*.txt"),
                str(tmp_path / "a.jsonl"),
                "--out",
                str(tmp_path / "one"),
                "--vocab_size",
                "300",
            ]
        )
        == 0
    )
    assert TokenStore(tmp_path / "one").info["documents"] == 12
    model = str(tmp_path / "one" / "tokenizer.model")
    assert (
        main(
            [
                "--source",
                str(tmp_path / "a.jsonl"),
                "--text_column",
                "body",
                "--tokenizer",
                model,
                "--out",
                str(tmp_path / "two"),
            ]
        )
        == 0
    )
    assert TokenStore(tmp_path / "two").vocab_size == 300
    assert capsys.readouterr().err.count("Tokenised") == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--source", "nowhere/*.txt"], "error: no file matches 'nowhere/*.txt'"),
        (["--vocab_size", "200"], "error: vocab_size 200 is too small: 256 bytes, 3 special tokens and one for each"),
        (["--vocab_size", "0"], "error: vocab_size 0 is too small"),
        (["--source", "hf:"], "error: 'hf:' names no Hugging Face data set"),
        (["--heldout", "2"], "error: heldout must be a share in [0, 1), got 2.0"),
        (["--tokenizer", "nowhere.model"], "error: no SentencePiece model at nowhere.model"),
        (["--vocab_size", "many"], "vocab_size"),
        (["--unknown", "1"], "--unknown"),
    ],
)
def test_bad_input(tmp_path, capsys, arguments, message):
    try:
        code = main([*arguments, "--out", str(tmp_path / "store")])
    except SystemExit as stopped:  # from the parser
        code = stopped.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("error:") == 1
    assert not list(tmp_path.iterdir())


def test_exit_code_and_no_traceback(tmp_path):
    command = [sys.executable, "-m", "recipes.prepare", "--source", "nowhere/*.txt", "--out", str(tmp_path / "store")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 2 and done.stderr.startswith("error: no file matches 'nowhere/*.txt'")
    assert done.stderr.count("\n") == 1 and not list(tmp_path.iterdir())


def test_preparing_imports_neither_torch_nor_lightning():
    code = "import sys, recipes.prepare; print(sorted({'torch', 'lightning', 'pandas', 'datasets'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.stdout == "[]\n", done.stderr


def test_a_broken_corpus_is_named(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"fine \xe9")
    assert main(["--source", str(tmp_path / "a.txt"), "--out", str(tmp_path / "s")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "a.txt: invalid UTF-8 at byte 5" in error and error.count("\n") == 1


def test_a_broken_file_among_good_ones_is_named(tmp_path, capsys):
    for i in range(3):
        (tmp_path / f"{i}.txt").write_text(f"some words of document {i} " * 200)
    command = ["--source", str(tmp_path), "--vocab_size", "300", "--out", str(tmp_path / "store")]
    for name, data, told in (
        ("z.txt", b"fine \xe9", "z.txt: invalid UTF-8 at byte 5"),
        ("z.jsonl", b'{"text": "a"}\n{"text": \n', "z.jsonl line 2: not valid JSON"),
        ("z.jsonl", b"[" * 100_000, "z.jsonl line 1: JSON nested too deeply"),
    ):
        (tmp_path / name).write_bytes(data)
        assert main(command) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and told in error and error.count("\n") == 1 and "vocab_size" not in error
        (tmp_path / name).unlink()


def test_ctrl_c_keeps_nothing_and_says_so(tmp_path):
    for i in range(16):
        (tmp_path / f"{i}.txt").write_text("".join(f"word{(i + 2) * j % 977} " for j in range(140_000)))
    command = [sys.executable, "-m", "recipes.prepare", "--source", str(tmp_path),
               "--out", str(tmp_path / "out" / "store"), "--vocab_size", "400", "--workers", "2"]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=Path(__file__).parents[2], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    tokens, begun = tmp_path / "out" / "store.partial" / "tokens.bin", time.monotonic()
    while not (tokens.exists() and tokens.stat().st_size) and time.monotonic() - begun < 60:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the workers too
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "interrupted: nothing was kept" in error and "Traceback" not in error, error
    assert not (tmp_path / "out").exists()


def test_help(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--source", "--vocab_size", "--heldout", "--out", "--workers"))
