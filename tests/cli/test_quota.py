"""Threads within a container's quota of processor time, by files like those of the system."""

import json
import os
import subprocess
import sys

import pytest
from support.alone import build, output

from tarnn.cli.threads import THREAD_CHOICES, processors, stay_within_quota

V2, V1 = "0::/box of one/inner\n", "9:memory:/box\n4:cpu,cpuacct:/box\n1:name=systemd:/\n"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """system(groups, limits): a folder like / on a machine of 16 cores, in a process where torch isn't loaded yet."""
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)

    def make(groups, limits):
        for name, text in {
            "proc/self/cgroup": groups,
            **{f"sys/{name}": text for name, text in limits.items()},
        }.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return make


def version_1(quota):
    return {"fs/cgroup/cpu/box/cpu.cfs_quota_us": quota, "fs/cgroup/cpu/box/cpu.cfs_period_us": "100000"}


CASES = {
    "a quota": (V2, {"fs/cgroup/box of one/inner/cpu.max": "350000 100000\n"}, "4"),
    "of the group around": (
        V2,
        {"fs/cgroup/box of one/inner/cpu.max": "max 100000", "fs/cgroup/box of one/cpu.max": "200000 100000"},
        "2",
    ),
    "of a container": ("0::/\n", {"fs/cgroup/cpu.max": "150000 100000"}, "2"),
    "a part of one": (V2, {"fs/cgroup/box of one/cpu.max": "20000 100000"}, "1"),
    "version 1": (V1, version_1("300000"), "3"),
    "no limit": (V2, {"fs/cgroup/box of one/cpu.max": "max 100000\n"}, None),
    "no limit in version 1": (V1, version_1("-1"), None),
    "more than there is": (V2, {"fs/cgroup/box of one/cpu.max": "9900000 100000"}, None),
    "more than cores": (
        V2,
        {"fs/cgroup/box of one/cpu.max": "900000 100000", "devices/system/cpu/smt/active": "1"},
        None,
    ),
    "none of it": ("", {"fs/cgroup/box of one/cpu.max": "200000 100000"}, None),
    "damaged": (V2, {"fs/cgroup/box of one/cpu.max": "a b c", "fs/cgroup/cpu.max": "1 0"}, None),
}


@pytest.mark.parametrize(("groups", "files", "threads"), CASES.values(), ids=CASES)
def test_no_more_threads_than_the_quota_has_processors(system, groups, files, threads):
    environment = {}
    stay_within_quota(environment, system(groups, files))
    assert environment.get("OMP_NUM_THREADS") == threads


@pytest.fixture(scope="module")
def runtime(tmp_path_factory):
    return build("team_size_alone", tmp_path_factory.mktemp("team_size"))


@pytest.mark.parametrize(("groups", "files", "threads"), CASES.values(), ids=CASES)
def test_the_compiled_runtime_reads_the_same_quota(runtime, system, groups, files, threads):
    root = system(groups, files)
    quota = processors(root)
    assert quota is None or quota > 0
    assert output(runtime, "quota", root) == ("inf" if quota is None else f"{quota:g}")


@pytest.mark.parametrize("name", THREAD_CHOICES)
def test_what_the_user_has_chosen_stays(system, name):
    environment = {name: "7"}
    stay_within_quota(environment, system(V2, {"fs/cgroup/box of one/cpu.max": "200000 100000"}))
    assert environment == {name: "7"}


def test_a_command_stays_within_it():
    """What a new process of the command line takes."""
    program = (
        "import tarnn.cli.threads as quota, tarnn.cli.main as main, sys\n"
        "quota.processors, quota.usual_threads = (lambda *_: 0.5), (lambda *_: 8)\n"
        "sys.argv = ['tarnn', 'info', '--json']\n"
        "main.main()"
    )
    environment = {name: value for name, value in os.environ.items() if name not in THREAD_CHOICES}
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(run.stdout)["threads"] == 1
