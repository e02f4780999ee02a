"""The command line: one line and exit code 2 for a wrong request, numbers for a right one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mlflow_tula.cli import run

TABLE = """\
local_batch_size,step_time_s,devices_per_node,peak_memory_bytes
8,0.40,1,1485000000
16,0.47,1,1491000000
32,0.62,1,1504000000
64,0.96,1,1592000000
256,3.00,1,2034000000
8,0.90,2,1800000000
64,1.90,2,1900000000
"""
HARDWARE = ["--hardware", "Tesla T4", "--device-memory", "16GiB", "--max-devices-per-node", "4"]


@pytest.fixture
def folder(store: Path) -> Path:
    """An empty working folder with a store of its own and a table to import."""
    (store.parent / "table.csv").write_text(TABLE)
    return store.parent


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    capsys.readouterr()
    code = run(list(words))
    out, err = capsys.readouterr()
    return code, out, err


def import_table(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    code, out, err = call(
        capsys, "import", "table.csv", "--dataset-size", "50000", *HARDWARE, "--json", *more
    )
    assert code == 0, err
    document: dict[str, object] = json.loads(out)
    return document


def test_import_then_recommend(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = import_table(capsys)
    ask = ["recommend", "--dataset", "imported", "--hardware", str(done["hardware_slug"])]
    code, out, err = call(capsys, *ask, "--json")
    assert code == 0, err
    choice = json.loads(out)
    product = choice["local_batch_size"] * choice["accumulation_steps"]
    assert choice["global_batch_size"] == product * choice["nodes"] * choice["devices_per_node"]
    code, out, err = call(capsys, *ask)
    assert code == 0, err
    assert out.startswith(f"choice: global batch size {choice['global_batch_size']} ")


def test_target_without_convergence_names_the_option(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = import_table(capsys)
    ask = ["recommend", "--dataset", "imported", "--hardware", str(done["hardware_slug"])]
    code, _, err = call(capsys, *ask, "--objective", "min_time_to_target")
    assert code == 2
    assert "--convergence FILE" in err
    (folder / "epochs.csv").write_text(
        "global_batch_size,epochs_to_target\n16,10\n64,11\n256,16\n1024,40\n"
    )
    import_table(capsys, "--convergence", "epochs.csv")
    code, out, err = call(capsys, *ask, "--objective", "min_time_to_target", "--json")
    assert code == 0, err
    assert json.loads(out)["curve"][0]["time_to_target_s"] > 0


def test_noise_of_the_profile_stands_in_for_convergence_data(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--convergence", "noise-scale"]
    code, _, err = call(capsys, "import", "table.csv", "--dataset-size", "50000", *HARDWARE, *words)
    assert code == 2
    assert "none of the" in err
    assert "noise scale" in err
    head, *rows = TABLE.strip().splitlines()
    lines = [f"{head},noise_scale", *(f"{row},{100 + n}" for n, row in enumerate(rows))]
    (folder / "table.csv").write_text("\n".join(lines) + "\n")
    done = import_table(capsys, *words)
    assert any("noise scale alone" in text for text in done["report"]["warnings"])  # type: ignore[index]
    ask = ["recommend", "--dataset", "imported", "--hardware", str(done["hardware_slug"])]
    plain = call(capsys, *ask, "--objective", "min_time", "--json")
    soonest = call(capsys, *ask, "--objective", "min_time_to_target", "--json")
    assert plain[0] == soonest[0] == 0, soonest[2]
    sizes = [json.loads(one[1])["global_batch_size"] for one in (plain, soonest)]
    assert sizes[1] < sizes[0]  # larger batches need more epochs
    assert "do not read them as seconds" in soonest[1]


def test_price_moves_the_choice(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = import_table(capsys)
    ask = ["recommend", "--dataset", "imported", "--hardware", str(done["hardware_slug"]), "--json"]
    _, out, _ = call(capsys, *ask, "--objective", "min_time")
    fastest = json.loads(out)
    _, out, _ = call(capsys, *ask, "--objective", "min_cost", "--price-per-device-hour", "2.5")
    cheapest = json.loads(out)
    assert cheapest["devices_per_node"] <= fastest["devices_per_node"]
    cost = {point["global_batch_size"]: point["cost_usd"] for point in cheapest["curve"]}
    assert min(cost.values()) > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["recomend"], "did you mean recommend"),
        (["recommend", "--epochs", "zero"], "for example 90, or none"),
        (["recommend", "--objective", "fast"], "unknown objective 'fast'"),
        (["recommend", "--objective", "min_cost"], "--price-per-device-hour"),
        (["recommend", "--deadline", "6h"], "give --epochs"),
        (["recommend", "--bundle", "absent.json"], "there is no absent.json"),
        (["recommend", "--nowhere", "1"], "nowhere"),
        (["recommend"], "nothing is registered for vgg11.digits"),
        (["recommend", "--hardware", "cray-1"], "nothing is registered"),
        (["main", "--model", "vgg12"], "did you mean vgg1"),
        (["main", "--dataset", "digit"], "did you mean digits"),
        (["main", "--batch-sizes", "8,x"], "whole number"),
        (["main", "--batch-sizes", "0"], "whole number"),
        (["main", "--batch-sizes", "100000"], "at most"),
        (["main", "--world-sizes", "4096"], "4096"),
        (["main", "--devices-per-node", "4096"], "4096"),
        (["main", "--objective", "min_time_to_target"], "needs convergence data"),
        (["main", "--convergence", "absent.csv"], "absent.csv"),
        (["main", "--dataset", "imagefolder", "--data-dir", "absent"], "absent"),
        (["main", "--precision", "fp8"], "fp8"),
        (["main", "--optimizer", "sgdd"], "sgd"),
        (["train", "--batch-size", "0"], "whole number"),
        (["train", "--batch-size", "100000"], "at most"),
        (["train", "--devices", "4096"], "4096"),
        (["train"], "nothing is registered for vgg11.digits"),
        (["fit", "--table", "absent.json"], "there is no absent.json"),
        (["fit"], "make it with `tula profile`"),
        (["register"], "make it with `tula fit`"),
        (["import", "absent.csv"], "absent.csv"),
    ],
)
def test_a_wrong_request_is_one_line_and_exit_2(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, out, err = call(capsys, *words)
    assert code == 2, err
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("Error: ")]) == 1
    assert "Traceback" not in err
    assert not out
    assert not list(folder.glob("tula_output/**/*.json"))


def test_indivisible_batch_names_the_nearest_sizes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "train", "--batch-size", "33", "--devices", "2")
    assert code == 2
    assert "32 and 34" in err or "at most 1" in err  # a machine of one core has one device


def test_old_file_store_names_the_way_out(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean_mlflow / "mlruns" / "0").mkdir(parents=True)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{clean_mlflow}/mlruns")
    code, _, err = call(capsys, "recommend")
    assert code == 2
    assert "mlflow migrate-filestore" in err


def test_unwritable_store_is_named(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (clean_mlflow / "file").write_text("in the way")
    (clean_mlflow / "table.csv").write_text(TABLE)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{clean_mlflow}/file/mlflow.db")
    code, _, err = call(capsys, "import", "table.csv")
    assert code == 2
    assert "cannot be written" in err


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("step_time_s", "-1", "step_time_s must be a finite number above 0"),
        ("step_time_s", "inf", "step_time_s must be"),
        ("local_batch_size", "8.5", "local_batch_size must be a whole number"),
        ("status", "maybe", "unknown status 'maybe'"),
        ("speed", "3", "column 'speed' is unknown"),
    ],
)
def test_import_names_the_bad_column(
    folder: Path, capsys: pytest.CaptureFixture[str], column: str, value: str, message: str
) -> None:
    row = {"local_batch_size": "8", "step_time_s": "0.4", column: value}
    (folder / "bad.csv").write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    code, _, err = call(capsys, "import", "bad.csv")
    assert code == 2
    assert message in err
    assert "bad.csv" in err


def test_a_newer_bundle_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = {"kind": "tula.predictor_bundle", "schema_version": 99}
    (folder / "new.json").write_text(json.dumps(document))
    code, _, err = call(capsys, "recommend", "--bundle", "new.json")
    assert code == 2
    assert "newer" in err


@pytest.mark.parametrize("command", ["main", "profile", "train", "compare", "diagnose"])
def test_a_folder_that_no_disk_takes_is_refused_before_anything_starts(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    code, out, err = call(capsys, command, "--output-dir", "x" * 1200)
    assert code == 2
    assert "File name too long; choose another --output-dir than xxx" in err
    assert len(err.splitlines()) == 1
    assert len(err) < 700
    assert out == ""
