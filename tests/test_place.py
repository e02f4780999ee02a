from __future__ import annotations

import pytest

from mlflow_tula.errors import InvalidInputError
from mlflow_tula.launch.network import check_interface, interface_towards
from mlflow_tula.launch.place import Place, expand_nodes, find_place

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "host0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_JOB_ID": "20042",
}
PYTORCHJOB = {
    "MASTER_ADDR": "job-master-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "3",
    "RANK": "2",
}


def test_without_a_launcher_a_process_is_alone() -> None:
    place = find_place({})
    assert (place.launcher, place.num_processes, place.leads) == ("alone", 1, True)


def test_torchrun() -> None:
    place = find_place(TORCHRUN)
    assert (place.launcher, place.nodes, place.node_rank) == ("torchrun", 2, 1)
    assert (place.ranks_per_node, place.local_rank, place.is_agent) == (2, 1, False)
    assert (place.host, place.port, place.served) == ("host0", 29500, True)


def test_srun() -> None:
    place = find_place(SRUN)
    assert (place.launcher, place.nodes, place.node_rank) == ("slurm", 2, 1)
    assert (place.ranks_per_node, place.local_rank) == (2, 1)
    assert place.host == "gpu07"
    assert 15_000 <= place.port < 35_000
    assert find_place({**SRUN, "MASTER_ADDR": "other", "MASTER_PORT": "1234"}).port == 1234


@pytest.mark.parametrize("step", ["4294967294", "batch"])
def test_a_batch_script_is_not_srun(step: str) -> None:
    assert find_place({**SRUN, "SLURM_STEP_ID": step}).launcher == "alone"


def test_a_step_of_fewer_tasks_than_the_job() -> None:
    step = {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "a"}
    place = find_place({**SRUN, **step, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert (place.launcher, place.num_processes) == ("slurm", 1)


def test_kubernetes() -> None:
    place = find_place(PYTORCHJOB)
    assert (place.launcher, place.nodes, place.node_rank) == ("kubernetes", 3, 2)
    assert (place.ranks_per_node, place.host, place.port) == (1, "job-master-0", 23456)
    pet = {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "trainer-0",
        "PET_MASTER_PORT": "29400",
    }
    place = find_place(pet)
    assert (place.nodes, place.node_rank, place.host, place.port) == (2, 1, "trainer-0", 29400)


def test_options_go_before_variables() -> None:
    place = find_place(TORCHRUN, nnodes=2, node_rank=0, rendezvous="10.0.0.1:29400")
    assert (place.launcher, place.leads, place.host, place.port) == (
        "options",
        True,
        "10.0.0.1",
        29400,
    )


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({**TORCHRUN, "WORLD_SIZE": "3"}, "WORLD_SIZE 3 must be a multiple of LOCAL_WORLD_SIZE 2"),
        ({**TORCHRUN, "WORLD_SIZE": "6"}, "must be nodes x ranks a node = 2 x 2"),
        ({**TORCHRUN, "RANK": "x"}, "RANK of the launcher must be a whole number, not 'x'"),
        ({**TORCHRUN, "GROUP_RANK": "2"}, "node_rank must lie between 0 and nodes - 1 = 1, not 2"),
        ({**TORCHRUN, "MASTER_ADDR": ""}, "need the address of node 0"),
        ({**SRUN, "SLURM_NTASKS": "3"}, "3 tasks of srun must be as many on each of 2 nodes"),
        ({**PYTORCHJOB, "PET_NNODES": "1:3"}, "PET_NNODES 1:3 is a range: start `torchrun"),
    ],
)
def test_what_contradicts_itself_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message.replace("(", r"\(")):
        find_place(environment)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nnodes": 2}, "needs --node-rank"),
        ({"nnodes": 2, "node_rank": 0, "rendezvous": "host"}, "must be HOST:PORT of node 0"),
        ({"nnodes": 2, "node_rank": 2, "rendezvous": "h:1"}, "between 0 and nodes - 1"),
        ({"node_rank": 1}, "need --nnodes of at least 2"),
    ],
)
def test_options_that_are_not_whole_are_refused(options: dict, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        find_place({}, **options)


def test_node_lists() -> None:
    assert expand_nodes("gpu[001-003,7],login") == ["gpu001", "gpu002", "gpu003", "gpu7", "login"]
    assert expand_nodes("rack[1-2]n[1,3]") == ["rack1n1", "rack1n3", "rack2n1", "rack2n3"]
    assert expand_nodes("") == []


def test_a_place_round_trips() -> None:
    place = find_place(TORCHRUN)
    assert Place.from_dict(place.to_dict()) == place


def test_an_interface_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError, match=r"--interface: .* no network interface 'eth77'"):
        check_interface("eth77")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,ib9")
    with pytest.raises(InvalidInputError, match=r"GLOO_SOCKET_IFNAME: .* 'ib9'; it has .*lo"):
        check_interface()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^docker")
    check_interface()


def test_the_interface_towards_this_machine_is_loopback() -> None:
    assert interface_towards("127.0.0.1", 29400) == "lo"
