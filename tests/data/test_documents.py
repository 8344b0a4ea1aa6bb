"""The documents data module: batches as the contract says, held-out bytes counted exactly, clear refusals."""

import json
import warnings

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer

from data.documents import DocumentsDataModule
from data.tokenizer import BOS, EOS

TEXTS = [
    f"doc {i}: " + " ".join(f"w{i * j % 17}é line" for j in range(2 + i * 7 % 40)) + " 😀" * (i % 2) for i in range(30)
]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    return dict(
        store=str(folder / "store"),
        source=str(folder / "texts.jsonl"),
        vocab_size=300,
        heldout=0.2,
        row_tokens=32,
        global_batch_tokens=128,
    )


def ready(settings, **changes):
    data = DocumentsDataModule(**{**settings, **changes})
    data.prepare_data(), data.setup()
    return data


def training_batches(data, steps):
    plan = data.batch_plan(1)
    rows, each = data.train_set(plan), plan.micro_rows
    return [rows.__getitems__(list(range(m * each, (m + 1) * each))) for m in range(steps * plan.accumulation)]


def segments(batch):
    """The batch's document pieces as token lists, with the targets of each."""
    tokens, targets = batch["tokens"].flatten().tolist(), batch["targets"].flatten().tolist()
    cuts = batch["cu_seqlens"].tolist()
    return [(tokens[a:b], targets[a:b]) for a, b in zip(cuts, cuts[1:])]


@pytest.mark.parametrize("carry_state", [False, True])
def test_batches_hold_what_the_contract_says(settings, carry_state):
    data = ready(settings, carry_state=carry_state)
    for batch in training_batches(data, 40):
        assert batch["tokens"].shape == batch["targets"].shape == (4, 32)
        cuts = batch["cu_seqlens"]
        assert all(batch[k].dtype == torch.int64 for k in ("tokens", "targets", "cu_seqlens", "target_count"))
        assert cuts[0] == 0 and cuts[-1] == 4 * 32 and (cuts.diff() > 0).all() and {0, 32, 64, 96} <= set(cuts.tolist())
        inner = [c for c in cuts[:-1].tolist() if batch["tokens"].flatten()[c] == BOS or c % 32 == 0]
        assert inner == cuts[:-1].tolist()
        for tokens, targets in segments(batch):
            assert BOS not in tokens[1:] and EOS not in tokens[:-1]
            assert targets[:-1] == tokens[1:]
            assert (targets[-1] == -100) == (tokens[-1] == EOS)
        assert ("carried" in batch) == ("lanes" in batch) == carry_state


def test_an_epoch_predicts_every_byte_of_every_document_once(settings):
    data = ready(settings)
    stream = data.train_set(data.batch_plan(1)).stream
    steps = -(-stream.epoch_tokens // 128)
    targets = torch.cat([b["targets"].flatten() for b in training_batches(data, steps)])[: stream.epoch_tokens]
    text = data.store.tokenizer.decode(targets[targets != -100].tolist())
    training = [t for t, h in zip(TEXTS, data.store.heldout) if not h]
    assert len(text.encode()) == sum(len(t.encode()) for t in training)
    assert all(t in text for t in training)
    assert int((targets == EOS).sum()) == len(training) and not (targets == BOS).any()


def test_carried_documents_go_on_in_the_same_row_of_the_next_batch(settings):
    data = ready(settings, carry_state=True, micro_batch_rows=2)
    before, carried_rows = {}, 0
    layout_rows = data.train_set(data.batch_plan(1)).layout.lane_rows
    for i, batch in enumerate(training_batches(data, 3 * layout_rows)):
        step, micro = divmod(i, 2)
        assert batch["lanes"].tolist() == [micro * 2, micro * 2 + 1]
        for row, lane in enumerate(batch["lanes"].tolist()):
            tokens = batch["tokens"][row].tolist()
            expected = step % layout_rows != 0 and before[lane][0] != EOS
            assert bool(batch["carried"][row]) == expected
            if expected:
                assert before[lane][1] == tokens[0], "the previous row's last target is this row's first token"
                carried_rows += 1
            before[lane] = tokens[-1], int(batch["targets"][row, -1])
    assert carried_rows > 20
    assert batch["carried"].dtype == torch.bool and batch["lanes"].dtype == torch.int64


@pytest.mark.parametrize("row_tokens, batch_rows", [(32, 8), (7, 3), (5000, 2)])
def test_held_out_documents_are_read_whole(settings, row_tokens, batch_rows):
    data = ready(settings, val_row_tokens=row_tokens, val_rows=None, val_batch_rows=batch_rows)
    (loader,) = data.val_dataloader()
    batches = list(loader)
    assert data.val_names == ["heldout"]
    assert sum(int(b["target_bytes"].sum()) for b in batches) == data.store.info["heldout_bytes"]
    info = data.store.info
    assert sum(int(b["target_count"]) for b in batches) == info["heldout_tokens"] - info["heldout_documents"]
    for batch in batches:
        valid = batch["targets"] != -100
        assert batch["target_count"] == valid.sum() and batch["target_bytes"].dtype == torch.int64
        assert (batch["target_bytes"][~valid] == 0).all() and (
            batch["target_bytes"][batch["targets"] == EOS] == 0
        ).all()
        assert batch["cu_seqlens"][-1] == batch["tokens"].numel()
        assert all(targets[:-1] == tokens[1:] for tokens, targets in segments(batch) if any(t != -100 for t in targets))
    text = data.store.tokenizer.decode([t for b in batches for t in b["targets"].flatten().tolist() if t != -100])
    assert text == "".join(t for t, h in zip(TEXTS, data.store.heldout) if h)


def test_validation_rows_are_spread_over_the_held_out_documents(settings):
    every = list(ready(settings, val_rows=None, val_batch_rows=1).val_dataloader()[0])
    some = list(ready(settings, val_rows=3, val_batch_rows=1).val_dataloader()[0])
    assert len(some) == 3
    for i, batch in enumerate(some):
        assert torch.equal(batch["tokens"], every[i * len(every) // 3]["tokens"])
    assert len(list(ready(settings, val_rows=10_000, val_batch_rows=1).val_dataloader()[0])) == len(every)


def test_vocabulary_is_known_before_and_after_preparation(settings, tmp_path):
    fresh = {**settings, "store": str(tmp_path / "fresh")}
    assert DocumentsDataModule(**fresh).vocab_size == 300
    ready(fresh)
    assert DocumentsDataModule(**{**fresh, "vocab_size": None, "source": None}).vocab_size == 300
    with pytest.raises(FileNotFoundError, match="no token store at .*recipes.prepare"):
        DocumentsDataModule(
            **{**settings, "store": str(tmp_path / "none"), "vocab_size": None, "source": None}
        ).vocab_size


def test_batches_and_vocabulary_need_no_store(settings, tmp_path):
    data = DocumentsDataModule(**settings | {"store": str(tmp_path / "none"), "source": None, "micro_batch_rows": 2})
    assert data.batch_plan(1).accumulation == 2 and data.vocab_size == 300
    with pytest.raises(ValueError, match="128 is not a whole number of rows of 63 tokens"):
        DocumentsDataModule(**settings | {"store": str(tmp_path / "none"), "row_tokens": 63}).batch_plan(1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("source", [None, "sotu"])
@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(heldout=1.5), r"heldout must be a share in \[0, 1\), got 1.5"),
        (dict(max_bytes=-1), "max_bytes must be at least 1"),
        (dict(prepare_workers=-1), "prepare_workers must be at least 1, got -1"),
        (dict(vocab_size=0), "vocab_size 0 is too small"),
    ],
)
def test_settings_are_checked_whatever_the_source(source, changes, message):
    with pytest.raises(ValueError, match=message):
        DocumentsDataModule(source=source, **changes)


def test_refusals(settings, tmp_path):
    ready(settings)
    with pytest.raises(ValueError, match="has a vocabulary of 300, vocab_size asks for 500: set vocab_size to 300"):
        ready({**settings, "source": None}, vocab_size=500)
    with pytest.raises(ValueError, match="holds another token store .vocab_size 300 there, 500 asked for"):
        ready(settings, vocab_size=500)
    with pytest.raises(ValueError, match="holds another token store .sources .* there, .*sotu"):
        ready(settings, source="sotu")
    with pytest.raises(ValueError, match="row_tokens must be at least 1, got 0"):
        DocumentsDataModule(row_tokens=0)
    with pytest.raises(ValueError, match="val_rows must be at least 1"):
        DocumentsDataModule(val_rows=0)
    with pytest.raises(ValueError, match="not a whole number of rows of 32 tokens: set it to 96 or 128"):
        ready(settings, global_batch_tokens=100).batch_plan(1)
    with pytest.raises(FileNotFoundError, match="no file matches"):
        ready(settings, store=str(tmp_path / "x"), source=str(tmp_path / "*.txt"))
    assert not (tmp_path / "x").exists()


def test_no_held_out_documents(settings, tmp_path):
    data = ready(settings, store=str(tmp_path / "s"), heldout=0.0)
    assert data.val_dataloader() == [] and data.val_names == []


def fitting(data, steps):
    data.prepare_data()
    data.trainer = Trainer(
        max_steps=steps, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    data.setup("fit")
    return data


def test_more_than_four_epochs_draw_a_warning(settings):
    data = ready(settings)
    tokens = int(np.diff(data.store.offsets)[~data.store.heldout].sum())
    enough = 4 * tokens // 128
    with pytest.warns(
        UserWarning,
        match=rf"trains {(enough + 40) * 128:,} tokens on a corpus of {tokens:,}: "
        rf"{(enough + 40) * 128 / tokens:.1f} epochs",
    ):
        fitting(DocumentsDataModule(**settings), enough + 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", message=".*GPU.*|.*max_epochs.*|.*srun.*")
        fitting(DocumentsDataModule(**settings), enough)


def test_accumulation_is_handed_to_the_trainer(settings):
    assert fitting(DocumentsDataModule(**settings, micro_batch_rows=1), 5).trainer.accumulate_grad_batches == 4
