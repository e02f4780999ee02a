"""`tula registry` and what is behind it: versions, promotion by hand, rollback, pruning."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from mlflow import MlflowClient

from mlflow_tula.cli import run
from mlflow_tula.errors import (
    InvalidInputError,
    NotRegisteredError,
    StoreError,
    WorkFailedError,
)
from mlflow_tula.hardware import detect
from mlflow_tula.registry import find, load, register, resolve, versions

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")

NAME = "vgg11/digits"


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = run(["registry", *words])
    out, err = capsys.readouterr()
    return code, out, err


def champion(name: str) -> int | None:
    return next((one.version for one in versions.list_versions(name) if one.champion), None)


def test_list_shows_champions(registered: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, "list")
    assert code == 0, err
    assert "vgg11.digits" in out
    assert registered.split(".", 3)[3] in out
    code, out, _ = call(capsys, "list", "--json")
    (one,) = json.loads(out)
    assert (one["name"], one["version"], one["alias"]) == (registered, 3, "champion")
    code, out, _ = call(capsys, "list", "--workload", "resnet18/digits", "--json")
    assert (code, json.loads(out)) == (0, [])


def test_an_empty_registry_says_how_to_begin(
    clean_mlflow: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "list")
    assert code == 0
    assert "tula main" in out
    code, _, err = call(capsys, "show", NAME)
    assert code == 2
    assert "nothing is registered yet" in err
    assert list(clean_mlflow.iterdir()) == []


def test_show_lists_versions_with_what_the_gate_said(
    registered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "show", NAME)
    assert code == 0, err
    assert out.startswith(registered)
    assert "version 3: promoted" in out
    assert "step time:" in out
    code, out, _ = call(capsys, "show", NAME, "--version", "2", "--json")
    document = json.loads(out)
    assert document["version"] == 2
    assert [one["gate"] for one in document["versions"]] == ["promoted", "kept", "promoted"]
    assert document["versions"][0]["aliases"] == ["champion"]
    code, _, err = call(capsys, "show", NAME, "--version", "9")
    assert code == 2
    assert "has no version 9; it has 1, 2, 3" in err


def test_compare_asks_every_version_for_all_rows(
    registered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = call(capsys, "compare", NAME)
    assert code == 0, err
    assert "unseen rows" in out
    code, out, _ = call(capsys, "compare", NAME, "--versions", "1,3", "--json")
    third, first = json.loads(out)
    assert (third["version"], first["version"]) == (3, 1)
    assert third["all_rows"]["rows"] == first["all_rows"]["rows"]
    assert third["unseen_rows"]["rows"] == first["unseen_rows"]["rows"]
    assert 0 <= third["all_rows"]["mape"] < 0.2
    assert third["all_rows"]["regret"] >= 0
    noisy = versions.compare(registered, [2, 3])[1]
    assert noisy.version.version == 2
    assert noisy.unseen_rows.mape > third["unseen_rows"]["mape"]


def test_promotion_passes_the_gate_or_is_forced(
    registered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "promote", NAME, "--version", "2")
    assert code == 1
    assert "not promoted" in err
    assert "--force overrules" in err
    assert champion(registered) == 3
    code, out, _ = call(capsys, "promote", NAME, "--version", "1")
    assert (code, champion(registered)) == (0, 1), out
    code, out, _ = call(capsys, "promote", NAME, "--version", "2", "--force", "--json")
    document = json.loads(out)
    assert (code, champion(registered), document["promoted"]) == (0, 2, True)
    assert document["reason"].startswith("promoted by hand: not promoted")
    version = MlflowClient().get_model_version(registered, "2")
    assert version.description.startswith("**Take global batch size ")
    assert "\n**Gate.** Promoted by hand: not promoted" in version.description
    assert version.description.count("**Gate.**") == 1
    assert "step time" in version.description
    assert load(registered) == load(registered, version=2)
    code, out, _ = call(capsys, "promote", NAME, "--version", "2")
    assert code == 0
    assert "is the champion already" in out


def test_rollback_goes_back_step_by_step(
    registered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "rollback", NAME)
    assert (code, champion(registered)) == (0, 1), out
    tags = MlflowClient().get_model_version(registered, "3").tags
    assert (tags["tula.gate"], tags["tula.gate_reason"]) == (
        "rolled_back",
        "rolled back to version 1",
    )
    code, _, err = call(capsys, "rollback", NAME)
    assert code == 2
    assert "first champion" in err
    versions.promote(registered, 3, force=True)
    versions.promote(registered, 2, force=True)
    assert versions.rollback(registered).version == 3
    assert versions.rollback(registered).version == 1


def test_a_new_champion_after_a_rollback_goes_back_to_the_one_before(
    registered: str, remeasured
) -> None:
    from dataclasses import replace

    from mlflow_tula.fit import fit

    versions.rollback(registered)
    again = replace(remeasured(seed=2, noise=0.005)[0], hardware=detect())
    assert register(fit(again), table=again).promoted
    assert champion(registered) == 4
    assert versions.rollback(registered).version == 1


def test_prune_keeps_the_newest_the_champion_and_the_one_before(
    registered: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "prune", NAME, "--keep", "1")
    assert code == 0
    assert "--delete true would delete versions 2" in out
    assert len(versions.list_versions(registered)) == 3
    code, out, _ = call(capsys, "prune", NAME, "--keep", "1", "--delete", "--json")
    assert json.loads(out) == {"name": registered, "deleted": True, "versions": [2]}
    assert [one.version for one in versions.list_versions(registered)] == [3, 1]
    assert versions.rollback(registered).version == 1


def test_no_champion(registered: str) -> None:
    versions.retire(registered)
    assert champion(registered) is None
    assert find()[0].alias is None
    with pytest.raises(NotRegisteredError, match=r"promote .* --version 3"):
        versions.rollback(registered)
    assert versions.promote(registered, 2).reason.startswith("promoted: the first version")


def test_an_alias_of_a_deleted_version_is_named_with_the_way_out(
    registered: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(store)) as database:
        database.execute("UPDATE registered_model_aliases SET version = 17")
        database.commit()
    with pytest.raises(StoreError, match=r"points to version 17, which was deleted: .*promote"):
        versions.list_versions(registered)
    for words in (["show", NAME], ["compare", NAME]):
        code, _, err = call(capsys, *words)
        assert code == 2
        assert "17" in err
        assert "Traceback" not in err
    with pytest.raises(StoreError, match="points to version 17"):
        resolve("vgg11.digits", detect())
    # The others must stay visible: a list shows it as one without a champion.
    code, out, _ = call(capsys, "list")
    assert code == 0
    assert "no champion" in out
    code, _, err = call(capsys, "promote", NAME, "--version", "3", "--force")
    assert code == 0, err
    assert champion(registered) == 3


@pytest.mark.parametrize("text", ["vgg11", "/digits", ""])
def test_a_name_that_is_none(text: str) -> None:
    with pytest.raises(InvalidInputError, match="model/dataset"):
        versions.registered_name(text)


def test_names(registered: str) -> None:
    assert versions.registered_name(NAME) == registered
    assert versions.registered_name(f"models:/{registered}@champion") == registered
    with pytest.raises(NotRegisteredError, match=rf"is not registered; there is {registered}"):
        versions.list_versions("tula.vgg11.digitz.nowhere")
    with pytest.raises(WorkFailedError, match="not promoted"):
        versions.promote(registered, 2)
    with pytest.raises(NotRegisteredError, match="has no version 9"):
        versions.promote(registered, 9)
