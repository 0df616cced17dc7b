"""How OpenMP's threads wait: a short spin for every command, where the user has chosen nothing."""

import json
import os
import subprocess
import sys

import pytest

from tarnn.cli.threads import SHORT, WAIT_CHOICES, described, wait_briefly


def info(**chosen: str) -> dict:
    """What a new process of the command line prints."""
    environment = {name: value for name, value in os.environ.items() if name not in WAIT_CHOICES} | chosen
    command = [sys.executable, "-m", "tarnn", "info", "--json"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_a_command_asks_for_a_short_spin_before_torch_is_loaded():
    assert info()["idle_threads"] == "GOMP_SPINCOUNT=1000, KMP_BLOCKTIME=1"


@pytest.mark.parametrize("name", WAIT_CHOICES)
def test_what_the_user_has_chosen_stays(monkeypatch, name):
    monkeypatch.delitem(sys.modules, "torch")  # as before it is loaded
    environment = {name: "7"}
    wait_briefly(environment)
    assert environment == {name: "7"}
    assert described(environment) == f"{name}=7"
    environment = {}
    wait_briefly(environment)
    assert environment == SHORT


def test_nothing_is_said_that_comes_too_late():
    """torch is loaded in this process, and OpenMP has read its variables."""
    environment = {}
    wait_briefly(environment)
    assert environment == {}
    assert described(environment) == "OpenMP's default"
