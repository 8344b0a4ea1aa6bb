from pathlib import Path

import pytest
from one_machine_slurm import OneMachineSlurm, missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory):
    reason = missing()
    if reason:  # SLURM's daemons are system packages: the reason names the one that is not installed
        pytest.skip(reason)
    with OneMachineSlurm(tmp_path_factory.mktemp("slurm")) as running:
        yield running
