"""Known vulnerabilities of what is installed here, and bandit's findings in the package.

    python benchmarks/reliability/audit.py [--short]

pip-audit asks PyPI's database. Where only a mirror is reached, it skips every package and still
ends with 0: here an audit that could ask nothing counts as no check made, and ends with 3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from facts import FOLDER, Outcome, Recorder

ROOT = Path(__file__).resolve().parents[2]
OWN = "mlflow-tula"


def run(*words: str) -> tuple[int, str, str]:
    """One of this environment's tools: exit code, output, errors."""
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def bandit() -> Outcome:
    """Bandit with the exclusions of pyproject.toml, each of which has its reason there."""
    code, out, err = run("bandit", "-q", "-c", "pyproject.toml", "-f", "json", "-r", "mlflow_tula")
    found = json.loads(out)["results"] if out else [{"issue_text": err[-200:]}]
    detail = found[0]["issue_text"] if found else "no finding"
    return Outcome(
        part="audit",
        case="bandit",
        kind="check",
        survived=int(not code and not found),
        lost=int(bool(code or found)),
        detail=detail,
    )


def pip_audit() -> Outcome:
    """Each installed package is one check; those that cannot be asked about are told apart."""
    _, out, err = run("pip_audit", "--progress-spinner", "off", "--format", "json")
    packages = json.loads(out)["dependencies"] if out.strip().startswith("{") else []
    asked = [one for one in packages if "vulns" in one]
    skipped = [one for one in packages if "vulns" not in one and one["name"] != OWN]
    bad = {one["name"]: [v["id"] for v in one["vulns"]] for one in asked if one["vulns"]}
    if not asked:
        detail = f"nothing could be asked: PyPI's database is out of reach ({len(skipped)} skipped)"
        return Outcome(
            part="audit",
            case="pip-audit",
            kind="check",
            injected=0,
            detail=detail if packages else err[-200:],
        )
    more = f"; {len(skipped)} not on PyPI: {', '.join(one['name'] for one in skipped)[:200]}"
    named = "; ".join(f"{name}: {', '.join(ids)}" for name, ids in bad.items())
    return Outcome(
        part="audit",
        case="pip-audit",
        kind="check",
        injected=len(asked),
        survived=len(asked) - len(bad),
        lost=len(bad),
        detail=(named or "no known vulnerability") + (more if skipped else ""),
    )


def main() -> int:
    """Run both, print, and write build/reliability/audit.jsonl; 1 where something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    given = parser.parse_args()
    made = True
    with Recorder("audit", short=given.short, folder=given.folder) as record:
        for outcome in (bandit(), pip_audit()):
            record(outcome)
            print(f"{outcome.case}: {outcome.detail}")
            made = made and outcome.injected > 0
    return record.exit_code or (0 if made else 3)


if __name__ == "__main__":
    sys.exit(main())
