"""`TulaCallback` for Hugging Face's Trainer.

    from mlflow_tula.integrations.transformers import TulaCallback

    trainer = Trainer(..., callbacks=[TulaCallback()])

Logs what `mlflow_tula.autolog()` logs, to the run of `report_to="mlflow"`, else to the active run,
else to one of its own. Evaluation is left out of the step times.
"""

from __future__ import annotations

from typing import Any

from mlflow_tula.integrations.callback_watch import CallbackWatch
from mlflow_tula.integrations.facts import ObserverSettings
from mlflow_tula.integrations.loop import describe_loader
from mlflow_tula.integrations.packages import require
from mlflow_tula.integrations.sessions import active_target

(_transformers,) = require(("transformers.trainer_callback",), extra="transformers")


class TulaCallback(_transformers.TrainerCallback):  # type: ignore[name-defined, misc]
    """Observes `Trainer.train`; the world's first process logs."""

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
        settings = ObserverSettings(
            every_n_steps=every_n_steps,
            gradient_every_n_steps=gradient_every_n_steps,
            log_noise_scale=log_noise_scale,
            model=model,
            dataset=dataset,
        )
        self._watch = CallbackWatch(settings, integration="tula.transformers")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin."""
        if state.is_world_process_zero:
            model, loader = kwargs.get("model"), kwargs.get("train_dataloader")
            known = {
                "model": None if model is None else type(model).__name__,
                "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else None,
                **describe_loader(loader),
            }
            self._watch.begin(active_target, known=lambda: known)

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation has begun."""
        self._watch.pause()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An evaluation has ended."""
        self._watch.pause()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End."""
        self._watch.end()
