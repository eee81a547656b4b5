"""Processes that know of each other: who takes part, who is gone, who has failed, where all stop. Without JAX."""

import re
import signal
import socket
import subprocess
import threading
import time

import pytest
from many import VARIABLES, command, ended, free_port, started

from jaxgpt.cli import main
from jaxgpt.errors import RESUMABLE, UserError
from jaxgpt.processes.gate import Gate
from jaxgpt.processes.launch import Launch, launch
from jaxgpt.processes.peers import spoken

HOST = socket.gethostname()

# Who a process is


def by_hand(*, coordinator="node7:9000", processes="4", process="3"):
    return ["--coordinator", coordinator, f"--processes={processes}", "--process", process]


def test_flags_say_who_a_process_is():
    assert launch(["--steps", "3", *by_hand()], {}) == Launch("node7", 9000, 4, 3)
    assert launch(by_hand(coordinator="[::1]:1"), {}) == Launch("::1", 1, 4, 3)
    assert launch(["--steps", "3"], {}) is None
    assert launch(by_hand(processes="1", process="0"), {}) is None
    slurm = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_NTASKS": "2"}
    assert launch(["--processes", "1"], slurm) is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--process", "1"], "--process 1: needs --coordinator and --processes too"),
        (["--coordinator", "a:1", "--processes", "2"], "--coordinator a:1: needs --process too"),
        (by_hand(process="4"), "--process 4: must be from 0 to 3, since --processes is 4"),
        (by_hand(process="-1"), "--process -1: must be a whole number"),
        (by_hand(processes="0", process="0"), "--processes 0: must be at least 1"),
        (by_hand(coordinator="node7"), "--coordinator node7: must be HOST:PORT"),
        (by_hand(coordinator="node7:99999"), "--coordinator node7:99999: must be HOST:PORT"),
    ],
)
def test_flags_that_do_not_fit_together_are_one_line(args, said, capsys):
    assert main(["train", *args]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "node[003-004]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_VERSION": "4.1.6",
}


@pytest.mark.parametrize(
    ("environment", "found"),
    [(SLURM, ("node003", 4, 3, 1)), (OPEN_MPI, ("10.96.0.1", 4, 2, 0)), ({**SLURM, "SLURM_NTASKS": "1"}, None)],
)
def test_launchers_say_who_a_process_is(environment, found, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    who = launch([])
    assert found == (who and (who.host, who.count, who.index, who.local))
    if who:
        assert 0 < who.port < 2**16


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"JOB_COMPLETION_INDEX": "0", "KUBERNETES_SERVICE_HOST": ""}, "Kubernetes"),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, "MPI has started this process"),
    ],
)
def test_a_launcher_whose_peers_cannot_be_found_is_refused(environment, said, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said) as caught:
        launch([])
    assert "give --coordinator HOST:PORT" in str(caught.value)
    assert "--processes 1 runs this process alone" in str(caught.value)


# Where all stop


def test_gates_stop_all_where_the_fastest_is():
    gates = [Gate() for _ in range(3)]
    for gate, count in zip(gates, (4, 7, 5), strict=True):
        assert [gate.ends() for _ in range(count)] == [False] * count
    passed = [gate.hold(15) for gate in gates]
    assert passed == [4, 7, 5]
    counts = list(passed)

    def go_on(number):
        while not gates[number].ends():
            counts[number] += 1

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    assert counts == passed
    for gate in gates:
        gate.release(max(passed))
    for thread in threads:
        thread.join(timeout=10)
    assert counts == [7, 7, 7]
    assert all(gate.ends() for gate in gates)


def test_processes_of_any_speed_stop_after_the_same_program(tmp_path):
    told = command("meet", tmp_path, **{"0": ["count", 0.02, -1], "1": ["count", 0.002, 40], "2": ["count", 0.01, -1]})
    with started(told, 3) as processes:
        found = ended(processes)
    assert [status for status, _ in found] == [0, 0, 0]
    passed = {re.search(r"passed (\d+), 15", said)[1] for _, said in found}
    assert len(passed) == 1
    assert int(passed.pop()) >= 40


# Who is gone


def met(process):
    assert process.stdout.readline().startswith("met ")


@pytest.mark.parametrize("gone", [0, 1])
def test_a_process_that_is_killed_is_named_and_all_end(gone, tmp_path):
    with started(command("meet", tmp_path), 3) as processes:
        for process in processes:
            met(process)
        processes[gone].send_signal(signal.SIGKILL)
        found = ended(processes, within=30)
    line = f"jaxgpt: error: process {gone} on {HOST} is gone (its connection has closed); the same command goes on"
    for index, (status, said) in enumerate(found):
        if index != gone:
            assert status == RESUMABLE
            assert said.startswith(line) if gone == 0 or index == 0 else said == ""


def test_one_that_never_comes_is_named(tmp_path):
    with started(command("meet", tmp_path), 3, [0, 2], JAXGPT_JOIN_SECONDS="1.5") as processes:
        (zero, said), (two, nothing) = ended(processes, within=30)
    assert (zero, two, nothing) == (2, 2, "")
    assert re.match(r"--processes 3: process 1 has not come to 127.0.0.1:\d+ within 1.5 s; start all", said)


def test_an_index_used_twice_is_refused_and_the_others_go_on(tmp_path):
    told = command("meet", tmp_path, **{"0": ["count", 0.01, 300], "1": ["count", 0.01, -1]})
    with started(told, 2, [0, 1, 1]) as processes:
        found = ended(processes, within=30)
    assert found[0][0] == 0
    assert sorted(status for status, _ in found[1:]) == [0, 2]
    (said,) = (said for status, said in found if status == 2)
    assert said.startswith("--process 1: the run has a process of this index already")


def test_counts_that_differ_are_refused_by_both(tmp_path):
    told = command("meet", tmp_path)
    with started(told, 2, [0]) as [zero]:
        port = zero.args[zero.args.index("--coordinator") + 1]
        other = [*zero.args[: len(told) + 1], "--coordinator", port, "--processes", "3", "--process", "2"]
        with subprocess.Popen(other, stdout=subprocess.PIPE, text=True, env=VARIABLES) as two:
            said, _ = two.communicate(timeout=30)
        ((status, first),) = ended([zero], within=30)
    assert (status, two.returncode) == (2, 2)
    assert first == said
    assert first.startswith(f"--processes 3 of process 2 on {HOST}: process 0 has --processes 2")


def test_a_coordinator_that_cannot_be_reached_or_used_is_one_line(monkeypatch, capsys):
    monkeypatch.setenv("JAXGPT_JOIN_SECONDS", "0.4")
    where = f"127.0.0.1:{free_port()}"
    flags = ["--coordinator", where, "--processes", "2", "--process"]
    assert main(["train", *flags, "1"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"jaxgpt: error: --coordinator {where}: cannot be reached within 0.4 s (Connection refused)")
    host, port = where.split(":")
    with socket.create_server((host, int(port))):
        assert main(["train", *flags, "0"]) == 2
    assert f"--coordinator {where}: process 0 cannot listen there (Address already in use)" in capsys.readouterr().err
    monkeypatch.setenv("JAXGPT_JOIN_SECONDS", "soon")
    assert main(["train", *flags, "0"]) == 2
    assert "JAXGPT_JOIN_SECONDS soon: must be a number of seconds above 0" in capsys.readouterr().err


# Who has failed


def test_what_all_meet_is_said_once(tmp_path):
    wrong = ["fail", "--steps 0: must be at least 1", 2]
    with started(command("meet", tmp_path, **{str(i): wrong for i in range(3)}), 3) as processes:
        for process in processes:
            met(process)
        found = ended(processes, within=30)
    assert [status for status, _ in found] == [2, 2, 2]
    assert "".join(said for _, said in found) == "jaxgpt: error: --steps 0: must be at least 1\n"


def test_what_one_meets_is_said_with_its_name_and_ends_all(tmp_path):
    with started(command("meet", tmp_path, **{"1": ["fail", "the disk is full", 2]}), 3) as processes:
        for process in processes:
            met(process)
        found = ended(processes, within=30)
    assert found == [(2, f"jaxgpt: error: process 1 on {HOST}: the disk is full\n"), (2, ""), (2, "")]


def test_errors_are_told_apart():
    def name(index):
        return f"process {index}"

    assert spoken({0: ("a", 2), 1: ("a", 2)}, name) == ["a"]
    assert spoken({1: ("b", 2), 0: ("a", 2), 2: ("b", 1)}, name) == ["a", "process 1, process 2: b"]
