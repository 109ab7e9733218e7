"""One run on several machines: hosts of their own processes and network, one of which is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers_struck import prepare, undisturbed
from helpers_supervise import ended, plan, state_after

from tapeline.errors import RunError
from tapeline.supervise.elastic import Ranks
from tapeline.supervise.job import Job
from tapeline.supervise.nodes import Node
from tapeline.supervise.processes import published

HELPER = Path(__file__).with_name("helpers_supervise.py")
STEPS = 400
LONGEST_S = 100  # a loaded machine is nobody's fault


def test_a_machine_knows_its_place_from_its_scheduler_or_is_told():
    assert Node.of({}) == Node()
    slurm = {"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "2", "MASTER_ADDR": "n0"}
    assert Node.of(slurm) == Node(2, 4, "n0")
    kubeflow = {"PET_NNODES": "2", "PET_NODE_RANK": "0"}
    assert Node.of(kubeflow) == Node(0, 2, socket.gethostname())
    indexed = {"JOB_COMPLETION_INDEX": "1"}
    assert Node.of(indexed, number=3, address="10.0.0.1") == Node(1, 3, "10.0.0.1")
    assert Node.of(slurm, number=1) == Node()
    with pytest.raises(RunError, match="which of the 2 nodes this is, from 0 to 1, found nothing"):
        Node.of({}, number=2)
    with pytest.raises(RunError, match="from 0 to 1, found 2"):
        Node.of({}, number=2, index=2)
    with pytest.raises(RunError, match="number of machines beside it, found 1 alone"):
        Node.of({}, index=1)


def test_on_several_machines_the_number_of_ranks_is_fixed(tmp_path):
    with pytest.raises(RunError, match="expected one number, of ranks on each machine"):
        Job(tmp_path, (), (), Ranks(1, 2), node=Node(0, 2))


class Hosts:
    """Two hosts: each with processes, a name and a network interface of its own."""

    def __init__(self, folder):
        self._folder = folder
        self._names = [f"tapeline-{os.getpid()}-{number}" for number in (0, 1)]
        self.running = [None, None]

    def __enter__(self):
        for name in self._names:
            subprocess.run(["ip", "netns", "add", name], check=True)
        link = "link add eth0 netns {} type veth peer name eth0 netns {}".format(*self._names)
        subprocess.run(["ip", *link.split()], check=True)
        for number, name in enumerate(self._names):
            self._inside(name, "addr", "add", f"10.0.0.{number + 1}/24", "dev", "eth0")
            self._inside(name, "link", "set", "eth0", "up")
            self._inside(name, "link", "set", "lo", "up")
        return self

    def __exit__(self, *_):
        for number in (0, 1):
            self.kill(number)
        for name in self._names:
            subprocess.run(["ip", "netns", "del", name], check=True)

    def start(self, number, *argv):
        """Run a Python program on a host, its output in `out-N` and `err-N`."""
        inside = ["ip", "netns", "exec", self._names[number]]
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "sh", "-c"]
        program = f'hostname node{number}; "$@"; exit $?'  # a shell that reaps, as an init does
        with (
            (self._folder / f"out-{number}").open("w") as out,
            (self._folder / f"err-{number}").open("a") as err,
        ):
            self.running[number] = subprocess.Popen(
                [*inside, *apart, program, "sh", sys.executable, *map(str, argv)],
                env={**os.environ, "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=out,
                stderr=err,
            )

    def kill(self, number):
        """Lose a host with every process on it."""
        if self.running[number]:
            self.running[number].kill()
            self.running[number].wait()

    def wait(self):
        """The exit codes of both."""
        deadline = time.monotonic() + LONGEST_S
        return [host.wait(deadline - time.monotonic()) for host in self.running]

    def said(self, number):
        return (self._folder / f"err-{number}").read_text()

    def when(self, condition):
        deadline = time.monotonic() + LONGEST_S
        while not condition():
            assert all(host.poll() is None for host in self.running), [self.said(0), self.said(1)]
            assert time.monotonic() < deadline, [self.said(0), self.said(1)]
            time.sleep(0.01)

    def _inside(self, name, *argv):
        subprocess.run(["ip", "-n", name, *argv], check=True)


@pytest.fixture
def hosts(tmp_path):
    apart = ["unshare", "--net", "--pid", "--uts", "--fork", "--mount-proc", "true"]
    try:
        allowed = (
            os.geteuid() == 0
            and not subprocess.run(apart, check=False, stderr=subprocess.DEVNULL).returncode
        )
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("network and process namespaces need root with CAP_NET_ADMIN and CAP_SYS_ADMIN")
    with Hosts(tmp_path) as two:
        yield two


@pytest.mark.parametrize("lost", [0, 1], ids=["the one that leads", "the other"])
def test_a_lost_machine_is_waited_for_and_nothing_else_is_lost(tmp_path, hosts, lost):
    plan(tmp_path)
    for number in (0, 1):
        hosts.start(number, HELPER, tmp_path, 2, STEPS, number, 2)
    hosts.when(lambda: any((tmp_path / "run").glob("checkpoints/step-*20/manifest.json")))
    hosts.kill(lost)
    hosts.start(lost, HELPER, tmp_path, 2, STEPS, lost, 2)
    assert hosts.wait() == [0, 0], [hosts.said(0), hosts.said(1)]
    result = json.loads((tmp_path / "out-0").read_text())
    assert result == {"state": state_after(STEPS), "ranks": 4}
    assert (tmp_path / "out-1").read_text() == ""
    lives = ended(tmp_path)
    assert lives[-1]["how"] == "finished"
    assert [life["ranks"] for life in lives] == [4] * len(lives)
    begun = sorted((tmp_path / "run/supervise").glob("attempt-*"))
    assert len(begun) >= 2
    assert {published(folder / "node-1.json")["host"] for folder in begun} == {"node1"}


def test_torchrun_on_two_machines_comes_to_the_bits_of_one_process(tmp_path, hosts):
    prepare(tmp_path, rank=1, number=19)
    whole = undisturbed(tmp_path).done()
    argv = ["-m", "tapeline", "supervise", tmp_path / "run.toml", "--out", tmp_path / "run"]
    argv += ["--nodes", "2", "--address", "10.0.0.1", "--json", "--node"]
    for number in (0, 1):
        hosts.start(number, *argv, number)
    hosts.when((tmp_path / "struck").exists)
    hosts.kill(1)
    hosts.start(1, *argv, 1)
    assert hosts.wait() == [0, 0], [hosts.said(0), hosts.said(1)]
    result = json.loads((tmp_path / "out-0").read_text())
    assert result["part_sha256"] == whole["part_sha256"]
    first, second = ended(tmp_path)
    assert (first["how"], first["first"], first["ranks"]) == ("failed", [1], 2)
    assert "rank 1 is gone without a trace" in first["evidence"]
    assert second["how"] == "finished"
