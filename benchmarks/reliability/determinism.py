"""Same table, same bundle, byte for byte; same seed, same training: again and again, elsewhere.

    python benchmarks/reliability/determinism.py [--short]

Every recorded table is fitted in processes with other hash seeds and numbers of threads, and one
small training is run in two processes; every answer must be the first one's, byte for byte.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from facts import FOLDER, Outcome, Recorder

ROOT = Path(__file__).resolve().parents[2]
TABLES = sorted((ROOT / "tests" / "data").rglob("*table*.json"))
TABLES += [ROOT / "tests" / "data" / "vgg11_digits_cpu.json"]
FIT = """
import json, sys, warnings
import mlflow_tula as tula
warnings.simplefilter("ignore")
table = tula.ProfileTable.from_dict(json.load(open(sys.argv[1])))
sys.stdout.write(json.dumps(tula.fit(table).to_dict()))
"""
TRAIN = """
import sys, torch
from mlflow_tula.train import train
from mlflow_tula.training.facts import BatchPlan
from mlflow_tula.workloads.job import Job
job = Job(model=sys.argv[1], dataset_size=300, image_size=8, augment=True, seed=7)
result = train(job, BatchPlan.of(50, dataset_size=300), epochs=2, output_dir=sys.argv[2])
state = torch.load(f"{sys.argv[2]}/checkpoint.pt", weights_only=True)["state"]["model"]
for name in sorted(state):
    print(name, state[name].numpy().tobytes().hex())
print(repr(result.train_loss), repr(result.test_accuracy))
"""


def answer(program: str, *arguments: str, **variables: str) -> str:
    """The digest of what a process of its own prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        check=False,
    )
    if done.returncode:
        return f"failed: {done.stderr.decode()[-300:]}"
    return hashlib.sha256(done.stdout).hexdigest()


def compared(case: str, answers: list[str]) -> Outcome:
    """How many answers are the first one's."""
    same = 0 if answers[0].startswith("failed") else sum(one == answers[0] for one in answers)
    odd = next((one for one in answers if one.startswith("failed")), "")
    return Outcome(
        part="determinism",
        case=case,
        kind="check",
        injected=len(answers),
        survived=same,
        lost=len(answers) - same,
        detail=odd,
    )


def main() -> int:
    """Compare, and write build/reliability/determinism.jsonl; 1 where something differed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="two processes of each")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    settings = [(str(seed), str(threads)) for seed in (0, 1, 77) for threads in (1, 2, 4)]
    settings = settings[:2] if given.short else settings
    with Recorder("determinism", short=given.short, folder=given.folder) as record:
        for path in TABLES:
            name = path.relative_to(ROOT / "tests" / "data")
            fits = [
                answer(FIT, str(path), PYTHONHASHSEED=seed, OMP_NUM_THREADS=threads)
                for seed, threads in settings
            ]
            record(compared(f"fit of {name}", fits))
        net = f"{ROOT / 'tests' / 'train_parts.py'}:linear_net"
        trained = []
        for seed in ("0", "1"):
            with tempfile.TemporaryDirectory(prefix="tula-same-") as folder:
                trained.append(answer(TRAIN, net, folder, PYTHONHASHSEED=seed, OMP_NUM_THREADS="1"))
        record(compared("weights of one rank, bit by bit", trained))
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
