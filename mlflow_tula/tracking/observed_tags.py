"""The tags by which a logged run says what ran on what, exactly enough to be fitted again.

    tula.workload_spec    the Workload as JSON; `dataset_size` may be null where nobody knew it
    tula.hardware_spec    the HardwareSpec as JSON

beside the short ones for searches (`model_tags`). `tula fit --runs` reads them back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from mlflow_tula.registry.model_files import model_tags
from mlflow_tula.specs import HardwareSpec, Workload

WORKLOAD_TAG = "tula.workload_spec"
HARDWARE_TAG = "tula.hardware_spec"
DOUBT_TAG = "tula.noise_scale_doubt"
"""Why a run's noise scale is a rough one; absent where it is not."""


def spec_tags(workload: Mapping[str, Any], hardware: HardwareSpec | None) -> dict[str, str]:
    """Search tags and both specifications.

    Args:
        workload: fields of a Workload; `dataset_size` may be None.
        hardware: None where it is of a kind that cannot be described.
    """
    known = Workload.from_dict({**workload, "dataset_size": workload.get("dataset_size") or 1})
    tags = {WORKLOAD_TAG: json.dumps(dict(workload), sort_keys=True)}
    if hardware is not None:
        tags |= model_tags(known, hardware)
        tags[HARDWARE_TAG] = json.dumps(hardware.to_dict(), sort_keys=True)
    else:
        tags["tula.workload"] = known.slug
    return tags
