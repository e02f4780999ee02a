"""What a run says of the code that it ran."""

from __future__ import annotations

import subprocess

from mlflow_tula.runs.run import Run


def git_tags(run: Run | None = None) -> dict[str, object]:
    """Commit, branch and whether files were changed, of the repository in the working folder.

    `mlflow.source.git.commit` is set where MLflow did not (it looks at the script's folder, which
    for an installed command is no repository).
    """
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return {}
    tags: dict[str, object] = {
        "tula.git.commit": commit,
        "tula.git.branch": _git("rev-parse", "--abbrev-ref", "HEAD"),
        "tula.git.dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
    }
    known = {} if run is None else run.client.get_run(run.run_id).data.tags
    if "mlflow.source.git.commit" not in known:
        tags["mlflow.source.git.commit"] = commit
    return tags


def _git(*arguments: str) -> str | None:
    """Standard output of a git command in the working folder, or None without git."""
    try:
        done = subprocess.run(
            ["git", *arguments], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
