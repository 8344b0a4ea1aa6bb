"""The global sample counter: the same samples at any number of ranks, micro-batches, workers and resumes."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from data.documents import DocumentsDataModule
from data.mqar import MQARDataModule
from data.sampler import BatchPlan, GlobalBatchSampler, RowBatches, plan_batches


@pytest.mark.parametrize(
    "rows, micro, world", [(12, 3, 1), (12, 3, 2), (12, 3, 4), (12, None, 1), (12, None, 4), (12, 1, 2), (8, 8, 1)]
)
def test_every_step_has_the_same_samples(rows, micro, world):
    plan = plan_batches(rows * 10, 10, micro, world)
    assert plan.micro_rows * plan.accumulation * world == rows == plan.rows_per_step
    ranks = [list(GlobalBatchSampler(plan, world, r, 5, lambda: 0)) for r in range(world)]
    for step in range(5):
        mine = [ranks[r][step * plan.accumulation : (step + 1) * plan.accumulation] for r in range(world)]
        samples = [i for m in range(plan.accumulation) for r in range(world) for i in mine[r][m]]
        assert samples == list(range(step * rows, (step + 1) * rows))
    assert all(len(GlobalBatchSampler(plan, world, r, 5, lambda: 0)) == 5 * plan.accumulation for r in range(world))


def test_sampler_starts_at_the_restored_step_and_keeps_its_length():
    plan, step = BatchPlan(8, 2, 2), 0
    sampler = GlobalBatchSampler(plan, 2, 1, 6, lambda: step)
    whole = list(sampler)
    for step in (0, 1, 4, 6):
        assert list(sampler) == whole[step * 2 :] and len(sampler) == 12
    assert sampler.batch_size == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((100, 30, None, 1), "global_batch_tokens 100 is not a whole number of rows of 30 tokens: set it to 90 or 120"),
        ((10, 30, None, 1), "of 30 tokens: set it to 30$"),
        (
            (90, 30, None, 2),
            "3 rows per optimizer step .* cannot be shared evenly by 2 ranks: set global_batch_tokens to 120",
        ),
        (
            (240, 30, 3, 2),
            r"not a multiple of micro_batch_rows 3 x 2 ranks: set micro_batch_rows to one of \[1, 2, 4\], "
            "or global_batch_tokens to 360",
        ),
        ((90, 30, 1, 2), "change the number of ranks, or global_batch_tokens to 120"),
        ((90, 30, 0, 1), "micro_batch_rows must be at least 1"),
        ((0, 30, None, 1), "must be at least 1"),
    ],
)
def test_plans_that_do_not_divide_name_the_mend(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_batches(*arguments)


@pytest.mark.parametrize("rows, world", [(12, 1), (12, 2), (12, 3), (7, 2)])
def test_validation_rows_are_shared_evenly_or_read_by_all(rows, world):
    ranks = [list(RowBatches(rows, 4, world, r)) for r in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    read = sorted(i for batches in ranks for batch in batches for i in batch)
    copies = 1 if rows % world == 0 else world
    assert read == sorted(list(range(rows)) * copies)
    assert [len(RowBatches(rows, 4, world, r)) for r in range(world)] == [len(b) for b in ranks]


class Reader(LightningModule):
    """Keeps what it is fed; its one weight depends on all of it, so a lost or repeated batch shows there too."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen, self.validated = [], []

    def training_step(self, batch, index):
        self.seen.append((self.global_step, index, batch["tokens"].clone(), int(batch["target_count"])))
        self.log("index", float(index))
        return self.weight * batch["tokens"].sum() / batch["target_count"]

    def validation_step(self, batch, index, dataloader_idx=0):
        self.validated.append((dataloader_idx, batch["tokens"].clone()))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def mqar(workers=0, **settings):
    return MQARDataModule(
        **{
            **dict(
                n_pairs=[2, 3],
                vocab_size=32,
                global_batch_tokens=80,
                micro_batch_rows=4,
                val_rows=4,
                num_workers=workers,
            ),
            **settings,
        }
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    texts = folder / "texts.jsonl"
    texts.write_text(
        "".join('{"text": "%s"}\n' % " ".join(f"w{i * j % 17} line" for j in range(3 + i * 7 % 40)) for i in range(30))
    )
    return dict(store=str(folder / "store"), source=str(texts), vocab_size=280, heldout=0.2)


def documents(store, workers=0, **settings):
    fixed = dict(row_tokens=16, global_batch_tokens=128, micro_batch_rows=4, val_rows=4, num_workers=workers)
    return DocumentsDataModule(**{**store, **fixed, **settings})


@pytest.fixture(params=["mqar", "documents", "carry_state"])
def make(request):
    if request.param == "mqar":
        return mqar
    store = request.getfixturevalue("store")
    return lambda **settings: documents(store, carry_state=request.param == "carry_state", **settings)


def fit(folder, module, data, steps, resume=None, every=3, stop_at=None):
    class Stop(Exception):
        pass

    class Interrupt(ModelCheckpoint):
        def on_train_batch_start(self, trainer, *rest):
            if stop_at is not None and trainer.global_step == stop_at[0] and len(module.seen) % 2 == stop_at[1]:
                raise Stop

    keep = Interrupt(dirpath=folder, filename="{step}", every_n_train_steps=every, save_top_k=-1)
    trainer = Trainer(
        max_steps=steps, max_epochs=-1, callbacks=[keep], accelerator="cpu", devices=1, use_distributed_sampler=False,
        val_check_interval=4, check_val_every_n_epoch=None, num_sanity_val_steps=0, log_every_n_steps=1,
        logger=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    try:
        trainer.fit(module, datamodule=data, ckpt_path=resume, weights_only=False)
    except Stop:
        pass
    return trainer


def same(left, right):
    assert len(left) == len(right)
    for (step, index, tokens, count), (step2, index2, tokens2, count2) in zip(left, right):
        assert (step, index, count) == (step2, index2, count2) and torch.equal(tokens, tokens2)


@pytest.mark.filterwarnings("error:You're resuming")
def test_interrupted_twice_trains_the_same_batches(tmp_path, make):
    whole = Reader()
    trainer = fit(tmp_path / "whole", whole, make(), 10)
    assert trainer.global_step == 10 and trainer.accumulate_grad_batches == 2 and len(whole.seen) == 20
    first = Reader()
    fit(
        tmp_path / "run", first, make(), 10, stop_at=(5, 1)
    )  # in the middle of an accumulation, two steps past a checkpoint
    same(first.seen, whole.seen[:11])
    second = Reader()
    fit(tmp_path / "run", second, make(), 10, resume=tmp_path / "run" / "step=3.ckpt", stop_at=(8, 0))
    same(second.seen, whole.seen[6:16])
    third = Reader()
    trainer = fit(tmp_path / "run", third, make(), 10, resume=tmp_path / "run" / "step=6.ckpt")
    same(third.seen, whole.seen[12:])
    assert trainer.global_step == 10 and torch.equal(third.weight, whole.weight)
    assert [d for d, _ in third.validated] == [d for d, _ in whole.validated][-len(third.validated) :]


def test_workers_change_nothing(tmp_path, make):
    none, two = Reader(), Reader()
    fit(tmp_path / "0", none, make(workers=0), 4)
    fit(tmp_path / "2", two, make(workers=2), 4)
    same(none.seen, two.seen)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(none.validated, two.validated, strict=True))


def test_target_count_is_that_of_the_whole_step(make):
    data = make()
    data.prepare_data(), data.setup()
    for world, micro in ((1, None), (1, 2), (2, 2), (4, 1)):
        data.micro_batch_rows = micro
        plan = data.batch_plan(world)
        rows = data.train_set(plan)
        ranks = [list(GlobalBatchSampler(plan, world, r, 12, lambda: 0)) for r in range(world)]
        for step in range(12):
            batches = [
                rows.__getitems__(i)
                for rank in ranks
                for i in rank[step * plan.accumulation : (step + 1) * plan.accumulation]
            ]
            assert {int(b["target_count"]) for b in batches} == {
                sum(int((b["targets"] != -100).sum()) for b in batches)
            }
            assert all(
                b["target_count"].dtype == b["tokens"].dtype == b["targets"].dtype == torch.int64 for b in batches
            )


def test_fitting_leaves_the_global_generator_alone(tmp_path, make):
    class Drawing(Reader):
        def training_step(self, batch, index):
            self.drawn = [*getattr(self, "drawn", []), float(torch.rand(()))]
            return super().training_step(batch, index)

    drawn = []
    for seed in (0, 5):
        torch.manual_seed(1)
        module = Drawing()
        fit(tmp_path / str(seed), module, make(seed=seed), 2, every=99)
        drawn.append(module.drawn)
    torch.manual_seed(1)
    assert drawn[0] == drawn[1] == [float(torch.rand(())) for _ in drawn[0]]


def test_a_checkpoint_of_other_data_is_refused(tmp_path, store):
    fit(tmp_path, Reader(), mqar(), 3)
    state = torch.load(tmp_path / "step=3.ckpt", weights_only=False)["MQARDataModule"]
    assert state["samples"] == 3 * 8 and state["seed"] == 0
    for settings, message in (
        (dict(seed=7), r"trained on data with seed \[0\], this run has \[7\]: set the data seed"),
        (dict(n_pairs=[3, 2]), r"fingerprint \[mqar .*n_pairs .2, 3.*this run has \[mqar .*n_pairs .3, 2"),
        (dict(global_batch_tokens=160), r"rows_per_step \[8\], this run has \[16\]: set global_batch_tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            mqar(**settings).load_state_dict(state)
        with pytest.raises(ValueError, match=message):
            fit(tmp_path, Reader(), mqar(**settings), 5, resume=tmp_path / "step=3.ckpt")
    data = documents(store)
    data.prepare_data(), data.setup()
    state = data.state_dict()
    with pytest.raises(
        ValueError, match=r"fingerprint \[documents .* in rows of 16\], this run has \[documents .* in rows of 32\]"
    ):
        documents(store, row_tokens=32).load_state_dict(state)
    with pytest.raises(ValueError, match=r"rows of 16\], this run has .*, state carried\]"):
        documents(store, carry_state=True).load_state_dict(state)


def test_endless_data_needs_a_number_of_steps():
    with pytest.raises(ValueError, match="attach a trainer with max_steps"):
        mqar().train_dataloader()
