"""`TulaCallback` for Lightning's Trainer, of `lightning.pytorch` and of `pytorch_lightning`.

    from mlflow_tula.integrations.lightning import TulaCallback

    trainer = Trainer(callbacks=[TulaCallback()], logger=MLFlowLogger(...))

Logs what `mlflow_tula.autolog()` logs, to the run of the trainer's MLFlowLogger, else to the active
run, else to one of its own. Validation is left out of the step times.
"""

from __future__ import annotations

from typing import Any

import torch

from mlflow_tula.integrations.callback_watch import CallbackWatch
from mlflow_tula.integrations.facts import ObserverSettings
from mlflow_tula.integrations.loop import describe_loader
from mlflow_tula.integrations.packages import require
from mlflow_tula.integrations.sessions import Target, active_target

# The same classes twice over where both are installed: the trainer of either takes the callback.
_bases = tuple(
    dict.fromkeys(
        module.Callback
        for module in require(
            ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks"), extra="lightning"
        )
    )
)
_PRECISIONS = {"bf16": "bf16", "16": "fp16", "32": "fp32", "64": "fp32"}


class TulaCallback(*_bases):  # type: ignore[misc]
    """Observes `Trainer.fit`; rank 0 logs."""

    def __init__(
        self,
        *,
        every_n_steps: int = 10,
        gradient_every_n_steps: int = 100,
        log_noise_scale: bool = True,
        model: str | None = None,
        dataset: str | None = None,
    ) -> None:
        """Take the settings of `mlflow_tula.autolog`."""
        super().__init__()
        settings = ObserverSettings(
            every_n_steps=every_n_steps,
            gradient_every_n_steps=gradient_every_n_steps,
            log_noise_scale=log_noise_scale,
            model=model,
            dataset=dataset,
        )
        self._watch = CallbackWatch(settings, integration="tula.lightning")

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin."""
        if trainer.is_global_zero:
            self._watch.begin(
                lambda: _target(trainer),
                known=lambda: _known(trainer, pl_module),
                nodes=trainer.num_nodes,
            )

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """The step's interval goes on, but not with training."""
        self._watch.pause()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """The same interval still."""
        self._watch.pause()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End, if the training was not stopped by Ctrl-C (which Lightning takes for an end)."""
        self._watch.end("KILLED" if trainer.interrupted else "FINISHED")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End with what was logged until then."""
        self._watch.end("KILLED" if isinstance(exception, KeyboardInterrupt) else "FAILED")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End in any case."""
        self._watch.end("FAILED")


def _target(trainer: Any) -> Target:
    """The run of the trainer's MLFlowLogger, in that logger's own store."""
    for logger in trainer.loggers:
        if type(logger).__name__ == "MLFlowLogger":
            return Target(run_id=logger.run_id, client=logger.experiment)
    return active_target()


def _known(trainer: Any, pl_module: torch.nn.Module) -> dict[str, Any]:
    """What the trainer says of model, data and precision."""
    loader = trainer.train_dataloader
    precision = str(trainer.precision).split("-")[0]
    return {
        "model": type(pl_module).__name__,
        "precision": _PRECISIONS.get(precision),
        "batch_norm": any("BatchNorm" in type(part).__name__ for part in pl_module.modules()),
        **describe_loader(loader),
    }
