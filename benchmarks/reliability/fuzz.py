"""Inputs by the thousand: table import, bundle load, command line, `/invocations`.

    python benchmarks/reliability/fuzz.py [--inputs 100000] [--short] [--targets cli,table]

Hypothesis makes the inputs (fuzz_inputs.py), in chunks with seeds of their own; fuzz_targets.py
says what each of them must not do. A chunk that is done lies in build/reliability/fuzz/ and is not
run again, so that a campaign may be broken off and resumed, or split by --targets over processes.
Inputs that crash, hang (--limit) or change something lie beside it, in crashes.jsonl.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from facts import FOLDER, Outcome, Recorder
from fuzz_served import SERVED
from fuzz_targets import TARGETS, Fixtures, Target
from hypothesis import HealthCheck, Phase, given, seed, settings

CHUNK = 500
SHORT = 2_000
SHARES = {"table": 0.28, "bundle": 0.22, "cli": 0.14, "invocations": 0.18, "decisions": 0.18}
"""Of the inputs: a command line costs the most, and holds the least."""


class Hang(BaseException):
    """An input took longer than its limit."""


def run_chunk(target: Target, number: int, count: int, limit_s: float) -> dict[str, Any]:
    """Try `count` inputs of one seed; how they ended, and those that must not have."""
    ends: Counter[str] = Counter()
    crashes: list[dict[str, str]] = []

    def alarm(signal_number: int, frame: FrameType | None) -> None:
        raise Hang

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=target.inputs)
    def each(case: Any) -> None:
        if sum(ends.values()) >= count:
            return
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            ends[target.run(case)] += 1
        except Hang:
            ends["crash"] += 1
            crashes.append({"input": repr(case)[:5000], "error": f"no end within {limit_s:g} s"})
        except Exception:
            ends["crash"] += 1
            crashes.append({"input": repr(case)[:5000], "error": traceback.format_exc()[-3000:]})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, alarm)
    began = time.monotonic()
    try:
        each()
    finally:
        signal.signal(signal.SIGALRM, before)
    return {"ends": dict(ends), "crashes": crashes, "seconds": time.monotonic() - began}


def chunks(inputs: int) -> dict[str, list[tuple[int, int]]]:
    """Of each target the chunks, as (number, inputs); together exactly `inputs`."""
    left, planned = inputs, {}
    for name, share in SHARES.items():
        wanted = left if name == list(SHARES)[-1] else round(inputs * share)
        left -= wanted
        sizes = [CHUNK] * (wanted // CHUNK) + ([wanted % CHUNK] if wanted % CHUNK else [])
        planned[name] = list(enumerate(sizes))
    return planned


def campaign(
    inputs: int, first_seed: int, targets: list[str], folder: Path, limit_s: float, most_s: float
) -> None:
    """Run every chunk of these targets that is not done yet, or those that begin in `most_s`."""
    began = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    here = Path.cwd()
    logging.disable(logging.CRITICAL)  # MLflow notes each request
    with tempfile.TemporaryDirectory(prefix="tula-fuzz-") as scratch:
        try:
            fixtures = Fixtures(Path(scratch))
            for name in targets:
                target = {**TARGETS, **SERVED}[name](fixtures)
                for number, count in chunks(inputs)[name]:
                    path = folder / f"{name}-{first_seed}-{number}-{count}.json"
                    if path.exists() or time.monotonic() - began > most_s:
                        continue
                    found = run_chunk(target, first_seed * 10**6 + number, count, limit_s)
                    for crash in found["crashes"]:
                        with (folder / "crashes.jsonl").open("a") as file:
                            file.write(
                                json.dumps({"target": name, "chunk": number, **crash}) + "\n"
                            )
                    path.write_text(json.dumps(found))
                    done = f"{name} {number + 1}/{len(chunks(inputs)[name])}"
                    print(f"{done}: {found['ends']}, {found['seconds']:.0f} s", flush=True)
        finally:
            os.chdir(here)
            logging.disable(logging.NOTSET)


def report(inputs: int, first_seed: int, folder: Path, record: Recorder) -> bool:
    """One outcome a target, from the chunks that are done; whether all of them are."""
    whole = True
    for name, planned in chunks(inputs).items():
        ends: Counter[str] = Counter()
        seconds, first = 0.0, ""
        for number, count in planned:
            path = folder / f"{name}-{first_seed}-{number}-{count}.json"
            if not path.exists():
                whole = False
                continue
            found = json.loads(path.read_text())
            ends.update(found["ends"])
            seconds += found["seconds"]
            if found["crashes"] and not first:
                first = found["crashes"][0]["error"].strip().splitlines()[-1][:200]
        tried, lost = sum(ends.values()), ends["crash"]
        words = ", ".join(f"{count:,} {end}" for end, count in ends.most_common() if end != "crash")
        if tried:
            record(
                Outcome(
                    part="fuzz",
                    case=name,
                    kind="input",
                    injected=tried,
                    survived=tried - lost,
                    lost=lost,
                    detail=first or f"{words}; {seconds:.0f} s",
                )
            )
    return whole


def main(arguments: list[str] | None = None) -> int:
    """Run or go on, and write build/reliability/fuzz.jsonl; 1 where an input crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--short", action="store_true", help=f"{SHORT} inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", default=",".join(SHARES))
    parser.add_argument("--limit", type=float, default=20.0, help="seconds an input may take")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no chunk after so long")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given_ = parser.parse_args(arguments)
    inputs = SHORT if given_.short else given_.inputs
    folder = given_.folder / "fuzz"
    with Recorder("fuzz", short=given_.short, seed=given_.seed, folder=given_.folder) as record:
        targets = [name for name in given_.targets.split(",") if name]
        campaign(inputs, given_.seed, targets, folder, given_.limit, given_.seconds)
        whole = report(inputs, given_.seed, folder, record)
    if not whole:
        print("not all chunks are done yet: run again for the rest", file=sys.stderr)
    return record.exit_code


if __name__ == "__main__":
    sys.exit(main())
