"""`tula demo`: the recording that ships, the store of its own, and the pages it names."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlflow_tula.cli import run
from mlflow_tula.cli.demo import MARKER, check_folder, mark
from mlflow_tula.demo import MADE_BY, MARK, Recording, read_recording
from mlflow_tula.errors import InvalidInputError, SchemaError, StoreError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def recording() -> Recording:
    return read_recording()


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    capsys.readouterr()
    code = run(list(words))
    out, err = capsys.readouterr()
    return code, out, err


# ---- the recording


def test_the_recording_says_how_it_was_made(recording: Recording) -> None:
    assert (ROOT / MADE_BY.split()[-1]).is_file()
    assert re.fullmatch(r"tula (profile|main) --model \w+.*", recording.profile_command)
    assert recording.table.workload.model in recording.profile_command
    assert recording.table.hardware.host_name == ""
    assert len(recording.table.ok) >= 5


def test_trainings_of_the_recording_are_of_its_model(recording: Recording) -> None:
    if not recording.convergence:
        assert (recording.training_command, recording.target) == ("", "")
        return
    assert f"--model {recording.table.workload.model} " in recording.training_command
    reached = [row for row in recording.convergence if row.runs_reached]
    assert len(reached) >= 4
    assert all(row.runs_total >= row.runs_reached for row in recording.convergence)


def test_the_recording_round_trips(recording: Recording) -> None:
    text = json.dumps(recording.to_dict())
    assert Recording.from_dict(json.loads(text)) == recording


def test_a_newer_recording_is_refused(recording: Recording) -> None:
    with pytest.raises(SchemaError, match="newer than 1"):
        Recording.from_dict({**recording.to_dict(), "schema_version": 2})


@pytest.mark.parametrize("change", [{"table": None}, {"convergence": [{"runs": 1}]}])
def test_a_damaged_recording_is_refused(recording: Recording, change: dict[str, Any]) -> None:
    with pytest.raises(SchemaError, match=r"incomplete|JSON object"):
        Recording.from_dict({**recording.to_dict(), **change})


def test_an_incomplete_recording_is_refused(recording: Recording) -> None:
    document = recording.to_dict()
    del document["recorded_on"]
    with pytest.raises(SchemaError, match="recorded_on"):
        Recording.from_dict(document)


def test_no_machine_has_the_hardware_of_the_replay(recording: Recording) -> None:
    measured, replayed = recording.table.hardware, recording.replayed().hardware
    assert replayed.device_name == f"{measured.device_name} {MARK}"
    assert MARK not in measured.device_name, "the file says what was measured"
    assert replayed.fingerprint != measured.fingerprint
    assert replayed.slug != measured.slug
    assert dataclasses.replace(replayed, device_name=measured.device_name) == measured


# ---- the folder


def test_a_folder_of_something_else_is_left_alone(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (clean_mlflow / "thesis").mkdir()
    (clean_mlflow / "thesis" / "chapter.tex").write_text("text")
    code, out, err = call(capsys, "demo", "--output-dir", "thesis")
    assert (code, out) == (2, "")
    assert err.startswith("Error: the folder thesis is there, and holds no demo of tula's")
    assert err.count("\n") == 1
    assert [one.name for one in (clean_mlflow / "thesis").iterdir()] == ["chapter.tex"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(InvalidInputError, match="is a file, and a demo needs a folder"):
        check_folder(tmp_path / "file")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(StoreError, match="choose another --output-dir"):
        check_folder(tmp_path / "file" / "demo")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, where nobody can write")
def test_a_folder_where_nobody_can_write(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "demo", "--output-dir", "/proc/demo")
    assert (code, out) == (2, "")
    assert err.startswith("Error: cannot write below /proc")
    assert err.count("\n") == 1


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o000)
    with pytest.raises(StoreError, match="cannot read"):
        check_folder(tmp_path / "closed")


def test_an_empty_folder_and_a_demo_are_taken(tmp_path: Path) -> None:
    check_folder(tmp_path)
    mark(tmp_path)
    assert json.loads((tmp_path / MARKER).read_text())["kind"] == "tula.demo"
    check_folder(tmp_path)


@pytest.mark.parametrize("name", ["100%", "why?", "a#b"])
def test_a_path_that_no_address_can_hold(tmp_path: Path, name: str) -> None:
    with pytest.raises(InvalidInputError, match=r"the path of a store may have no [%?#], and"):
        check_folder(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_store_that_does_not_answer_leaves_no_folder(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    address = f"http://127.0.0.1:{free_port}"
    code, out, err = call(capsys, "demo", "--tracking-uri", address)
    assert (code, out) == (2, "")
    assert err.startswith(f"Error: the MLflow server {address} does not answer")
    assert err.count("\n") == 1
    assert not list(clean_mlflow.iterdir())


@pytest.mark.parametrize(
    "words",
    [("--live", "perhaps"), ("--tracking-uri", ""), ("--output-dir", " "), ("--modell", "vgg11")],
)
def test_bad_options_are_one_line(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    code, out, err = call(capsys, "demo", *words)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert not list(clean_mlflow.iterdir())


# ---- the replay


def test_the_demo_decides_registers_and_says_what_to_click(
    store: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    recording: Recording,
) -> None:
    import mlflow
    from mlflow import MlflowClient

    # what `mlflow run` leaves in the environment of a project's command
    mine = f"sqlite:///{store}"
    project_run = MlflowClient(mine, mine).create_run("0")
    monkeypatch.setenv("MLFLOW_RUN_ID", project_run.info.run_id)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_ID", "0")
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", mine)
    before = store.read_bytes()

    code, out, err = call(capsys, "demo")
    assert code == 0, err
    demo = store.parent / "tula-demo"
    assert f"mlflow ui --app-name tula --backend-store-uri sqlite:///{demo}/mlflow.db" in out
    assert "choice: global batch size" in out
    aim = "min_time_to_target" if recording.convergence else "knee"
    assert f", objective {aim}\n" in out
    assert "Traceback" not in err
    assert store.read_bytes() == before, "the person's own store is not touched"
    assert "MLFLOW_RUN_ID" not in os.environ

    uri = f"sqlite:///{demo}/mlflow.db"
    client = MlflowClient(uri, uri)
    runs = client.search_runs([client.get_experiment_by_name("tula-demo").experiment_id])
    (parent,) = [one for one in runs if one.data.tags.get("tula.command") == "demo"]
    assert parent.info.status == "FINISHED"
    assert f"/runs/{parent.info.run_id}" in out
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith("**Take global batch size")
    assert (" to the target, " in note.splitlines()[0]) == bool(recording.convergence)
    assert "a replay: measured on" in note
    assert "--hardware 2x-" in note, "the next question asks for the recorded machine"
    name = parent.data.tags["tula.registered_model"]
    assert str(client.get_model_version_by_alias(name, "champion").version) == "1"
    assert f"/#/models/{name}/versions/1" in out

    # once more: the same version, the same addresses
    mlflow.set_tracking_uri(None)
    code, again, err = call(capsys, "demo")
    assert code == 0, err
    assert "registered already: version 1 holds this very bundle" in again
    assert f"/runs/{parent.info.run_id}" in again
    assert len(client.search_model_versions(f"name = '{name}'")) == 1

    # and the command that it ends with
    (ask,) = [line for line in out.splitlines() if line.startswith("  tula recommend ")]
    code, answer, err = call(capsys, *shlex.split(ask)[1:], "--json")
    assert code == 0, err
    assert json.loads(answer)["hardware"] == name.split(".")[-1]


def test_another_store_takes_the_demo_where_that_is_asked_for(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow_tula.hardware import detect
    from mlflow_tula.registry import find

    words = ("--output-dir", "my demo", "--tracking-uri", f"sqlite:///{store}", "--json")
    code, out, err = call(capsys, "demo", *words)
    assert code == 0, err
    look = json.loads(out)["look"]
    assert str(store) in look["server"]
    assert str(store) in look["ask"]
    assert not (store.parent / "my demo" / "mlflow.db").exists()
    names = [one.name for one in find()]
    assert len(names) == 1
    assert detect().fingerprint[:8] not in names[0]


def test_a_taken_port_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow_tula.cli import look

    with socket.socket() as first:
        first.bind(("127.0.0.1", 0))
        taken = first.getsockname()[1]
        monkeypatch.setattr(look, "_PORTS", range(taken, taken + 3))
        assert look._free_port() in (taken + 1, taken + 2)


# ---- as people run it


def environment_of(folder: Path) -> dict[str, str]:
    """A person's environment, with a store of their own that must stay as it is."""
    known = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    return {
        **known,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{known['PATH']}",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/own.db",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def person(folder: Path, *words: str, where: Path | None = None) -> Any:
    """Run a command in a folder of a person."""
    return subprocess.run(
        words,
        cwd=where or folder,
        env=environment_of(folder),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.slow
def test_a_small_network_is_profiled_live(tmp_path: Path) -> None:
    done = person(tmp_path, "tula", "demo", "--live")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "registered tula.squeezenet1_1.digits." in done.stdout
    assert MARK not in done.stdout
    (ask,) = [one for one in done.stdout.splitlines() if one.startswith("  tula recommend ")]
    again = person(tmp_path, *shlex.split(ask))
    assert again.returncode == 0, again.stderr[-3000:]
    assert "choice: global batch size" in again.stdout
    assert not (tmp_path / "own.db").exists()


@pytest.mark.slow
def test_the_project_has_a_demo(tmp_path: Path) -> None:
    done = person(
        tmp_path,
        *("mlflow", "run", str(ROOT), "-e", "demo", "-P", f"output_dir={tmp_path}/shown"),
        where=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"sqlite:///{tmp_path}/shown/mlflow.db" in done.stdout
    from mlflow import MlflowClient

    own = f"sqlite:///{tmp_path}/own.db"
    client = MlflowClient(own, own)
    (project,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
    assert project.info.status == "FINISHED"
    assert not client.search_registered_models()


@pytest.mark.long
def test_what_the_demo_says_to_click_is_there(tmp_path: Path) -> None:
    pytest.importorskip("playwright", reason="needs playwright (the dev extra)")
    from browser_parts import WAIT_MS, browser, screenshots, serve
    from playwright.sync_api import expect, sync_playwright

    if browser() is None:
        pytest.skip("needs Chromium on the PATH")
    done = person(tmp_path, "tula", "demo", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    document = json.loads(done.stdout)
    look, size = document["look"], f"{document['global_batch_size']}"
    printed = look["run"].split("/#/")[0]
    with (
        serve(f"sqlite:///{tmp_path}/tula-demo/mlflow.db", tmp_path) as url,
        sync_playwright() as d,
    ):
        chromium = d.chromium.launch(executable_path=browser(), args=["--headless", "--no-sandbox"])
        page = chromium.new_context(viewport={"width": 1500, "height": 1300}).new_page()
        page.set_default_timeout(WAIT_MS)
        for name, sign in (
            ("run", page.get_by_text(f"Take global batch size {size}").first),
            ("figures", page.locator("img[src^='blob:']").first),
            ("version", page.get_by_text(f"Take global batch size {size}").first),
            ("tula", page.locator("#decision").get_by_text(size, exact=True).first),
        ):
            page.goto(look[name].replace(printed, url))
            expect(sign).to_be_visible(timeout=WAIT_MS)
            page.screenshot(path=screenshots() / f"demo_{name}.png")
        chromium.close()
