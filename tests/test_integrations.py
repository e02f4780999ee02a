"""The callbacks in the real Lightning and the real Hugging Face Trainer, offline, on digits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
import torch
from loop_parts import digits, net
from mlflow import MlflowClient
from torch import nn
from torch.utils.data import DataLoader

import mlflow_tula as tula

pytestmark = pytest.mark.slow


def the_runs() -> list:
    client = MlflowClient()
    found = client.search_runs([one.experiment_id for one in client.search_experiments()])
    return sorted(found, key=lambda run: run.info.start_time)


@pytest.fixture
def lightning(store: Path):
    return pytest.importorskip("lightning.pytorch", reason="needs the extra lightning")


def lit(lightning, *, fail_at: int | None = None):
    class Digits(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = net()[:3], nn.Linear(512, 10)

        def training_step(self, batch, index):
            if index == fail_at:
                raise RuntimeError("the data ran out")
            images, labels = batch
            return nn.functional.cross_entropy(self.head(self.body(images)), labels)

        def validation_step(self, batch, index):
            torch.nn.functional.cross_entropy(self.head(self.body(batch[0])), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    return Digits()


def trainer_of(lightning, callbacks, **more):
    return lightning.Trainer(
        **{
            "max_epochs": 2,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "callbacks": callbacks,
            **more,
        }
    )


def loaders() -> tuple[DataLoader, DataLoader]:
    return DataLoader(digits(), batch_size=32, shuffle=True), DataLoader(digits(), batch_size=256)


def test_lightning_logs_to_the_active_run(lightning) -> None:
    from mlflow_tula.integrations.lightning import TulaCallback

    with mlflow.start_run():
        trainer = trainer_of(lightning, [TulaCallback(gradient_every_n_steps=10)])
        trainer.fit(lit(lightning), *loaders())
    (run,) = the_runs()
    assert run.data.metrics["local_batch_size"] == 32
    assert run.data.metrics["accumulation_steps"] == 1
    assert run.data.metrics["gradient_norm"] > 0
    assert 90 <= run.data.metrics["num_steps"] <= 110
    assert run.data.tags["tula.model"].startswith("Digits-")
    assert run.data.tags["tula.dataset"] == "TensorDataset-1797"
    assert run.data.tags["tula.optimizer"] == "adam"


def test_lightning_logs_to_its_own_logger(lightning, tmp_path: Path) -> None:
    from lightning.pytorch.loggers import MLFlowLogger

    from mlflow_tula.integrations.lightning import TulaCallback

    logger = MLFlowLogger("lit", tracking_uri=mlflow.get_tracking_uri())
    trainer = trainer_of(
        lightning, [TulaCallback()], logger=logger, accumulate_grad_batches=2, max_epochs=3
    )
    trainer.fit(lit(lightning), *loaders())
    (run,) = the_runs()
    assert run.info.run_id == logger.run_id
    assert (run.data.metrics["local_batch_size"], run.data.metrics["accumulation_steps"]) == (32, 2)


def test_lightning_makes_a_run_and_ends_it_as_the_training_ended(lightning) -> None:
    from mlflow_tula.integrations.lightning import TulaCallback

    with pytest.raises(RuntimeError, match="the data ran out"):
        trainer_of(lightning, [TulaCallback()]).fit(lit(lightning, fail_at=20), *loaders())
    (run,) = the_runs()
    assert run.info.status == "FAILED"
    assert run.data.tags["mlflow.autologging"] == "tula.lightning"


def test_lightning_callback_and_autolog_log_once(lightning) -> None:
    from mlflow_tula.integrations.lightning import TulaCallback

    tula.autolog(every_n_steps=1)
    try:
        with mlflow.start_run() as active:
            trainer_of(lightning, [TulaCallback(every_n_steps=20)], max_epochs=1).fit(
                lit(lightning), loaders()[0]
            )
    finally:
        tula.autolog(disable=True)
    points = MlflowClient().get_metric_history(active.info.run_id, "step/step_time_s")
    assert [one.step for one in points] == [20, 40]
    assert len(the_runs()) == 1


def test_autolog_alone_sees_lightning(lightning) -> None:
    tula.autolog()
    try:
        with mlflow.start_run():
            trainer_of(lightning, []).fit(lit(lightning), *loaders())
    finally:
        tula.autolog(disable=True)
    (run,) = the_runs()
    assert run.data.metrics["local_batch_size"] == 32
    assert run.data.metrics["num_steps"] > 80


@pytest.fixture
def hugging(store: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("accelerate", reason="needs the extra transformers")
    return pytest.importorskip("transformers", reason="needs the extra transformers")


def hugging_trainer(hugging, tmp_path: Path, callbacks, **more):
    class Rows(torch.utils.data.Dataset):
        """Rows of a digit as tokens: 64 numbers from 0 to 16."""

        def __len__(self) -> int:
            return 512

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            image, label = digits()[index]
            return {"input_ids": (image.flatten() * 16).long(), "labels": label}

    config = hugging.BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        num_labels=10,
    )
    settings = {"report_to": [], "num_train_epochs": 3, **more}
    arguments = hugging.TrainingArguments(
        output_dir=str(tmp_path / "out"),
        per_device_train_batch_size=16,
        save_strategy="no",
        eval_strategy="epoch",
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    return hugging.Trainer(
        model=hugging.BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
        callbacks=callbacks,
    )


def test_hugging_face_trainer(hugging, tmp_path: Path) -> None:
    from mlflow_tula.integrations.transformers import TulaCallback

    with mlflow.start_run():
        callback = TulaCallback(gradient_every_n_steps=10, model="tiny-bert")
        hugging_trainer(hugging, tmp_path, [callback], gradient_accumulation_steps=2).train()
    (run,) = the_runs()
    metrics, tags = run.data.metrics, run.data.tags
    assert (metrics["local_batch_size"], metrics["accumulation_steps"]) == (16, 2)
    assert 30 <= metrics["num_steps"] <= 48
    assert metrics["gradient_norm"] > 0
    assert tags["tula.model"] == "tiny-bert"
    assert tags["tula.dataset"] == "Rows-512-64"
    assert run.info.status == "FINISHED"


def test_hugging_face_and_its_own_mlflow_callback_share_a_run(hugging, tmp_path: Path) -> None:
    from mlflow_tula.integrations.transformers import TulaCallback

    hugging_trainer(hugging, tmp_path, [TulaCallback()], report_to=["mlflow"]).train()
    mlflow.end_run()
    (run,) = the_runs()
    assert run.data.metrics["local_batch_size"] == 16
    assert "train_loss" in run.data.metrics


def test_autolog_alone_sees_hugging_face(hugging, tmp_path: Path) -> None:
    tula.autolog()
    try:
        with mlflow.start_run():
            hugging_trainer(hugging, tmp_path, []).train()
    finally:
        tula.autolog(disable=True)
    (run,) = the_runs()
    assert run.data.metrics["local_batch_size"] == 16
    assert run.data.tags["tula.model"].startswith("BertForSequenceClassification-")


@pytest.mark.parametrize(
    ("module", "package", "extra"),
    [
        ("lightning", "lightning", "lightning"),
        ("transformers", "transformers", "transformers"),
    ],
)
def test_a_missing_package_is_one_line_with_the_command(
    module: str, package: str, extra: str
) -> None:
    code = (
        "import sys\n"
        f"for name in ('{package}', '{package}.pytorch', 'pytorch_lightning'):\n"
        "    sys.modules[name] = None\n"
        "try:\n"
        f"    import mlflow_tula.integrations.{module}\n"
        "except ImportError as error:\n"
        "    print('message:', error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"pip install 'mlflow-tula[{extra}]'" in done.stdout, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1
