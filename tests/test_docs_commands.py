"""Every command of README.md and docs/: its options exist, and it runs or says why it cannot."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from docs_parts import ROOT, blocks_of, commands, pages, prepare, session_of

from mlflow_tula.cli import COMMANDS, tula

ALL = [block for page in pages() for block in blocks_of(page)]
COMMAND_BLOCKS = [block for block in ALL if block.is_command]
OTHER_PROGRAMS = {
    *("cd", "cat", "curl", "export", "kubectl", "ls", "mkdir", "sbatch", "source", "torchrun"),
    *(".", "echo", "srun", "conda"),
}
"""Programs whose options are not ours to check."""

LOOKS_LIKE_A_COMMAND = re.compile(r"^\s*(\$ )?(tula|mlflow|make|pip|curl|torchrun)( |$)")
INLINE = re.compile(r"(?<!`)`((?:tula|mlflow) [a-z][^`\n]*)`(?!`)")
SHORTENED_PAGES = {"README.md"}
"""Their blocks marked long are left out."""


def tula_command(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that the words name, and the rest of them."""
    command: click.Command = tula
    context = click.Context(tula, info_name="tula")
    rest = words[1:]
    while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
        found = command.get_command(context, rest[0])
        assert found is not None, f"tula has no command {rest[0]!r}: {' '.join(words)}"
        command, rest = found, rest[1:]
    return command, rest


def options_exist(command: click.Command, rest: list[str], said: str) -> None:
    known = {name for option in command.params for name in [*option.opts, *option.secondary_opts]}
    known |= {"--help", "-h", "--version"}
    for word in rest:
        name = word.partition("=")[0]
        if re.match(r"^--?[a-zA-Z]", name):
            assert name in known, f"{name} is no option of `{command.name}`: {said}"


def check_tula(words: list[str], said: str) -> None:
    command, rest = tula_command(words)
    options_exist(command, rest, said)


def check_mlflow(words: list[str], said: str) -> None:
    from mlflow.cli import cli

    command: click.Command = cli
    rest = words[1:]
    while isinstance(command, click.Group) and rest:
        found = command.get_command(click.Context(command), rest[0])
        assert found is not None, f"mlflow has no command {rest[0]!r}: {said}"
        command, rest = found, rest[1:]
    options_exist(command, rest, said)
    if words[1:3] != ["run", "."]:
        return
    project = yaml.safe_load((ROOT / "MLproject").read_text())
    entry = rest[rest.index("-e") + 1] if "-e" in rest else "main"
    assert entry in project["entry_points"], said
    given = [rest[place + 1] for place, word in enumerate(rest) if word == "-P"]
    known = project["entry_points"][entry]["parameters"]
    assert not {one.partition("=")[0] for one in given} - set(known), said


def check_make(words: list[str], said: str) -> None:
    rules = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", rules, re.MULTILINE))
    for word in words[1:]:
        assert "=" in word or word in targets, f"no target {word!r} in the Makefile: {said}"


def check_pip(words: list[str], said: str) -> None:
    assert words[1] == "install", said
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = set(project["optional-dependencies"])
    for found in re.findall(r"mlflow-tula\[(\w+)\]|^\.\[(\w+)\]", " ".join(words)):
        assert set(found) - {""} <= extras, said


def check_python(words: list[str], said: str) -> None:
    script = next((word for word in words[1:] if word.endswith(".py")), None)
    if script is not None and "/" in script:
        assert (ROOT / script).exists(), f"there is no {script}: {said}"


CHECKS = {
    "tula": check_tula,
    "mlflow": check_mlflow,
    "make": check_make,
    "pip": check_pip,
    "python": check_python,
}


def check(statement: str) -> None:
    """Refuse a program, a command or an option that does not exist."""
    words = commands.words(statement)
    if not words:
        return
    if words[0] in CHECKS:
        CHECKS[words[0]](words, statement)
    else:
        assert words[0] in OTHER_PROGRAMS, f"what is {words[0]!r}? ({statement})"
    if "mlflow_tula" in words:  # torchrun ... -m mlflow_tula profile ...
        check_tula(["tula", *words[words.index("mlflow_tula") + 1 :]], statement)


def without_files(text: str) -> str:
    """A block without the files that it writes by `cat > file <<'PY'`."""
    return re.sub(r"<<'(\w+)'\n.*?\n\1(\n|$)", r"\2", text, flags=re.DOTALL)


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=lambda block: block.name)
def test_what_a_block_calls_exists(block: Any) -> None:
    found = commands.statements(without_files(block.text))
    assert found, "a block of commands without one"
    for statement in found:
        check(statement)


@pytest.mark.parametrize("block", COMMAND_BLOCKS, ids=lambda block: block.name)
def test_a_block_is_run_or_says_why_not(block: Any) -> None:
    assert block.mark in ("", "not run", "long"), block.name
    if block.mark:
        assert len(block.reason.split()) >= 1, f"{block.name}: `<!-- {block.mark}: reason -->`"


@pytest.mark.parametrize("page", pages())
def test_no_command_hides_from_the_tests(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in blocks_of(page):
        text = text.replace(block.text, "")
        if not block.is_command and block.mark != "output":
            hidden = [line for line in block.text.splitlines() if LOOKS_LIKE_A_COMMAND.match(line)]
            assert not hidden or block.info == "text", f"{block.name}: fence it as sh"
    indented = [line for line in text.splitlines() if line.startswith("    ")]
    assert not [line for line in indented if LOOKS_LIKE_A_COMMAND.match(line)], "fence it as sh"


@pytest.mark.parametrize("page", [*pages(), "CHANGELOG.md"])
def test_commands_in_sentences_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for block in blocks_of(page):
        text = text.replace(block.text, "")
    for found in INLINE.findall(text):
        words = commands.words(found.replace("[", "").replace("]", "").replace("...", ""))
        # `tula main`, `tula registry`; `tula COMMAND` stands for any
        if words[0] == "tula" and (words[1] in COMMANDS or words[1].islower()):
            check_tula(words, found)
        elif words[0] == "mlflow":
            check_mlflow(words, found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tula recommend --no-such-option", "is no option of `recommend`"),
        ("tula recomend --model vgg11", "has no command 'recomend'"),
        ("tula registry shwo vgg11/digits", "has no command 'shwo'"),
        ("mlflow run . -P modell=vgg11", "mlflow run"),
        ("make no-such-target", "no target 'no-such-target'"),
        ("python examples/99_no_such_file.py", "there is no examples/99"),
        ("frobnicate --all", "what is 'frobnicate'"),
    ],
)
def test_a_command_that_does_not_exist_is_found(text: str, said: str) -> None:
    (statement,) = commands.statements(text)
    with pytest.raises(AssertionError, match=re.escape(said)):
        check(statement)


def test_blocks_and_marks_are_read() -> None:
    page = (
        "text\n<!-- not run: hours -->\n```sh\ntula main \\\n  --json  # all\n```\n\n"
        "<!-- output: last 2 lines -->\n```text\na\n```\n```console\n$ ls\n```\n"
    )
    first, second, third = commands.blocks(page, "page.md")
    assert (first.mark, first.reason, first.name) == ("not run", "hours", "page.md:4")
    assert commands.statements(first.text) == ["tula main --json"]
    assert (second.mark, second.reason, second.is_command) == ("output", "last 2 lines", False)
    assert third.is_command
    assert commands.statements(third.text) == ["ls"]


def test_output_is_put_where_it_belongs(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```sh\nNAME=three\necho one; echo two\n```\n\n<!-- output -->\n```text\nold\n```\n\n"
        "```sh\necho $NAME > file; cat file; exit 0\n```\n<!-- output: last 1 lines -->\n"
        "```text\n```\n"
    )
    folder = tmp_path / "run"
    folder.mkdir()
    text = commands.rewritten(page, folder)
    assert "```text\none\ntwo\n```" in text
    assert "```text\nthree\n```" in text
    assert "old" not in text
    page.write_text("```sh\necho said; exit 3\n```\n")
    with pytest.raises(SystemExit, match=r"page.md:2 ended with 3:\nsaid"):
        commands.rewritten(page, folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose store knows vgg11 and resnet18 on this machine."""
    folder = tmp_path_factory.mktemp("prepared")
    prepare(folder)
    return folder


def run_page(page: str, folder: Path, store: Path, *, long: bool) -> None:
    """All blocks of a page in order, as somebody would who follows it."""
    with session_of(page, folder, store) as shell:
        for block in blocks_of(page):
            if not block.is_command or block.mark == "not run":
                continue
            if block.mark == "long" and not long:
                continue
            code, said = shell.run(block)
            assert code == 0, f"{block.name} ended with {code}:\n{block.text}\n{said}"


def pages_to_run() -> list[Any]:
    """Those with commands; together they take longer than CI allows."""
    found = []
    for page in pages():
        if any(block.is_command and block.mark != "not run" for block in blocks_of(page)):
            found.append(pytest.param(page, marks=pytest.mark.long))
    return found


@pytest.mark.parametrize("page", pages_to_run())
def test_the_page_runs_from_top_to_bottom(page: str, tmp_path: Path, store: Path) -> None:
    run_page(page, tmp_path, store, long=page not in SHORTENED_PAGES)
