from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "slurm").glob("*.sbatch"))
MANIFESTS = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))


def test_there_are_examples() -> None:
    assert SCRIPTS
    assert MANIFESTS


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_slurm_script_is_bash_and_names_its_store(path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash here")
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    text = path.read_text()
    lines = text.splitlines()
    assert lines[0] == "#!/bin/bash"
    asked = {line.removeprefix("#SBATCH --").split("=")[0] for line in lines if "#SBATCH" in line}
    assert {"nodes", "ntasks-per-node", "time"} <= asked
    assert "export MLFLOW_TRACKING_URI=" in text
    assert "srun" in text


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_has_what_the_operator_needs(path: Path) -> None:
    document = yaml.safe_load(path.read_text())
    assert document["apiVersion"] == "kubeflow.org/v1"
    assert document["kind"] == "PyTorchJob"
    assert document["metadata"]["name"]
    replicas = document["spec"]["pytorchReplicaSpecs"]
    assert replicas["Master"]["replicas"] == 1
    assert replicas["Worker"]["replicas"] >= 1
    for replica in replicas.values():
        container = replica["template"]["spec"]["containers"][0]
        # the operator sets the rendezvous variables in the container of this name alone
        assert container["name"] == "pytorch"
        assert container["image"]
        assert container["command"][0] == "tula"
        assert {"MLFLOW_TRACKING_URI"} <= {one["name"] for one in container["env"]}


def words_of(command: str) -> set[str]:
    """The long options of a command line."""
    return {word.split("=")[0] for word in command.split() if word.startswith("--")}


def test_the_page_names_every_launcher_with_its_rendezvous_and_store() -> None:
    page = (ROOT / "docs" / "distributed.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```bash\n")[1:]]
    by_launcher = {
        name: [block for block in blocks if mark in block]
        for name, mark in (
            ("alone", "tula main --model"),
            ("torchrun", "torchrun --nnodes"),
            ("slurm", "sbatch "),
            ("kubernetes", "kubectl apply"),
        )
    }
    assert all(by_launcher.values()), [name for name, found in by_launcher.items() if not found]
    assert all("MLFLOW_TRACKING_URI" in block for block in by_launcher["torchrun"])
    assert {"--nnodes", "--rdzv-endpoint"} <= words_of(by_launcher["torchrun"][0])


def test_options_in_the_examples_exist() -> None:
    from mlflow_tula.cli import tula

    known = {
        option
        for verb in ("main", "profile", "train")
        for parameter in tula.get_command(None, verb).params  # type: ignore[arg-type]
        for option in parameter.opts
    }
    for path in SCRIPTS:
        text = path.read_text().replace("\\\n", " ")
        for line in text.splitlines():
            for mark in ("tula main", "tula train", "mlflow_tula profile"):
                if mark in line and not line.startswith("#"):
                    used = words_of(line.split(mark, 1)[1])
                    assert used <= known, (path.name, used - known)
    for path in MANIFESTS:
        replicas = yaml.safe_load(path.read_text())["spec"]["pytorchReplicaSpecs"]
        words = replicas["Master"]["template"]["spec"]["containers"][0]["args"]
        assert {word for word in words if word.startswith("--")} <= known
