"""Every public thread that is kept out has its tests, and each guard can be taken out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SCRIPTS = HERE.parent / "benchmarks" / "reliability"

THREADS = (
    "lightning 3259",
    "lightning 13696 13851 21903",
    "lightning 8028 20231 9625",
    "lightning 3103",
    "ultralytics pr25739",
    "ultralytics 1451",
    "ultralytics 4679 deepspeech 321",
    "accelerate 1934",
    "composer pr2117 3510",
    "composer 2214",
    "pytorch 7716 fastai 1352",
    "deeplearning4j 5461 pytorch 49207",
    "transformers 25956 pr43718",
    "euroeval 22 transformers pr33281",
    "mlx_benchmark pr21 nerfstudio 183 pytorch pr177765",
    "alpa 823 anemoi_core pr1254 mmsegmentation 132",
    "geti pr5958 ultralytics pr7659 speechbrain 784",
    "yolov5 5218 nemo 2988 pytorch 39022",
    "pytorch 35901 nemo_rl 2319",
    "ludwig pr2455 lightning 20614",
    "transformers pr29058",
    "gpt_neox pr739",
    "yolov5 pr6568 5316 catalyst 1023",
    "yolov5 9287",
    "mlflow 7387 mlflow_example 21",
    "mlflow 2735 3536 6811",
    "hydraflow 245",
    "skyrl 1516",
    "kedro_mlflow 69 441",
    "mlflow 23634",
    "mlflow 4061 12377",
)


def names() -> set[str]:
    """Every test function there is."""
    return {
        node.name
        for path in HERE.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@pytest.mark.parametrize("thread", THREADS)
def test_a_thread_has_its_test(thread: str) -> None:
    wanted = f"test_{thread.replace(' ', '_')}_"
    assert [name for name in names() if name.startswith(wanted)], f"no {wanted}..."


def test_every_thread_has_a_guard_that_can_be_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from guard_list import GUARDS

    told = " ".join(re.sub(r"\W+", "", one.thread).lower() for one in GUARDS)
    for thread in THREADS:
        number = re.findall(r"\d+", thread)[0] if "2117" not in thread else "2117"
        assert number in told, thread


def test_each_guard_stands_where_the_campaign_looks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where code was moved: benchmarks/reliability/guard_list.py is to follow."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from guards import missing

    assert missing(HERE.parent) == []
