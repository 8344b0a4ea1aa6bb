"""carry_state: a document goes on in the next batch as if it had never been cut."""

import pytest
import torch
from lightning.pytorch import Callback
from small import Data, carried_batches, language_model, trainer

from vla_lm.lanes import LaneStates
from vla_lm.mixers import MIXERS

DOCUMENTS = [[40], [7, 9, 24], [16, 1, 23]]  # 3 lanes of 40 tokens: cut, begun, and ended at row ends


class KeepLogits(Callback):
    """The logits of every training batch, with the weights held still."""

    def __init__(self):
        self.logits = []

    def on_train_start(self, trainer, module):
        inner = module._forward_carried
        module._forward_carried = lambda batch: self.logits.append(inner(batch)) or self.logits[-1]


@pytest.mark.parametrize("style", ["paper", "modern"])
@pytest.mark.parametrize("mixer", [name for name in MIXERS if name != "softmax"])
def test_carried_rows_equal_the_long_row(tmp_path, style, mixer):
    long, stretches = carried_batches(DOCUMENTS, rows=3, length=8, steps=5)
    # The raw-key rule overflows within 40 tokens at the usual penalty.
    fields = {"max_positions": 64, "init_std": 0.3, "penalty": 20.0 if mixer == "vla_v2" else 0.1}
    model = language_model({"learning_rate": 1e-30, "weight_decay": 0.0}, style=style, mixer=mixer, **fields)
    keep = KeepLogits()
    trainer(tmp_path, 5, callbacks=[keep]).fit(model, datamodule=Data(stretches, carry_state=True))
    got = torch.cat(keep.logits, 1).detach()
    for row, lengths in enumerate(DOCUMENTS):
        wanted = torch.cat([model(part[None]).logits[0] for part in long[row].split(lengths)])
        torch.testing.assert_close(got[row], wanted.detach(), rtol=1e-4, atol=1e-4)


def test_states_are_cut_from_the_graph_and_kept_per_micro_batch(tmp_path):
    _, stretches = carried_batches(DOCUMENTS, rows=3, length=8, steps=5)
    # Each step as three micro-batches of one row, lanes 0, 1, 2.
    single = [one for stretch in stretches for one in rows_apart(stretch)]
    model = language_model(style="modern")
    trainer(tmp_path, 5, 3).fit(model, datamodule=Data(single, carry_state=True))
    for lane in range(3):
        states, known = model.lanes.get([lane], torch.device("cpu"))
        assert known == [True] and len(states) == 2
        assert not any(tensor.requires_grad for state in states for tensor in state.tensors().values())
    assert model.lanes.get([0], torch.device("cpu"))[0][0].length.tolist() == [40]


def test_resume_restores_the_states_bit_for_bit_also_in_other_micro_batches(tmp_path):
    _, stretches = carried_batches(DOCUMENTS, rows=3, length=8, steps=5)
    single = [one for stretch in stretches for one in rows_apart(stretch)]

    def run(data, steps, accumulation=1, resume=None):
        model = language_model({"warmup_steps": 1}, style="modern", learn_penalty=True)
        fit = trainer(tmp_path, 5, accumulation, callbacks=[Stop(steps)])
        fit.fit(model, datamodule=Data(data, carry_state=True), ckpt_path=resume)
        return model, fit

    whole, _ = run(stretches, 5)
    _, fit = run(stretches, 2)
    fit.save_checkpoint(tmp_path / "2.ckpt")
    saved = torch.load(tmp_path / "2.ckpt", weights_only=True)["lanes"]
    assert saved["lanes"] == [0, 1, 2] and "memory.S" in saved["layers"][0] and "tail" in saved["layers"][1]
    resumed, _ = run(stretches, 5, resume=tmp_path / "2.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    for a, b in zip(whole.lanes.state_dict()["layers"], resumed.lanes.state_dict()["layers"]):
        assert all(torch.equal(a[name], b[name]) for name in a)
    # The rows split otherwise, as at another number of ranks.
    split, _ = run(single, 5, accumulation=3, resume=tmp_path / "2.ckpt")
    for a, b in zip(whole.parameters(), split.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_a_document_whose_state_is_unknown_is_refused(tmp_path):
    _, stretches = carried_batches(DOCUMENTS, rows=3, length=8, steps=5)
    with pytest.raises(ValueError, match=r"lanes \[0, 1, 2\] continue a document whose state is unknown"):
        trainer(tmp_path, 1).fit(language_model(), datamodule=Data(stretches[1:2], carry_state=True))


def test_softmax_refuses_to_carry_before_training(tmp_path):
    with pytest.raises(ValueError, match="'softmax' has no state of fixed size.*carry_state: false"):
        trainer(tmp_path, 1).fit(language_model(mixer="softmax"), datamodule=Data([], carry_state=True))


def test_lane_states_assemble_rows_from_different_groups():
    model = language_model(style="modern")
    lanes, device = LaneStates(), torch.device("cpu")
    assert lanes.get([4], device) == (None, [False]) and lanes.state_dict() == {}
    tokens = torch.randint(0, 13, (4, 6))
    states = model(tokens, return_states=True).states
    lanes.put([4, 5], [state.index_select(torch.tensor([0, 1])) for state in states])
    lanes.put([6, 7], [state.index_select(torch.tensor([2, 3])) for state in states])
    parts = LaneStates(), LaneStates()
    for part, number in zip(parts, ([6, 7], [4, 5])):  # each as a rank of its own
        part.put(number, lanes.get(number, device)[0])
    again, whole = LaneStates(), lanes.own()
    again.load_state_dict(*(part.own() for part in parts))
    assert again.own()["lanes"] == whole["lanes"] == [4, 5, 6, 7]
    for one, other in zip(again.own()["layers"], whole["layers"], strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    got, known = again.get([7, 9, 4], device)
    for one, other in zip(got, states):
        assert torch.equal(one.memory.S[[0, 2]], other.memory.S[[3, 0]])
    got, known = lanes.get([7, 9, 4], device)
    assert known == [True, False, True]
    for one, other in zip(got, states):
        assert torch.equal(one.memory.S[[0, 2]], other.memory.S[[3, 0]]) and torch.equal(one.tail[0], other.tail[3])


@pytest.mark.gpu
@pytest.mark.parametrize(("mixer", "learned"), [("vla", True), ("vla", False), ("deltanet", False)])
def test_the_host_does_not_wait_for_the_gpu_in_a_carried_batch(mixer, learned):
    _, stretches = carried_batches(DOCUMENTS, rows=3, length=8, steps=5)
    model = language_model(style="modern", mixer=mixer, d_model=64, learn_penalty=learned).cuda()
    try:
        for step, batch in enumerate(stretches):
            batch = {name: x if name in ("lanes", "cu_seqlens") else x.cuda() for name, x in batch.items()}
            if step >= 3:  # by then every kernel is compiled and checked; the document boundaries are new each time
                torch.cuda.set_sync_debug_mode("error")
            model._forward_carried(batch).square().mean().backward()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rows_apart(batch):
    bounds, length = batch["cu_seqlens"], batch["tokens"].shape[1]
    for row in range(batch["tokens"].shape[0]):
        inside = bounds[(bounds >= row * length) & (bounds <= (row + 1) * length)] - row * length
        one = {key: batch[key][row : row + 1] for key in ("tokens", "targets", "carried", "lanes")}
        yield one | {"cu_seqlens": inside, "target_count": batch["target_count"]}


class Stop(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_end(self, trainer, *_):
        trainer.should_stop = trainer.global_step >= self.step
