"""What docs/security.md promises: nothing from outside is run, nothing leaves its folder.

Inputs of odd shapes are in test_fuzz.py; this is about code, names, paths and secrets.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest

import mlflow_tula as tula
from mlflow_tula.cli import COMMANDS
from mlflow_tula.cli import run as tula_cli
from mlflow_tula.cli import tula as group
from mlflow_tula.documents import parse_json
from mlflow_tula.errors import InvalidInputError, SchemaError, StoreError
from mlflow_tula.files import read_json, write_json
from mlflow_tula.redaction import SECRET_VARIABLES, masked

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "mlflow_tula"
SECRET = "hunter2"

# --- nothing from outside is run


def calls(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Every call in a file, with the dotted name of what is called."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def test_no_eval_no_unpickling_no_shell() -> None:
    forbidden = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.load"}
    forbidden |= {"pickle.load", "pickle.loads", "marshal.loads", "shelve.open", "joblib.load"}
    found = []
    for path in PACKAGE.rglob("*.py"):
        for name, call in calls(path):
            words = {one.arg: one.value for one in call.keywords}
            shell = words.get("shell")
            if name in forbidden or (isinstance(shell, ast.Constant) and shell.value):
                found.append(f"{path.name}:{call.lineno} {name}")
            if name.endswith("torch.load") or name in ("np.load", "numpy.load"):
                safe = words.get("weights_only", words.get("allow_pickle"))
                wanted = name.endswith("torch.load")
                if not (isinstance(safe, ast.Constant) and safe.value is wanted):
                    found.append(f"{path.name}:{call.lineno} {name}")
            if (
                name.startswith("subprocess.")
                and call.args
                and isinstance(call.args[0], ast.Constant | ast.JoinedStr)
            ):
                found.append(f"{path.name}:{call.lineno} a command as one string")
    assert found == []


def test_code_is_named_by_jobs_alone() -> None:
    """`package.module:function` becomes code in one function, called where a Job is built."""
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for name, _ in calls(path)
        if name.endswith("resolve_callable")
    }
    assert users == {
        "comparing/networks.py",
        "probing/own.py",
        "workloads/losses.py",
        "workloads/models.py",
        "workloads/optimizers.py",
        "workloads/own_data.py",
    }


EVIL = (
    "from pathlib import Path\nPath('evil_was_here').touch()\n\ndef net():\n    raise SystemExit\n"
)


def test_names_in_tables_bundles_and_the_registry_are_never_imported(
    store: Path, tmp_path: Path, table, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from mlflow_tula import registry
    from mlflow_tula.fit import fit
    from mlflow_tula.hardware import detect
    from mlflow_tula.plugin.deployments import TulaDeployments
    from mlflow_tula.plugin.resolve import resolve

    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = {"model": "evil:net", "dataset": "evil:net", "optimizer": "evil:net"}
    workload = replace(table.workload, **names, variant="evil:net")
    bad = replace(table, workload=workload, hardware=detect())
    bundle = fit(bad)
    done = registry.register(bundle, table=bad)
    write_json(tmp_path / "bundle.json", bundle.to_dict())
    write_json(tmp_path / "table.json", bad.to_dict())
    commands = [
        ["recommend", "--bundle", "bundle.json"],
        ["fit", "--table", "table.json"],
        ["register", "--bundle", "bundle.json"],
        ["registry", "list"],
        ["registry", "show", done.name],
        ["registry", "compare", done.name],
        ["import", "nothing.csv", "--model", "evil:net", "--dataset", "evil:net"],
        ["doctor"],
    ]
    for words in commands:
        tula_cli(words)
    assert "this is a bug of tula" not in capsys.readouterr().err
    TulaDeployments("tula").predict(done.name, {"global_batch_size": 64})
    with contextlib.suppress(tula.errors.TulaError):
        resolve({"model": "evil:net", "dataset": "evil:net", "batch_size": "auto"}, {}, {})
    assert "evil" not in sys.modules
    assert not (tmp_path / "evil_was_here").exists()


def test_a_pasted_command_is_quoted() -> None:
    """A suggested command may hold names of somebody else's run."""
    import shlex

    from mlflow_tula.cli.options import command_line
    from mlflow_tula.workloads.job import Job

    line = command_line("recommend", Job(model="x; rm -rf ~", dataset="$(id)"))
    assert shlex.split(line) == [
        "tula",
        "recommend",
        "--model",
        "x; rm -rf ~",
        "--dataset",
        "$(id)",
    ]


# --- JSON within limits


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": -Infinity}', "-Infinity is no JSON number"),
        ('{"a": 1e999}', "inf is not finite"),
        ("[" * 100_000, "nested deeper than 24"),
        ("[" * 100 + "]" * 100, "nested deeper than 24"),
        ('{"a": ' + "9" * 4000 + "}", "a whole number of .* bits; at most 64"),
        ('{"a": ' + "9" * 10_000 + "}", "is not JSON"),
        ("{", "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ('"' + "x" * 30_000 + '"', "a text of 30,000 characters"),
        ("[" + "0," * 3_000_000 + "0]", "more than 3,000,000 values"),
    ],
)
def test_json_bombs_are_refused(text: str | bytes, match: str) -> None:
    began = time.monotonic()
    with pytest.raises(SchemaError, match=match):
        parse_json(text, "the file")
    assert time.monotonic() - began < 30


def test_a_file_without_end_is_not_read() -> None:
    with pytest.raises(SchemaError, match="larger than 64 MiB"):
        read_json("/dev/zero", made_by="tula fit")


# --- names and paths


@pytest.mark.parametrize(
    "name",
    ["tula.a.b/../c", "tula.a.b' OR name LIKE '%", "tula.A.B.C", "tula...", "tula.a\n.b.c", "../x"],
)
def test_a_registered_name_holds_nothing_but_slugs(name: str) -> None:
    from mlflow_tula.registry.versions import registered_name

    with pytest.raises(InvalidInputError, match="a registered predictor is named tula"):
        registered_name(name)


@pytest.mark.parametrize(
    "name", ["../../etc", "..", "a/b", "C:\\x", "~root", "a\u2044b", ".", "$HOME"]
)
def test_slugs_are_no_paths(table, name: str) -> None:
    workload = replace(table.workload, model=name, dataset=name, optimizer=name, variant=name)
    full = workload.registered_name(replace(table.hardware, device_name=name))
    assert not set(full) - set("abcdefghijklmnopqrstuvwxyz0123456789._-")
    assert ".." not in full
    assert (Path("out") / full).resolve().parent == Path("out").resolve()


def test_a_link_in_the_output_folder_is_replaced_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "bundle.json").symlink_to(victim)
    write_json(tmp_path / "bundle.json", {"a": 1})
    assert victim.read_text() == "precious"
    assert not (tmp_path / "bundle.json").is_symlink()


def test_records_are_not_appended_through_a_link(tmp_path: Path) -> None:
    from test_compare_parts import outcome

    from mlflow_tula.comparing.records import RecordFile

    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "trainings.jsonl").symlink_to(victim)
    with pytest.raises(StoreError, match="cannot write"):
        RecordFile(tmp_path / "trainings.jsonl").append(outcome())
    assert victim.read_text() == "precious"


def test_a_checkpoint_is_not_written_through_a_link(tmp_path: Path) -> None:
    from mlflow_tula.training.checkpoint import load_checkpoint, save_checkpoint

    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / f".checkpoint.{os.getpid()}.tmp").symlink_to(victim)
    save_checkpoint(tmp_path, {"step": 3}, identity={"job": "x"})
    assert victim.read_text() == "precious"
    assert load_checkpoint(tmp_path, identity={"job": "x"}) == {"step": 3}


@pytest.mark.parametrize("name", ["../../precious", "/etc", "1/../../precious", "", 5, ".."])
def test_what_waits_sends_no_other_folder(name: object, store: Path, tmp_path: Path) -> None:
    """An output folder may come from elsewhere; `tula sync` sends what lies in it, and no more."""
    from mlflow import MlflowClient

    from mlflow_tula.outbox.calls import send_call

    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "key").write_text("precious")
    client = MlflowClient()
    run_id = client.create_run("0").info.run_id
    files = tmp_path / "outbox" / "files"
    operation = {"call": "log_artifacts", "run_id": run_id, "files": name}
    with pytest.raises(SchemaError, match="numbered folder"):
        send_call(client, operation, {}, files)
    (files / "17").mkdir(parents=True)
    (files / "17" / "figure.png").symlink_to(tmp_path / "precious" / "key")
    with pytest.raises(SchemaError, match="holds a link"):
        send_call(client, operation | {"files": "17"}, {}, files)
    assert client.list_artifacts(run_id) == []


# --- secrets


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://user:{SECRET}@db/x",
        f"cannot open 'https://me:{SECRET}@host:8080/api' (refused)",
        f"mssql+pyodbc://sa:p@{SECRET}/w@server:1433/mlflow",
        f"https://host/path?token={SECRET}&x=1",
        f"mysql://h/d?ssl_key=a&password={SECRET}",
        f"X-Amz-Signature={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f"{{'password': '{SECRET}'}}",
        f"https://user:two words {SECRET}@host/",
    ],
)
def test_one_helper_hides_secrets(text: str) -> None:
    assert SECRET not in masked(text)


@pytest.mark.parametrize("name", SECRET_VARIABLES)
def test_secrets_of_the_environment_are_hidden(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    assert masked(f"401 for {SECRET}") == "401 for ***"


@pytest.mark.parametrize(
    "text",
    ["models:/tula.a.b.c@champion of http://127.0.0.1:5000", "num_tokens=5", "basic training"],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


def verbs() -> list[list[str]]:
    """Every command that has a store, as words that reach it."""
    arguments = {"import": ["measured.csv"], "monitor": ["0" * 32]}
    needing = {"show", "compare", "promote", "rollback", "prune"}
    found = []
    for verb in COMMANDS:
        command = group.get_command(click.Context(group), verb)
        assert command is not None
        if isinstance(command, click.Group):
            for name, one in command.commands.items():
                if any("--tracking-uri" in param.opts for param in one.params):
                    found.append([verb, name, *(["vgg11/digits"] if name in needing else [])])
        elif any("--tracking-uri" in param.opts for param in command.params):
            found.append([verb, *arguments.get(verb, [])])
    return found


URIS = (
    f"http://user:{SECRET}@127.0.0.1:9",
    f"postgresql://user:{SECRET}@127.0.0.1:9/mlflow",
    f"mysql://user:{SECRET}@127.0.0.1:9/mlflow?password={SECRET}",
)


@pytest.mark.parametrize("words", verbs(), ids=" ".join)
def test_no_command_tells_the_secret_of_a_dead_store(
    words: list[str], clean_mlflow: Path, table, capfd, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", f"{SECRET}-env")
    table.to_frame().dropna(axis=1, how="all").to_csv("measured.csv", index=False)
    caplog.set_level("DEBUG", logger="mlflow_tula")
    for uri in URIS:
        for more in (["--tracking-uri", uri], ["--no-such-option", uri], [uri]):
            code = tula_cli([*words, *more])
            seen = capfd.readouterr()
            assert code != 0
            assert SECRET not in seen.out + seen.err + caplog.text
    left = [
        path for path in clean_mlflow.rglob("*") if path.is_file() and path.name != "measured.csv"
    ]
    assert [path for path in left if SECRET in path.read_text(errors="replace")] == []


@pytest.fixture
def server(store: Path, free_port: int) -> Iterator[str]:
    """A real MLflow server on the store, on the loopback."""
    import requests

    words = ["server", "--backend-store-uri", f"sqlite:///{store}", "--port", str(free_port)]
    words += ["--artifacts-destination", str(store.parent / "served"), "--workers", "1"]
    process = subprocess.Popen(
        [sys.executable, "-m", "mlflow", *words],
        cwd=store.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{free_port}"
    try:
        for _ in range(240):
            try:
                if requests.get(f"{address}/health", timeout=2).ok:
                    break
            except requests.RequestException:
                time.sleep(0.25)
        else:
            pytest.fail("the server does not answer")
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


@pytest.mark.slow
def test_the_secret_of_a_living_server_is_kept_nowhere(
    server: str, clean_mlflow: Path, table, capfd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither printed, nor in the database, nor in an artifact, nor in a file of the person's."""
    address = server.replace("http://", f"http://user:{SECRET}@")
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    table.to_frame().dropna(axis=1, how="all").to_csv("measured.csv", index=False)
    hardware = ["--hardware", "Tesla T4", "--dataset", "digits", "--dataset-size", "1437"]
    listed = [
        ["import", "measured.csv", *hardware],
        ["registry", "list"],
        ["registry", "list", "--json"],
        ["recommend", "--model", "vgg11", "--device", "cpu"],
        ["monitor", "0" * 32],
        ["doctor"],
        ["train", "--model", f"{ROOT / 'tests' / 'train_parts.py'}:linear_net", "--image-size", "8",
         "--dataset-size", "100", "--batch-size", "50", "--train-epochs", "1", "--device", "cpu"],
    ]  # fmt: skip
    for words in listed:
        tula_cli([*words, "--tracking-uri", address])
    seen = capfd.readouterr()
    assert "registered tula.vgg11.digits" in seen.out
    assert "test accuracy" in seen.out
    assert SECRET not in seen.out + seen.err
    kept = [path for path in clean_mlflow.rglob("*") if path.is_file()]
    assert any(path.name == "mlflow.db" for path in kept)
    assert [path for path in kept if SECRET.encode() in path.read_bytes()] == []


# --- served on the loopback


@pytest.mark.slow
def test_a_local_deployment_listens_on_the_loopback_alone(
    registered: str, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the environment is not activated: MLflow starts uvicorn by its name."""
    import psutil

    monkeypatch.setenv("PATH", os.defpath)

    program = (
        "import sys; from mlflow_tula.plugin.deployments import run_local; "
        "run_local('x', sys.argv[1], config={'port': sys.argv[2]})"
    )
    words = [sys.executable, "-c", program, f"models:/{registered}@champion", str(free_port)]
    process = subprocess.Popen(
        words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        addresses: set[str] = set()
        for _ in range(400):
            addresses = {
                one.laddr.ip
                for one in psutil.net_connections("tcp")
                if one.status == psutil.CONN_LISTEN and one.laddr.port == free_port
            }
            if addresses or process.poll() is not None:
                break
            time.sleep(0.25)
        assert addresses == {"127.0.0.1"}
    finally:
        os.killpg(process.pid, 15)
        process.wait(30)


# --- tools


def test_bandit_finds_nothing() -> None:
    pytest.importorskip("bandit", reason="bandit is in the dev extra")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bandit",
            "-q",
            "-c",
            "pyproject.toml",
            "-f",
            "json",
            "-r",
            "mlflow_tula",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = json.loads(done.stdout)["results"]
    assert [(one["filename"], one["line_number"], one["issue_text"]) for one in found] == []


def test_every_exclusion_of_bandit_has_its_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = text[text.index("[tool.bandit]") :].split("\n]\n")[0]
    lines = [line for line in block.splitlines() if line.strip().startswith('"B')]
    assert lines
    assert all(len(line.partition("#")[2]) > 20 for line in lines)
