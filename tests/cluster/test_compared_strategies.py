"""`python -m recipes.strategies` on two CPU processes: equal losses, and each goes on from the other's checkpoint."""

import json

import pytest

from recipes import strategies

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.mark.parametrize("more", [[], ["--one_gpu"]])
def test_one_process_and_ddp(tmp_path, more):
    """With --one_gpu each of the two is a node of its own, on CPUs too."""
    with pytest.raises(SystemExit) as end:
        strategies.main(["--config", "configs/mqar.yaml", "--strategies", "single", "ddp", "--steps", "6",
                         "--more", "2", "--out", str(tmp_path), "--trainer.accelerator", "cpu",
                         "--data.val_rows", "16", *more])
    assert end.value.code == 0
    report = json.loads((tmp_path / "table.json").read_text())
    losses = [run["losses"] for name in ("single", "ddp") for run in (report[name], report[name]["gone on"])]
    assert all(sorted(x) == ["7", "8"] for x in losses)
    for x in losses[1:]:
        assert all(abs(x[step] - losses[0][step]) < 1e-5 * losses[0][step] for step in x)
