"""Model and optimizer as a checkpoint holds them: whole, whoever holds which part of them.

Under FSDP every rank takes part in putting them together, and in taking its part of them; keys of
the optimizer's state are then parameter names, so that any number of ranks can go on from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from mlflow_tula.training.checkpoint import weights_digest
from mlflow_tula.training.peers import Peers
from mlflow_tula.training.recipe import Recipe


class States:
    """Reads and writes the state of one rank's model and recipe."""

    def __init__(self, model: nn.Module, recipe: Recipe, *, by_name: bool = False) -> None:
        """Take both; `by_name` for models that may be sharded, on any number of ranks."""
        self._model, self._recipe, self._by_name = model, recipe, by_name

    def whole(self) -> dict[str, Any]:
        """`model` and `recipe` for a checkpoint; every rank calls it, rank 0 has the answer."""
        recipe = self._recipe.state_dict()
        if not self._by_name:
            return {"model": self._model.state_dict(), "recipe": recipe}
        from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

        optimizer = self._recipe.optimizer
        recipe["optimizer"] = get_optimizer_state_dict(
            self._model, optimizer, options=self._options()
        )
        return {"model": self._weights(), "recipe": recipe}

    def load(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part of a checkpoint."""
        if not self._by_name:
            self._model.load_state_dict(state["model"])
            self._recipe.load_state_dict(state["recipe"])
            return
        from torch.distributed.checkpoint.state_dict import (
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        optimizer, options = self._recipe.optimizer, self._options()
        set_model_state_dict(self._model, dict(state["model"]), options=options)
        set_optimizer_state_dict(
            self._model, optimizer, dict(state["recipe"]["optimizer"]), options=options
        )
        own = optimizer.state_dict()
        self._recipe.load_state_dict({**state["recipe"], "optimizer": own})

    def digest(self, peers: Peers) -> str:
        """SHA-256 of the whole weights, the same on every rank."""
        if not self._by_name:
            return weights_digest(self._model.state_dict())
        weights = self._weights()
        digest = weights_digest(weights) if peers.rank == 0 else ""
        return str(peers.gather(digest)[0])

    def _weights(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        return dict(get_model_state_dict(self._model, options=self._options()))

    @staticmethod
    def _options() -> Any:
        from torch.distributed.checkpoint.state_dict import StateDictOptions

        return StateDictOptions(full_state_dict=True, cpu_offload=True)
