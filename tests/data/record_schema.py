"""Record what this version stores, from real runs, into tests/data/schema-1.

    python tests/data/record_schema.py [FOLDER OF AN EARLIER RECORDING]

Run once for each new schema version, into a folder of its own; what is recorded is never changed
after a release, because every later version must read it (tests/test_upgrade.py).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pandas as pd

import mlflow_tula as tula

HERE = Path(__file__).resolve().parent
TARGET = HERE / "schema-1"
NET = "--model tiny.py:net --image-size 8"
COMMANDS = (
    f"main {NET} --batch-sizes 8,32,128,512 --world-sizes 1,2 --time-budget 60s --max-steps 20 "
    "--convergence convergence.csv",
    f"train {NET} --batch-size 64 --train-epochs 2",
    "compare --dataset digits --network mlp --methods plain --batch-sizes 64 --epochs 1 --seeds 1 "
    "--tune false --learning-rate 0.05 --workers 1",
    "diagnose --dataset digits --network mlp --batch-sizes 32 --epochs 0.5 --snapshots 1",
)
QUESTIONS = {
    "local_batch_size": [1, 8, 20, 64, 128, 512, 4096, 64],
    "nodes": [1, 1, 1, 1, 1, 1, 1, 2],
    "devices_per_node": [1, 1, 2, 1, 2, 2, 1, 2],
    "accumulation_steps": [1, 1, 1, 2, 1, 1, 1, 1],
}


def main() -> None:
    """Run the commands, or take what an earlier run of them left, and copy what they stored."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch)
        if len(sys.argv) == 1:
            for name in ("tiny.py", "convergence.csv"):
                shutil.copy(TARGET / name, folder / name)
            environment = {**os.environ, "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db"}
            for words in COMMANDS:
                command = [sys.executable, "-m", "mlflow_tula", *words.split()]
                subprocess.run(command, cwd=folder, env=environment, check=True)
        keep(folder / "tula_output")


def keep(output: Path) -> None:
    """Copy every kind of document, and note what the bundle predicts today."""
    (workload,) = output.glob("tiny-net.*")
    for name in ("table.json", "bundle.json", "recommendation.json"):
        shutil.copy(workload / name, TARGET / name)
    for name in ("decision.json", "checkpoint.pt"):
        shutil.copy(workload / "training" / name, TARGET / name)
    shutil.copy(output / "compare.digits" / "trainings.jsonl", TARGET / "trainings.jsonl")
    shutil.copy(output / "diagnose.digits" / "diagnosis.json", TARGET / "diagnosis.json")
    table = tula.ProfileTable.from_dict(json.loads((TARGET / "table.json").read_text()))
    from mlflow_tula.registry.links import link_document

    link = link_document(table.hardware, table.links)
    (TARGET / "link.json").write_text(json.dumps(link, indent=1) + "\n")
    bundle = tula.PredictorBundle.from_dict(json.loads((TARGET / "bundle.json").read_text()))
    convergence = bundle.to_dict()["convergence"]
    (TARGET / "convergence.json").write_text(json.dumps(convergence, indent=1) + "\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        answer = bundle.predict(pd.DataFrame(QUESTIONS), usd_per_device_hour=1.5)
    answer.to_json(TARGET / "predictions.json", orient="split", double_precision=15, indent=1)


if __name__ == "__main__":
    main()
