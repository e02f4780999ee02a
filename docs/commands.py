"""The commands of the pages: found, checked against the command line, and run.

    python docs/commands.py docs/tutorial.md [--folder FOLDER]

runs a page's commands in order in a fresh folder and puts what they print in place of the blocks
that follow `<!-- output -->`, so that no output is typed. tests/test_docs_commands.py runs the same
commands. What counts as a command is a block that is fenced as sh, bash or console. Marks on the
line before it, which readers do not see:

    <!-- not run: reason -->    needs what is not here (a cluster, a GPU, hours); its options are
                                checked all the same
    <!-- long: reason -->       runs for more than the tests that CI runs can wait
    <!-- output -->             before a text block: what the block above it printed, or its end:
    <!-- output: last 12 lines -->

All blocks of a page run in one folder, each sees the variables of those before it, and servers
(`mlflow ui`, `mlflow server`, `mlflow models serve`) go on in the background to the page's end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHELLS = ("sh", "bash", "console")
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>\S*) *$")
MARK = re.compile(r"^ *<!-- (?P<word>not run|long|output)(?:: (?P<text>.+?))? -->$")
SERVER = re.compile(r"^mlflow (ui|server|models serve)\b")
PORT = re.compile(
    r"(?<=localhost:)\d{4,5}|(?<=127\.0\.0\.1:)\d{4,5}|(?<=-p )\d{4,5}|(?<=--port )\d+"
)
DEFAULT_PORT, START_S = "5000", 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    """Of its first line of text, from 1."""
    info: str
    text: str
    mark: str = ""
    """not run, long, output or nothing."""
    reason: str = ""

    @property
    def is_command(self) -> bool:
        """Whether people are meant to type it."""
        return self.info in SHELLS

    @property
    def name(self) -> str:
        """For messages and test names."""
        return f"{self.page}:{self.line}"


def blocks(text: str, page: str) -> list[Block]:
    """All fenced blocks of a page, with the mark before each."""
    found, lines, number, mark = [], text.splitlines(), 0, None
    while number < len(lines):
        line = lines[number]
        opened = FENCE.match(line)
        if opened is None:
            if line.strip():
                mark = MARK.match(line)
            number += 1
            continue
        end = number + 1
        while lines[end].strip() != "```":
            end += 1
        indent = len(opened["indent"])
        found.append(
            Block(
                page=page,
                line=number + 2,
                info=opened["info"],
                text="\n".join(one[indent:] for one in lines[number + 1 : end]),
                mark=mark["word"] if mark else "",
                reason=(mark["text"] or "") if mark else "",
            )
        )
        number, mark = end + 1, None
    return found


TOKEN = re.compile(
    r"""'[^']*'|"(?:\\.|[^"\\])*"|\\\n\s*|\\.|(?P<comment>(?:(?<=\s)|(?<![\s\S]))\#[^\n]*)"""
    r"""|(?P<end>&&|\|\||[;|\n])|[\s\S]""",
)


def statements(text: str) -> list[str]:
    """The commands of a block, one each, continued lines joined and comments left out."""
    found, now = [], ""
    for token in TOKEN.finditer(text + "\n"):
        if token["end"]:
            found.append(now.strip().removeprefix("$ "))
            now = ""
        elif not token["comment"]:
            now += re.sub(r"^\\\n\s*$", "", token[0])
    return [one for one in found if one]


def words(statement: str) -> list[str]:
    """A command's words, without the assignments before it."""
    found = shlex.split(statement)
    while found and re.match(r"^[A-Z_]+=", found[0]):
        found = found[1:]
    return found


@dataclass(kw_only=True, slots=True)
class Session:
    """A shell that runs the blocks of a page one after the other."""

    folder: Path
    environment: dict[str, str]
    ports: dict[str, str] = field(default_factory=dict)
    """Written ports -> those in use here; a port without an entry is used as it is."""
    limit_s: float = 600.0
    servers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, block: Block) -> tuple[int, str]:
        """Exit code and what was printed, both streams together as a terminal shows them."""
        text = PORT.sub(lambda found: self.ports.get(found[0], found[0]), block.text)
        servers = [one for one in statements(text) if SERVER.match(one)]
        kept = "\n".join(line for line in text.splitlines() if not SERVER.match(line))
        code, said = self._run(kept) if kept.strip() else (0, "")
        for server in servers:
            if code == 0:
                code, more = self._serve(server)
                said += more
        return code, said

    def _run(self, text: str) -> tuple[int, str]:
        """One shell, with the variables and in the place of the one before it."""
        state, place = self.folder / ".variables", self.folder / ".place"
        # Every variable is exported, so that the next block's shell knows it as well.
        script = (
            f'set -a; [ -f {state} ] && . {state}; [ -f {place} ] && cd "$(cat {place})"\n'
            f"trap 'code=$?; export -p > {state}; pwd > {place}; exit $code' EXIT\n"
            f"set -eo pipefail\n{text}\n"
        )
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=self.limit_s,
            check=False,
        )
        return done.returncode, done.stdout

    def _serve(self, text: str) -> tuple[int, str]:
        """Start a server and wait until it answers."""
        found = PORT.search(text)
        port = found[0] if found else self.ports.get(DEFAULT_PORT, DEFAULT_PORT)
        log = self.folder / f".server-{port}.log"
        with log.open("wb") as out:
            server = subprocess.Popen(
                ["bash", "-c", f"exec {text}"],
                cwd=self.folder,
                env={**self.environment, "MLFLOW_PORT": port},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.servers.append(server)
        end = time.monotonic() + START_S
        while time.monotonic() < end and server.poll() is None:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", int(port)), 1),
            ):
                return 0, ""
            time.sleep(0.3)
        return server.poll() or 1, log.read_text(errors="replace")

    def close(self) -> None:
        """End the servers, each with all of its processes."""
        for server in self.servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
        for server in self.servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=20)
                continue
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)
            server.wait()


@contextlib.contextmanager
def session(folder: Path, environment: Mapping[str, str], **options: object) -> Iterator[Session]:
    """A session whose servers end with it."""
    opened = Session(folder=folder, environment=dict(environment), **options)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.close()


def clean_environment(folder: Path) -> dict[str, str]:
    """This one, with this Python's commands first and a store of its own in the folder."""
    known = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith("MLFLOW_") and key not in ("VIRTUAL_ENV", "PYTHONPATH")
    }
    return {
        **known,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{known['PATH']}",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "COLUMNS": "100",
        "TERM": "dumb",
        "PYTHONUNBUFFERED": "1",  # both streams in the order in which they were written
    }


def shortened(output: str, wish: str) -> str:
    """What a page shows of an output: all of it, or its last lines; never paths of this machine."""
    lines = [line.rstrip() for line in output.strip().splitlines()]
    if found := re.fullmatch(r"last (\d+) lines", wish):
        lines = lines[-int(found[1]) :]
    elif found := re.fullmatch(r"first (\d+) lines", wish):
        lines = [*lines[: int(found[1])], "..."]
    return "\n".join(lines)


def rewritten(path: Path, folder: Path) -> str:
    """The page with the real output of its commands."""
    text = path.read_text(encoding="utf-8")
    lines, said = text.splitlines(), ""
    with session(folder, clean_environment(folder), limit_s=1800.0) as shell:
        replaced: list[tuple[Block, str]] = []
        for block in blocks(text, path.name):
            if block.is_command and block.mark != "not run":
                sys.stderr.write(f"{block.name}: {block.text.splitlines()[0]}\n")
                code, said = shell.run(block)
                if code:
                    raise SystemExit(f"{block.name} ended with {code}:\n{said}")
            elif block.mark == "output":
                said = said.replace(f"{folder}/", "").replace(sys.prefix, ".venv")
                replaced.append((block, shortened(said, block.reason)))
    for block, output in reversed(replaced):
        start = block.line - 1
        lines[start : start + len(block.text.splitlines())] = output.splitlines()
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the page that is named, and write its output into it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("page", type=Path)
    parser.add_argument("--folder", type=Path, help="where to run; else a temporary folder")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        where = chosen.folder or Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        chosen.page.write_text(rewritten(chosen.page, where.resolve()), encoding="utf-8")


if __name__ == "__main__":
    main()
