"""The agent between a caller and its ranks: torch.distributed.run, plus a note of exit codes.

`python -m mlflow_tula.launch.agent <torchrun's own arguments>`. torchrun tells the exit code of a
rank that was killed only in a table on stderr; this writes them as `exits.json`.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from mlflow_tula.launch.ranks import FOLDER_VARIABLE, write_json


def main(arguments: list[str]) -> int:
    """Run the ranks to their end; 0 when all ended well."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.run(run.parse_args(arguments))  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        exits = {str(rank): failure.exitcode for rank, failure in error.failures.items()}
        write_json(Path(os.environ[FOLDER_VARIABLE]) / "exits.json", exits)
        return 1
    except SignalException:
        return 128 + signal.SIGTERM
    return 0


def _leave(number: int, frame: FrameType | None) -> None:
    """Before torch.distributed.run has its own handlers there is nobody to stop."""
    os._exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _leave)
    sys.exit(main(sys.argv[1:]))
