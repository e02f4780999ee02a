from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from mlflow_tula import registry
from mlflow_tula.errors import InvalidInputError, NotRegisteredError, SchemaError, StoreError
from mlflow_tula.fit import fit
from mlflow_tula.registry import find, for_hardware, load, load_table, register, resolve
from mlflow_tula.stores import ensure_experiment

pytestmark = pytest.mark.filterwarnings("ignore::mlflow_tula.errors.TulaWarning")


def model_folder(registered) -> Path:
    client = MlflowClient()
    return Path(client.get_model_version_download_uri(registered.name, str(registered.version)))


def rewrite(registered, name, **changes):
    path = model_folder(registered) / "artifacts" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_what_is_registered_comes_back(store, table, bundle):
    registered = register(bundle, table=table)
    assert registered.name == table.workload.registered_name(table.hardware)
    assert (registered.version, registered.alias, registered.promoted) == (1, "champion", True)
    assert load(registered.name) == bundle
    assert load(registered.name, version=1) == bundle
    assert load_table(registered.name) == table
    assert resolve(table.workload, table.hardware) == registered
    assert resolve(table.workload.slug, table.hardware).version == 1
    assert registered.uri == f"models:/{registered.name}@champion"


def test_tags_carry_what_searches_need(store, table, bundle):
    registered = register(bundle, table=table)
    version = MlflowClient().get_model_version(registered.name, "1")
    wanted = {
        "tula.model": "vgg11",
        "tula.dataset": "digits",
        "tula.precision": "fp32",
        "tula.optimizer": "sgd",
        "tula.fingerprint": table.hardware.fingerprint,
        "tula.hardware": table.hardware.slug,
        "tula.device_name": table.hardware.device_name,
        "tula.table_digest": table.digest,
        "tula.schema_version": "1",
        "tula.gate": "promoted",
    }
    assert wanted.items() <= version.tags.items()
    if bundle.report.step_time_mape is not None:
        mape = float(version.tags["tula.step_time_mape"])
        assert mape == pytest.approx(bundle.report.step_time_mape, rel=1e-4)
    lines = version.description.splitlines()
    assert lines[0].startswith("**Take global batch size ")
    assert "objective `knee`" in lines[0]
    assert lines[2] == "**Gate.** Promoted: the first version, there was no champion."
    hits = MlflowClient().search_model_versions(
        f"tags.`tula.fingerprint` = '{table.hardware.fingerprint}'"
    )
    assert [hit.name for hit in hits] == [registered.name]


def test_versions_pass_the_gate_or_stay_behind(store, table, bundle, remeasured):
    first = register(bundle, table=table)
    noisy_table, noisy = remeasured(seed=3, noise=0.5)
    second = register(noisy, table=noisy_table)
    assert (second.version, second.promoted, second.alias) == (2, False, None)
    assert resolve(table.workload, table.hardware).version == 1
    assert (
        "\n**Gate.** Not promoted: "
        in MlflowClient().get_model_version(first.name, "2").description
    )
    good_table, good = remeasured(seed=1, noise=0.01)
    third = register(good, table=good_table)
    assert third.promoted, third.reason
    assert "version 1" in third.reason
    assert resolve(table.workload, table.hardware).version == 3
    assert load(first.name, version=1) == bundle


def test_nothing_registered_says_what_to_do(store, table, bundle):
    with pytest.raises(NotRegisteredError, match=r"profile it with `tula main"):
        resolve("vgg11.digits", table.hardware)
    register(bundle, table=table)
    other = replace(table.hardware, device_name="Tesla T4", device_type="cuda")
    with pytest.raises(NotRegisteredError, match=f"other hardware: {table.hardware.slug}"):
        resolve("vgg11.digits", other)
    with pytest.raises(NotRegisteredError, match=r"on this hardware there is vgg11\.digits"):
        resolve("resnet50.digits", table.hardware)
    with pytest.raises(NotRegisteredError, match=r"--dataset cifar10.*for others: tula\.vgg11"):
        resolve("resnet50.cifar10", other)


def test_an_empty_folder_stays_empty_when_asked(clean_mlflow, table):
    with pytest.raises(NotRegisteredError, match="nothing is registered for vgg11"):
        resolve(table.workload, table.hardware)
    assert find() == []
    assert list(clean_mlflow.iterdir()) == []


@pytest.mark.parametrize(
    "question", [{"alias": "challenger"}, {"version": 7}], ids=["alias", "version"]
)
def test_an_unknown_alias_or_version(question, store, table, bundle):
    name = register(bundle, table=table).name
    with pytest.raises(NotRegisteredError, match=r"has no (alias 'challenger'|version 7)"):
        load(name, **question)
    with pytest.raises(NotRegisteredError, match="has no"):
        load("tula.nothing.of.this-name")


def test_find_lists_champions_of_a_workload_or_of_a_hardware(store, table, bundle):
    register(bundle, table=table)
    other_table = replace(table, hardware=replace(table.hardware, device_name="Tesla T4"))
    register(fit(other_table), table=other_table)
    deep_table = replace(table, workload=replace(table.workload, model="resnet18"))
    register(fit(deep_table), table=deep_table)
    assert len(find()) == 3
    assert {one.device_name for one in find("vgg11.digits")} == {
        table.hardware.device_name,
        "Tesla T4",
    }
    assert [one.workload_slug for one in find("resnet18.digits", table.hardware)] == [
        "resnet18.digits"
    ]
    assert len(find(hardware=table.hardware.slug)) == 2
    assert find("nothing' OR '1' = '1") == []


def test_a_newer_schema_is_one_clear_message(store, table, bundle):
    registered = register(bundle, table=table)
    rewrite(registered, "bundle.json", schema_version=99)
    with pytest.raises(SchemaError, match=r"version 1: schema_version 99 .*pip install -U"):
        load(registered.name)
    again = register(bundle, table=table)
    assert not again.promoted
    assert "cannot be read" in again.reason


def test_a_champion_whose_files_are_gone_is_replaced(store, table, bundle):
    registered = register(bundle, table=table)
    (model_folder(registered) / "artifacts" / "bundle.json").unlink()
    with pytest.raises(StoreError, match=r"cannot read bundle\.json .*register it again"):
        load(registered.name)
    again = register(bundle, table=table)
    assert again.promoted
    assert load(registered.name) == bundle


def test_a_bundle_that_is_no_json(store, table, bundle):
    registered = register(bundle, table=table)
    (model_folder(registered) / "artifacts" / "bundle.json").write_text("[]")
    with pytest.raises(SchemaError, match="must be a JSON object"):
        load(registered.name)


def test_a_bundle_of_another_table_is_refused(store, bundle, remeasured):
    other_table, _ = remeasured(seed=1)
    with pytest.raises(InvalidInputError, match=r"was fitted to table .* not to this one"):
        register(bundle, table=other_table)
    with pytest.raises(InvalidInputError, match="not dict and ProfileTable"):
        register({}, table=other_table)
    assert find() == []


def test_a_name_that_no_database_can_hold(store, table):
    long = replace(table.workload, model="m" * 110, dataset="d" * 110)
    other = replace(table, workload=long)
    with pytest.raises(InvalidInputError, match="at most 250"):
        register(fit(other), table=other)


@pytest.mark.parametrize("step", ["create_model_version", "set_registered_model_alias"])
def test_readers_never_see_half_a_registration(step, store, table, bundle, monkeypatch):
    def fail(*args, **kwargs):
        raise MlflowException("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(MlflowClient, step, fail)
        with pytest.raises(StoreError, match=r"cannot register tula\.vgg11.*the disk is full"):
            register(bundle, table=table)
    with pytest.raises(NotRegisteredError, match=r"nothing is registered|has no alias"):
        resolve(table.workload, table.hardware)
    if step == "create_model_version":
        assert MlflowClient().search_registered_models() == []
    runs = mlflow.search_runs(experiment_names=["tula"])
    assert list(runs["status"]) == ["FAILED"]
    assert register(bundle, table=table).promoted


def test_a_model_that_exists_already_gets_a_version(store, table, bundle):
    name = table.workload.registered_name(table.hardware)
    MlflowClient().create_registered_model(name)
    assert register(bundle, table=table).version == 1


def test_the_model_is_logged_to_the_run_that_is_given_or_active(store, table, bundle, remeasured):
    client = MlflowClient()
    given = client.create_run(ensure_experiment("mine")).info.run_id
    second_table, second = remeasured(seed=1)
    third_table, third = remeasured(seed=2)
    assert register(bundle, table=table, run_id=given).run_id == given
    assert client.get_run(given).info.status == "RUNNING"
    with mlflow.start_run(experiment_id=ensure_experiment("mine")) as active:
        assert register(second, table=second_table).run_id == active.info.run_id
    own = register(third, table=third_table, experiment="theirs").run_id
    for run_id in (given, own):
        made = client.get_logged_model(client.get_run(run_id).outputs.model_outputs[0].model_id)
        assert made.experiment_id == client.get_run(run_id).info.experiment_id
        assert made.source_run_id == run_id
        assert made.status == "READY"
        assert str(store.parent / "mlartifacts") in made.artifact_location
    assert client.get_run(own).info.status == "FINISHED"
    assert len(mlflow.search_runs(experiment_names=["theirs"])) == 1


def test_an_empty_registered_model_is_not_found(store, table):
    MlflowClient().create_registered_model(
        "tula.ghost", tags={"tula.workload": table.workload.slug}
    )
    assert find(table.workload.slug) == []


@pytest.mark.slow
def test_more_models_than_a_page_are_all_found(store, table, bundle, monkeypatch):
    register(bundle, table=table)
    for number in range(105):
        MlflowClient().create_registered_model(f"tula.filler.{number}")
    assert [one.workload_slug for one in find()] == ["vgg11.digits"]


REGISTER = """
import json, sys, warnings
warnings.simplefilter("ignore")
from mlflow_tula.fit import fit
from mlflow_tula.registry import register
from mlflow_tula.table import ProfileTable
table = ProfileTable.from_dict(json.load(open(sys.argv[1])))
bundle = fit(table)
print("ready", flush=True)
sys.stdin.readline()
print(register(bundle, table=table).version)
"""


def register_at_once(folder: Path, tables) -> list[int]:
    """One process a table; all wait until every one is ready to register."""
    processes = []
    for number, one in enumerate(tables):
        path = folder / f"table-{number}.json"
        path.write_text(json.dumps(one.to_dict()))
        command = [sys.executable, "-c", REGISTER, str(path)]
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        )
    for process in processes:
        assert process.stdout.readline() == "ready\n", process.stderr.read()
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    outs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outs
    return sorted(int(out.split()[-1]) for out, _ in outs)


@pytest.mark.slow
def test_four_processes_register_the_same_model_at_once(store, table, remeasured):
    tables = [remeasured(seed=seed, noise=0.01)[0] for seed in range(4)]
    assert register_at_once(store.parent, tables) == [1, 2, 3, 4]
    champion = resolve(table.workload, table.hardware)
    assert champion.promoted
    found = MlflowClient().search_model_versions(f"name = '{champion.name}'")
    assert len({one.tags["tula.table_digest"] for one in found}) == 4
    assert all(load(champion.name, version=int(one.version)) for one in found)
    runs = mlflow.search_runs(experiment_names=["tula"])
    assert list(runs["status"]) == ["FINISHED"] * 4


@pytest.mark.slow
def test_two_processes_register_the_very_same_bundle_at_once(store, table):
    # Both look before either has written: two versions of equal content, or one; never an error.
    assert register_at_once(store.parent, [table, table]) in ([1, 1], [1, 2])
    assert resolve(table.workload, table.hardware).promoted


def test_the_registry_does_not_import_torch():
    code = "import sys, mlflow_tula.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_public_names():
    for name in registry.__all__:
        assert name == "CHAMPION" or getattr(registry, name).__doc__


def test_the_very_same_bundle_is_registered_once(store, table, bundle, remeasured):
    first = register(bundle, table=table)
    again = register(bundle, table=table)
    assert (again.version, again.added, again.promoted, again.alias) == (1, False, True, "champion")
    assert again.reason == "registered already: version 1 holds this very bundle"
    assert len(MlflowClient().search_model_versions(f"name = '{first.name}'")) == 1
    noisy_table, noisy = remeasured(seed=3, noise=0.5)
    assert register(noisy, table=noisy_table).added
    behind = register(noisy, table=noisy_table)
    assert (behind.version, behind.added, behind.promoted, behind.alias) == (2, False, False, None)
    assert "is no champion (not promoted" in behind.reason
    MlflowClient().delete_registered_model_alias(first.name, "champion")
    assert register(bundle, table=table).promoted
    assert resolve(table.workload, table.hardware).version == 1


def test_the_numbers_stand_on_the_logged_model_with_their_dataset(store, table, bundle, remeasured):
    client = MlflowClient()
    first = register(bundle, table=table)
    other_table, other = remeasured(seed=1, noise=0.01)
    second = register(other, table=other_table)
    for registered, own in ((first, table), (second, other_table)):
        made = client.get_run(registered.run_id)
        inputs = {one.tags[0].value: one.dataset for one in made.inputs.dataset_inputs}
        assert (inputs["profile"].name, inputs["profile"].digest) == (
            own.workload.slug,
            own.digest,
        )
        model = client.get_logged_model(made.outputs.model_outputs[0].model_id)
        linked = json.loads(model.tags["mlflow.modelVersions"])
        assert linked == [{"name": registered.name, "version": str(registered.version)}]
        metrics = {one.key: one for one in model.metrics}
        fitted = metrics["fit/step_time_mape"]
        assert (fitted.dataset_name, fitted.dataset_digest) == (own.workload.slug, own.digest)
        assert metrics["held_out/mape"].value < 0.2
        assert metrics["held_out/mape"].dataset_digest == inputs["gate"].digest
        assert {"held_out/coverage", "held_out/regret"} <= set(metrics)
        assert made.data.metrics["held_out/rows"] == metrics["held_out/rows"].value
    assert inputs["gate"].digest not in (table.digest, other_table.digest)


def test_a_champion_that_was_deleted_is_named_and_replaced(store, table, bundle, remeasured):
    import sqlite3
    from contextlib import closing

    registered = register(bundle, table=table)
    with closing(sqlite3.connect(store)) as database:
        database.execute("UPDATE registered_model_aliases SET version = 17")
        database.commit()
    with pytest.raises(StoreError, match=r"points to version 17, which was deleted: .*promote"):
        load(registered.name)
    other_table, other = remeasured(seed=1, noise=0.01)
    again = register(other, table=other_table)
    assert again.promoted
    assert again.reason.endswith("champion points to version 17, which was deleted")
    assert load(registered.name) == other


def test_hardware_is_known_by_slug_fingerprint_name_or_part(store, table, bundle):
    register(bundle, table=table)
    tesla = replace(table.hardware, device_name="Tesla T4", device_type="cuda")
    other = replace(table, hardware=tesla)
    name = register(fit(other), table=other).name
    for words in (tesla.slug, tesla.fingerprint, "Tesla T4", "tesla t4", "T4"):
        assert for_hardware("vgg11.digits", words).name == name
    with pytest.raises(
        NotRegisteredError, match=rf"'A100'; registered: .*{tesla.slug} \(Tesla T4\)"
    ):
        for_hardware("vgg11.digits", "A100")
    with pytest.raises(NotRegisteredError, match="registered: nothing for this workload"):
        for_hardware("resnet18.digits", "T4")
    double = replace(other, hardware=replace(tesla, devices_per_node=8))
    register(fit(double), table=double)
    with pytest.raises(InvalidInputError, match=r"could be any of .* name one by its slug"):
        for_hardware("vgg11.digits", "Tesla T4")
    assert for_hardware("vgg11.digits", tesla.slug).name == name
