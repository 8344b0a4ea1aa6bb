"""What failed its check on one rank is left on all, once after the first step and once after the first validation."""

from types import SimpleNamespace

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

from callbacks import SameKernels
from kernels.faulty_kinds import FAULTY

ONE, BOTH, MINE = ("float32", 64), ("bfloat16", 64), ("bfloat16", 128)


@pytest.fixture
def faulty():
    before = set(FAULTY)
    yield FAULTY
    FAULTY.clear()
    FAULTY.update(before)


def test_the_ranks_agree_once(faulty, monkeypatch):
    faulty.update({BOTH, MINE})
    calls = []

    def gather(out, own):
        calls.append(set(own))
        out[:] = [set(own), {BOTH, ONE}]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    trainer = SimpleNamespace(global_step=3, world_size=2, sanity_checking=False)
    callback = SameKernels()
    callback.on_train_start(trainer, None)
    callback.on_train_batch_end(trainer)  # within the accumulation of the first step
    assert calls == []
    trainer.global_step = 4
    with pytest.warns(UserWarning, match=r"on ranks \[1\] alone for \('float32', 64\)") as said:
        callback.on_train_batch_end(trainer)
    assert len(said) == 2  # and ranks [0] for MINE, nothing for BOTH
    assert faulty == {ONE, BOTH, MINE}
    trainer.global_step = 5
    callback.on_train_batch_end(trainer)
    assert len(calls) == 1
    callback.on_validation_end(trainer, None)
    callback.on_validation_end(trainer, None)
    assert len(calls) == 2


def test_one_process_asks_nobody(faulty):
    faulty.add(MINE)
    trainer, callback = SimpleNamespace(global_step=0, world_size=1, sanity_checking=False), SameKernels()
    callback.on_train_start(trainer, None)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer)  # no process group: a collective would raise
    assert faulty == {MINE}


def one_rank(rank, meeting):
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    if rank == 1:
        FAULTY.add(MINE)
    trainer, callback = SimpleNamespace(global_step=0, world_size=2, sanity_checking=False), SameKernels()
    callback.on_train_start(trainer, None)
    trainer.global_step = 1
    callback.on_train_batch_end(trainer)
    assert FAULTY == {MINE}
    dist.destroy_process_group()


@pytest.mark.cluster
def test_two_processes(tmp_path):
    mp.spawn(one_rank, (tmp_path / "meeting",), nprocs=2)
