"""Right numbers from the fixed batch, a figure that can be read, and training left alone to the bit."""

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from callbacks import JsonlLogger, StateNorms, read_metrics
from callbacks.state_norms import first_rows, state_figure
from tests.callbacks.tiny import ROW, TinyData, TinyModel, collate, trainer


class Packed(TinyData):
    """Validation rows packed: documents of 5 and 15 tokens, the second over a row's end, and 28 tokens of filler."""

    def val_dataloader(self):
        def packed(rows):
            batch = collate(rows) | {"cu_seqlens": torch.tensor([0, 5, 20, 48])}
            batch["targets"].flatten()[20:] = -100
            return batch

        loader = super().val_dataloader()[1]
        loader.collate_fn = packed
        return loader


def fit(folder, callbacks, data=None, model=None, loggers=False, steps=4):
    seed_everything(1, verbose=False)
    model = model or TinyModel()
    run = trainer(folder, steps, callbacks, loggers, limit_val_batches=0)
    run.fit(model, datamodule=data or TinyData())
    return model, run


def test_norms_of_the_longest_rows_and_the_figure(tmp_path):
    loggers = [TensorBoardLogger(tmp_path, name="", version=""), JsonlLogger(tmp_path)]
    probe = StateNorms(every_n_steps=2, rows=3)
    model, _ = fit(tmp_path, [probe], loggers=loggers)
    assert probe._batch["tokens"].shape == (3, 2 * ROW)
    found = model.probe(probe._batch)
    lines = {line["step"]: line for line in read_metrics(tmp_path / "metrics.jsonl") if "state_norm/layers.0" in line}
    assert list(lines) == [2, 4]
    for layer, norms in found.items():
        assert lines[4][f"state_norm/{layer}"] == pytest.approx(norms.state_norm[:, -1].mean().item())
        assert lines[4][f"jacobian_norm/{layer}/mean"] == pytest.approx(norms.jacobian_norm.mean().item())
        assert lines[4][f"jacobian_norm/{layer}/max"] == pytest.approx(norms.jacobian_norm.max().item())
    assert lines[4]["penalty_norm/layers.0"] == pytest.approx(found["layers.0"].penalty_norm[:, -1].mean().item())
    assert "penalty_norm/layers.1" not in lines[4]
    events = EventAccumulator(str(tmp_path)).Reload()
    images = events.Images("state_norm/curve")
    assert [image.step for image in images] == [1, 3] and images[0].width >= 600
    assert [event.step for event in events.Scalars("state_norm/layers.1")] == [1, 3]


def test_packed_norms_are_those_of_the_longest_document(tmp_path):
    probe = StateNorms(every_n_steps=4)
    logger = JsonlLogger(tmp_path)
    model, _ = fit(tmp_path, [probe], Packed(), loggers=logger)
    where, length, _ = probe._stretch()
    ends = torch.arange(1, 48, 2)
    places, chosen = where(ends)
    assert length == 15 and places.tolist() == [1, 3, 5, 7, 9, 11, 13, 15]
    assert ends[chosen].tolist() == list(range(5, 20, 2))
    [last] = [line for line in read_metrics(logger.path) if "state_norm/layers.0" in line]
    expected = model.probe(probe._batch)["layers.0"].state_norm[0, ends == 19].mean().item()
    assert last["state_norm/layers.0"] == pytest.approx(expected)


def test_training_is_the_same_to_the_bit(tmp_path):
    plain, _ = fit(tmp_path, [])
    after = torch.rand(3)
    watched, _ = fit(tmp_path, [StateNorms(every_n_steps=1)])
    assert torch.equal(after, torch.rand(3))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters()))


def test_silent_after_a_word_where_there_is_no_state(tmp_path, caplog):
    model = TinyModel(stateless=True)
    calls, probe = [], model.probe
    model.probe = lambda batch: calls.append(1) or probe(batch)
    with caplog.at_level("INFO"):
        fit(tmp_path, [StateNorms(every_n_steps=1)], model=model)
    assert len(calls) == 1 and caplog.text.count("keep no state to measure") == 1


def test_figure_can_be_read():
    curves = {f"layers.{i}": (torch.arange(64, 1025, 64), torch.linspace(1, 20 + i, 16)) for i in range(12)}
    axes = state_figure(curves, "memory", 1024).axes[0]
    assert axes.get_xlabel() == "token t" and "‖S_t‖_F" in axes.get_ylabel() and axes.get_title() == "memory"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == list(curves)
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 12


def test_first_rows_cuts_whole_documents():
    batch = {"tokens": torch.zeros(4, 6, dtype=int), "targets": torch.zeros(4, 6, dtype=int), "target_count": 24}
    packed = batch | {"cu_seqlens": torch.tensor([0, 4, 6, 12, 18, 24])}
    cut = first_rows(packed, 2)
    assert cut["cu_seqlens"].tolist() == [0, 4, 6, 12] and cut["tokens"].shape == (2, 6) and "target_count" not in cut
    assert "cu_seqlens" not in first_rows(batch, 9)
