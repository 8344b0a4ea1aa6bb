"""The loss is a mean over the targets of the whole optimizer step; what is logged, saved and restored."""

import pytest
import torch
from lightning.pytorch import Callback
from small import VOCABULARY, Data, batches, language_model, trainer
from torch.nn import functional as F

from vla_lm.config import ModelConfig, OptimizerConfig
from vla_lm.mixers import MIXERS
from vla_lm.module import LanguageModel, recount


class Record(Callback):
    """Losses as logged and gradients as they stand at the end of each optimizer step."""

    def __init__(self):
        self.losses, self.gradients, self.rates = [], [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.gradients.append([p.grad.clone() for p in module.parameters()])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.losses.append(float(trainer.callback_metrics["train/loss"]))
            self.rates.append(float(trainer.callback_metrics["train/lr"]))


def mean_over_targets(model, window):
    """Cross entropy of all targets of the window, written out: sum of -log p over their number."""
    total, count = 0.0, 0
    for batch in window:
        p = model(batch["tokens"]).logits.log_softmax(-1)
        for row, column in (batch["targets"] != -100).nonzero().tolist():
            total, count = total - p[row, column, batch["targets"][row, column]], count + 1
    return total / count


@pytest.mark.parametrize("accumulation", [1, 3])
def test_loss_and_gradient_are_the_mean_over_all_targets_of_the_step(tmp_path, accumulation):
    window = batches(accumulation, valid=0.5, seed=3)
    window[0]["targets"][:, 2:] = -100  # uneven: a mean of means would differ
    count = sum((batch["targets"] != -100).sum() for batch in window)
    train = [batch | {"target_count": count} for batch in window]
    model = language_model()
    wanted = mean_over_targets(model, window)
    gradients = torch.autograd.grad(wanted, list(model.parameters()))
    record = Record()
    trainer(tmp_path, 1, accumulation, callbacks=[record]).fit(model, datamodule=Data(train))
    assert record.losses == [pytest.approx(wanted.item(), rel=1e-5)]
    for got, expected in zip(record.gradients[0], gradients):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_logged_loss_is_of_the_window_and_the_rate_of_its_step(tmp_path):
    train = [batch | {"target_count": torch.tensor(40)} for batch in batches(8, valid=1.0)]
    model = language_model({"warmup_steps": 4, "learning_rate": 4e-3, "schedule": "constant"})
    record = Record()
    trainer(tmp_path, 4, 2, callbacks=[record]).fit(model, datamodule=Data(train))
    assert record.rates == pytest.approx([1e-3, 2e-3, 3e-3, 4e-3])
    # 24 targets a batch with 40 claimed for two: 48/40 of the mean, near ln 13.
    assert record.losses[0] == pytest.approx(48 / 40 * torch.tensor(13.0).log().item(), rel=0.05)


@pytest.mark.parametrize("style", ["paper", "modern"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_every_mixer_overfits_a_tiny_batch(style, mixer):
    batch = batches(1, rows=2, length=8, valid=1.0)[0]
    model = language_model(mixer=mixer, style=style)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(200):
        loss = F.cross_entropy(model(batch["tokens"]).logits.flatten(0, 1), batch["targets"].flatten())
        if loss < 0.3:
            return
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    pytest.fail(f"loss {loss.item():.3f} after 200 steps on one batch")


def test_validation_logs_each_loader_by_name(tmp_path):
    recall = batches(2, seed=7)
    text = [batch | {"target_bytes": torch.full((2, 12), 3)} for batch in batches(1, seed=8)]
    model = language_model()
    run = trainer(tmp_path, 1)
    losses = run.validate(model, datamodule=Data([], [recall, text], ["pairs8_len24", "heldout"]), verbose=False)[0]
    logits = [model(batch["tokens"]).logits for batch in recall]
    pairs = zip(logits, recall)
    nats = sum(F.cross_entropy(x.flatten(0, 1), b["targets"].flatten(), reduction="sum") for x, b in pairs)
    count = sum((b["targets"] != -100).sum() for b in recall)
    right = sum(((x.argmax(-1) == b["targets"]) & (b["targets"] != -100)).sum() for x, b in zip(logits, recall))
    assert losses["val/pairs8_len24/loss"] == pytest.approx(float(nats.detach() / count), rel=1e-5)
    assert losses["val/pairs8_len24/accuracy"] == pytest.approx(float(right / count))
    assert losses["val/pairs8_len24/exact_match"] == 0
    bits = losses["val/heldout/loss"] / 3 / torch.tensor(2.0).log().item()
    assert losses["val/heldout/bits_per_byte"] == pytest.approx(bits, rel=1e-5)
    assert "val/heldout/exact_match" not in losses and "val/pairs8_len24/bits_per_byte" not in losses
    assert losses["val/loss"] == pytest.approx((losses["val/pairs8_len24/loss"] + losses["val/heldout/loss"]) / 2)


def test_checkpoint_holds_plain_types_and_portable_names(tmp_path):
    model = language_model(mixer="vla_key")
    run = trainer(tmp_path, 2)
    run.fit(model, datamodule=Data(batches(2)))
    run.save_checkpoint(tmp_path / "a.ckpt")
    content = torch.load(tmp_path / "a.ckpt", weights_only=True)
    assert content["hyper_parameters"]["config"]["mixer"] == "vla_key"
    again = LanguageModel.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert again.config == model.config and again.optimizer_config == model.optimizer_config
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])


def test_compiling_changes_no_parameter_name():
    plain = language_model()
    compiled = LanguageModel(plain.config, compile=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    wrapped = language_model(seed=1)
    wrapped.transformer = torch.compile(wrapped.transformer)
    checkpoint = {"state_dict": wrapped.state_dict()}
    assert any("_orig_mod" in name for name in checkpoint["state_dict"])
    plain.on_load_checkpoint(checkpoint)
    plain.load_state_dict(checkpoint["state_dict"])


def test_resume_is_bit_exact_twice_and_keeps_the_rate(tmp_path):
    train = [batch | {"target_count": torch.tensor(30)} for batch in batches(16)]

    def run(steps, resume=None):
        model, record = language_model({"warmup_steps": 2}), Record()
        fit = trainer(tmp_path, 8, 2, callbacks=[record, StopAt(steps)])
        fit.fit(model, datamodule=Data(train), ckpt_path=resume)
        return model, record, fit

    whole, record, _ = run(8)
    _, first, fit = run(3)
    fit.save_checkpoint(tmp_path / "3.ckpt")
    _, second, fit = run(6, tmp_path / "3.ckpt")
    fit.save_checkpoint(tmp_path / "6.ckpt")
    resumed, third, _ = run(8, tmp_path / "6.ckpt")
    assert first.losses + second.losses + third.losses == record.losses
    assert first.rates + second.rates + third.rates == record.rates
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))


def test_resume_with_another_accumulation_keeps_the_steps(tmp_path):
    # The same two rows a step, in two micro-batches or in one.
    parts = [batch | {"target_count": torch.tensor(20)} for batch in batches(12, rows=1)]
    merged = [
        {key: torch.cat([a[key], b[key]]) if key != "target_count" else a[key] for key in a}
        for a, b in zip(parts[::2], parts[1::2])
    ]

    def run(data, accumulation, steps, resume=None):
        model, record = language_model({"warmup_steps": 2}), Record()
        fit = trainer(tmp_path, 6, accumulation, callbacks=[record, StopAt(steps)])
        fit.fit(model, datamodule=Data(data), ckpt_path=resume)
        return record, fit

    record, _ = run(merged, 1, 6)
    first, fit = run(parts, 2, 3)
    fit.save_checkpoint(tmp_path / "3.ckpt")
    second, fit = run(merged, 1, 4, tmp_path / "3.ckpt")
    fit.save_checkpoint(tmp_path / "4.ckpt")
    third, fit = run(parts, 2, 6, tmp_path / "4.ckpt")
    assert fit.global_step == 6
    assert first.losses + second.losses + third.losses == pytest.approx(record.losses, rel=1e-5)


def test_recounting_refuses_a_checkpoint_within_a_step():
    counts = {"ready": 5, "started": 5, "processed": 5, "completed": 4}
    progress = {"epoch_loop.batch_progress": {"total": dict(counts), "current": dict(counts)}}
    with pytest.raises(ValueError, match="1 of 2 micro-batches"):
        recount({"accumulation": 2, "global_step": 2, "loops": {"fit_loop": progress}}, 1)


def test_a_changed_schedule_is_refused_on_resume(tmp_path):
    fit = trainer(tmp_path, 4)
    fit.fit(language_model(), datamodule=Data(batches(4)))
    fit.save_checkpoint(tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match="learning rate at step 4"):
        run = trainer(tmp_path, 8)
        run.fit(language_model({"learning_rate": 5e-3}), datamodule=Data(batches(8)), ckpt_path=tmp_path / "a.ckpt")


def test_vocabulary_comes_from_the_data_or_must_cover_it(tmp_path):
    class Sized(Data):
        vocab_size = VOCABULARY

    model = language_model(vocab_size=None)
    assert model.transformer is None
    trainer(tmp_path, 1).fit(model, datamodule=Sized(batches(1)))
    assert model.transformer.embedding.num_embeddings == model.hparams["config"]["vocab_size"] == VOCABULARY
    with pytest.raises(ValueError, match="vocab_size 5 is smaller than the data's 13"):
        trainer(tmp_path, 1).fit(language_model(vocab_size=5), datamodule=Sized(batches(1)))
    with pytest.raises(ValueError, match="set model.config.vocab_size"):
        trainer(tmp_path, 1).fit(language_model(vocab_size=None), datamodule=Data(batches(1)))


def test_probe_measures_without_gradient_and_restores_the_mode():
    model, batch = language_model(), batches(1)[0]
    model.train()
    found = model.probe(batch)
    assert model.training and list(found) == ["layers.0", "layers.1"]
    assert found["layers.0"].jacobian_norm.shape == (2, 12, 2) and not found["layers.0"].state_norm.requires_grad
    packed = model.probe(batch | {"cu_seqlens": torch.tensor([0, 5, 12, 24])})
    assert packed["layers.0"].jacobian_norm.shape == (1, 24, 2)
    assert language_model(mixer="softmax").probe(batch) == {}


def test_plain_mappings_are_accepted_and_checked():
    model = LanguageModel({"vocab_size": 5, "d_model": 8, "n_heads": 2}, {"learning_rate": 1e-3})
    assert model.config == ModelConfig(vocab_size=5, d_model=8, n_heads=2).resolved()
    assert model.optimizer_config == OptimizerConfig(learning_rate=1e-3)
    with pytest.raises(ValueError, match="no field widht"):
        LanguageModel({"widht": 5})


class StopAt(Callback):
    """Ends a run at an optimizer step, as an interruption would, with the schedule of the whole run."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["vla", "softmax"])
def test_compiled_equals_plain(mixer):
    compiled = language_model(style="modern", mixer=mixer)
    plain, batch = LanguageModel(compiled.config), batches(1)[0]
    plain.load_state_dict(compiled.state_dict())
    compiled.transformer.compile_blocks()
    for bounds in (None, torch.tensor([0, 5, 12, 24])):
        got, wanted = (model(batch["tokens"], bounds).logits for model in (compiled, plain))
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        pairs = ((got, compiled), (wanted, plain))
        gradients = [torch.autograd.grad(x.square().mean(), list(m.parameters())) for x, m in pairs]
        for one, other in zip(*gradients):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)
