"""Processes that a recipe starts. That they do not outlive it: test_strategies; ranks: test_virtual_nodes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHILD = "import time; print('begun', flush=True); time.sleep(1)"


@pytest.mark.parametrize("ignored", [True, False])
def test_behind_nohup_a_hang_up_changes_nothing(ignored):
    script = (f"import signal, sys; ignored = {ignored}; "
              "signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL); "
              f"from recipes.processes import to_the_end; sys.exit(to_the_end([sys.executable, '-c', {CHILD!r}]))")
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "begun\n"
    parent.send_signal(signal.SIGHUP)
    assert parent.wait(20) == (0 if ignored else 128 + signal.SIGHUP)
    parent.stdout.close()


def test_the_first_that_fails_ends_the_others_and_gives_the_code():
    script = ("import os, sys, time; from recipes.processes import to_the_end; "
              "child = 'import os, sys, time; sys.exit(7) if os.environ[\"R\"] == \"1\" else time.sleep(60)'; "
              "sys.exit(to_the_end([sys.executable, '-c', child], environments=[{'R': '0'}, {'R': '1'}]))")
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=30).returncode == 7
