import os
import subprocess
import sys
import textwrap
from pathlib import Path

import netns
import pytest

WHY_NOT = netns.missing()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are namespaces")

ALL_REDUCE = textwrap.dedent(
    """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.full((1000,), float(dist.get_rank() + 1))
    dist.all_reduce(total)
    print("sum", float(total[0]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    """
)


def namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines() if line.strip()]


def own() -> list[str]:
    return [name for name in namespaces() if name.startswith(f"{netns.PREFIX}{os.getpid()}-")]


def test_hosts_reach_each_other_and_leave_nothing():
    with netns.network(4, rate_bit_per_s=1e9) as net:
        assert len(own()) == 5  # four hosts and the bridge
        done = subprocess.run(
            net.hosts[3].command(
                [sys.executable, "-c", "import socket; socket.create_server(('10.77.0.4', 5001))"]
            ),
            check=False,
        )
        assert done.returncode == 0
        sleeper = net.hosts[1].popen(["sleep", "600"])
        assert sleeper.pid in net.hosts[1].pids()
    assert sleeper.wait(timeout=10) != 0
    assert own() == []


def test_a_cut_cable_is_cut_and_mended():
    with netns.network(2) as net:
        first, second = net.hosts
        server = second.popen(
            [
                sys.executable,
                "-c",
                "import socket\n"
                "s = socket.create_server(('10.77.0.2', 5001)); print('up', flush=True)\n"
                "while True: s.accept()",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert server.stdout.readline() == "up\n"
        reach = [
            sys.executable,
            "-c",
            "import socket; socket.create_connection(('10.77.0.2', 5001), timeout=2)",
        ]

        def reached() -> bool:
            done = subprocess.run(first.command(reach), capture_output=True, check=False)
            return done.returncode == 0

        assert reached()
        second.cut()
        assert not reached()
        second.mend()
        assert reached()


def test_a_killed_run_is_swept_by_the_next():
    code = "import netns, time\nwith netns.network(2) as n: print('up', flush=True); time.sleep(60)"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(netns.__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "up\n"
    process.kill()
    process.wait()
    stem = f"{netns.PREFIX}{process.pid}-"
    assert any(name.startswith(stem) for name in namespaces())
    netns.sweep()
    assert not any(name.startswith(stem) for name in namespaces())


@pytest.mark.slow
def test_torchrun_joins_two_hosts(tmp_path: Path):
    script = tmp_path / "all_reduce.py"
    script.write_text(ALL_REDUCE)
    with netns.network(2, rate_bit_per_s=1e9) as net:
        processes = [
            host.popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                    *("--node-rank", str(host.rank), "--nproc-per-node", "1"),
                    *("--master-addr", net.master, "--master-port", "29500", str(script)),
                ],
                env={"OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for host in net.hosts
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs == ["sum 3.0\n", "sum 3.0\n"]
