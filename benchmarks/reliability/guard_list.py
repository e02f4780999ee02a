"""Where the code guards against each complaint, and what stands there without the guard."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Guard:
    """A thread, the places that guard against its fault, what stands there without, its test."""

    thread: str
    changes: tuple[tuple[str, str, str], ...]
    file: str
    select: str


def guard(thread: str, file: str, select: str, *changes: tuple[str, str, str]) -> Guard:
    """One line of the table."""
    return Guard(thread=thread, changes=changes, file=f"tests/test_{file}.py", select=select)


GUARDS = (
    guard(
        "Lightning 3259",
        "complaints_memory",
        "3259",
        (
            "mlflow_tula/probing/plan.py",
            "share = math.ceil(workload.dataset_size / (nodes * devices))",
            "share = 2**26",
        ),
        ("mlflow_tula/batches.py", "bound = math.ceil(dataset_size / world_size)", "bound = 2**26"),
    ),
    guard(
        "Lightning 13696, 13851, 21903",
        "complaints_timing",
        "13696",
        (
            "mlflow_tula/probing/probe.py",
            "while not self._take(self.steps.step())",
            "while not self._take(self._own[-1])",
        ),
    ),
    guard(
        "Lightning 8028, 20231, 9625",
        "complaints_memory",
        "8028",
        ("mlflow_tula/probing/probe.py", "    run.drop()\n    del steps\n", ""),
    ),
    guard(
        "Lightning 3103",
        "complaints_memory",
        "3103",
        (
            "mlflow_tula/probing/sweep.py",
            'if row.status == "oom" and self.request.walk_down',
            "if False",
        ),
    ),
    guard(
        "ultralytics PR 25739",
        "complaints_memory",
        "25739",
        (
            "mlflow_tula/probing/sweep.py",
            "if not self.table.ok:\n            raise self._nothing_measured()",
            "if False:\n            raise self._nothing_measured()",
        ),
    ),
    guard(
        "accelerate 1934",
        "complaints_memory",
        "1934",
        ("mlflow_tula/probing/sweep.py", "error.__cause__ = self._measurer.last_error", "pass"),
    ),
    guard(
        "ultralytics 1451",
        "complaints_memory",
        "1451",
        (
            "mlflow_tula/predictors/memory_formulas.py",
            "(batch > UNVERIFIED_LIMIT * largest, False",
            "(batch < 0, False",
        ),
    ),
    guard(
        "deeplearning4j 5461, pytorch 49207 (neighbour)",
        "complaints_memory",
        "5461",
        (
            "mlflow_tula/predictors/memory_formulas.py",
            "(beside_out, False",
            "(beside_out & False, False",
        ),
    ),
    guard(
        "deeplearning4j 5461, pytorch 49207 (measured)",
        "complaints_memory",
        "5461",
        (
            "mlflow_tula/predictors/memory_formulas.py",
            '(found == OOM, False, "ran out',
            '(found == "never", False, "ran out',
        ),
    ),
    guard(
        "yolov5 9287",
        "complaints_memory",
        "9287",
        (
            "mlflow_tula/predictors/memory.py",
            "identified = slope * (last - sizes[0]) > FLAT * peaks[-1]",
            "identified = True",
        ),
    ),
    guard(
        "ultralytics 4679, mozilla/DeepSpeech 321",
        "complaints_memory",
        "4679",
        (
            "mlflow_tula/probing/probe.py",
            "                    self.steps.evaluate()\n",
            "                    pass\n",
        ),
    ),
    guard(
        "yolov5 5218, NeMo 2988, pytorch 39022",
        "complaints_memory",
        "5218",
        (
            "mlflow_tula/predictors/memory_formulas.py",
            'copy, doubt = params["copy_bytes"], half * params["copy_sd_bytes"]',
            "copy, doubt = 0.0, 0.0",
        ),
    ),
    guard(
        "pytorch 35901, NeMo-RL 2319",
        "complaints_memory",
        "fragmented",
        (
            "mlflow_tula/probing/guards.py",
            "    return row.peak_memory_bytes\n",
            "    return row.allocated_memory_bytes\n",
        ),
    ),
    guard(
        "pytorch 35901, NeMo-RL 2319 (three numbers)",
        "complaints_memory",
        "three_numbers",
        (
            "mlflow_tula/probing/memory.py",
            "peak_bytes=torch.cuda.max_memory_reserved",
            "peak_bytes=torch.cuda.max_memory_allocated",
        ),
    ),
    guard(
        "ludwig PR 2455, Lightning 20614",
        "complaints_memory",
        "2455",
        (
            "mlflow_tula/probing/guards.py",
            '    if hardware.device_type != "cpu":',
            '    return 2**60\n    if hardware.device_type != "cpu":',
        ),
    ),
    guard(
        "ludwig PR 2455, Lightning 20614 (--max-batch-size)",
        "complaints_memory",
        "2455",
        (
            "mlflow_tula/probing/plan.py",
            "bound = share if max_batch_size is None else min(share, max_batch_size)",
            "bound = share",
        ),
    ),
    guard(
        "ludwig PR 2455, Lightning 20614 (loader workers)",
        "complaints_memory",
        "loader_workers",
        ("mlflow_tula/probing/memory.py", "        self._loaders = _own_pages_of_children()\n", ""),
    ),
    guard(
        "mlx-benchmark PR 21, nerfstudio 183, pytorch PR 177765",
        "complaints_timing",
        "mlx",
        (
            "mlflow_tula/probing/clock.py",
            "        self._wait()\n        return self._now()",
            "        return self._now()",
        ),
    ),
    guard(
        "mlx-benchmark PR 21, nerfstudio 183, pytorch PR 177765 (CUDA events)",
        "complaints_timing",
        "cuda_events",
        ("mlflow_tula/probing/clock.py", " / 1e3", ""),
    ),
    guard(
        "alpa 823, anemoi-core PR 1254, mmsegmentation 132",
        "complaints_timing",
        "alpa",
        (
            "mlflow_tula/probing/probe.py",
            "step_s=statistics.median(whole)",
            "step_s=statistics.fmean(whole)",
        ),
    ),
    guard(
        "composer 2214",
        "complaints_timing",
        "2214",
        ("mlflow_tula/probing/probe.py", "        dynamo.reset()\n", "        pass\n"),
    ),
    guard(
        "composer 2214 (reported)",
        "complaints_timing",
        "2214",
        (
            "mlflow_tula/probing/probe.py",
            '"compiled_graphs": _compiled_graphs() - compiled_before',
            '"compiled_graphs": 0',
        ),
    ),
    guard(
        "geti PR 5958, ultralytics PR 7659, speechbrain 784",
        "complaints_timing",
        "geti",
        (
            "mlflow_tula/probing/steps.py",
            "        start = time.perf_counter()\n        batch = next(self.batches)",
            "        batch = next(self.batches)\n        start = time.perf_counter()",
        ),
    ),
    guard(
        "gpt-neox PR 739",
        "complaints_timing",
        "pr739_units",
        (
            "mlflow_tula/table.py",
            "    probe_time_s: float | None = None\n",
            "    probe_time_s: float | None = None\n    latency_ms: float = 1.0\n",
        ),
    ),
    guard(
        "pytorch 7716, fastai 1352 (probes)",
        "complaints_batches",
        "a_probe_meets",
        ("mlflow_tula/probing/steps.py", "if len(cast(Sized, targets)) == self._size:", "if True:"),
    ),
    guard(
        "pytorch 7716, fastai 1352 (training)",
        "complaints_batches",
        "training_meets",
        (
            "mlflow_tula/training/worker.py",
            "smallest=2 if has_batch_norm(model) else 1",
            "smallest=1",
        ),
    ),
    guard(
        "pytorch 7716, fastai 1352 (said)",
        "complaints_batches",
        "it_is_said",
        (
            "mlflow_tula/recommend/cautions.py",
            "% chosen.global_batch_size == 1:",
            "% chosen.global_batch_size == -1:",
        ),
    ),
    guard(
        "transformers 25956, PR 43718",
        "complaints_batches",
        "25956",
        ("mlflow_tula/cli/train.py", "if saved is not None:", "if False:"),
    ),
    guard(
        "EuroEval 22, transformers PR 33281",
        "complaints_batches",
        "euroeval",
        (
            "mlflow_tula/recommend/curve.py",
            "(local // steps, steps)\n        for",
            "(local // steps, 1)\n        for",
        ),
    ),
    guard(
        "yolov5 PR 6568, 5316; catalyst 1023",
        "complaints_batches",
        "6568",
        ("mlflow_tula/batches.py", "    if size % world_size:", "    if False:"),
    ),
    guard(
        "transformers PR 29058",
        "complaints_batches",
        "unknown_strategy",
        (
            "mlflow_tula/workloads/job.py",
            "        check_strategy(self.strategy)\n",
            "",
        ),
    ),
    guard(
        "mlflow 2735, 3536, 6811 (parameters)",
        "complaints_mlflow",
        "2735 and not real",
        ("mlflow_tula/runs/run.py", 'PREFIX = "tula."', 'PREFIX = ""'),
    ),
    guard(
        "mlflow 2735, 3536, 6811 (experiment)",
        "complaints_mlflow",
        "2735 and not real",
        (
            "mlflow_tula/runs/opening.py",
            '    if os.environ.get("MLFLOW_RUN_ID"):\n',
            "    if False:\n",
        ),
    ),
    guard(
        "mlflow 7387, mlflow-example 21 and 2735, 3536, 6811 (mlflow run)",
        "complaints_mlflow",
        "2735 and real",
        ("MLproject", "databricks_spark_job: {}\n", ""),
    ),
    guard(
        "hydraflow 245",
        "complaints_mlflow",
        "hydraflow",
        (
            "mlflow_tula/stores/making.py",
            "        lock.acquire(timeout=_INITIALISE_TIMEOUT_S)\n",
            "        pass\n",
        ),
        (
            "mlflow_tula/stores/making.py",
            'SqlAlchemyStore(f"sqlite:///{scratch}"',
            'SqlAlchemyStore(f"sqlite:///{path}"',
        ),
    ),
    guard(
        "SkyRL 1516",
        "complaints_mlflow",
        "ends_the_run",
        (
            "mlflow_tula/runs/opening.py",
            "        signal.signal(getattr(signal, name), leave)\n",
            "        pass\n",
        ),
    ),
    guard(
        "SkyRL 1516 (nested runs)",
        "complaints_mlflow",
        "nested_runs",
        (
            "mlflow_tula/runs/opening.py",
            '                if status != "FINISHED":\n',
            "                if False:\n",
        ),
    ),
    guard(
        "kedro-mlflow 69, 441",
        "complaints_mlflow",
        "kedro",
        (
            "mlflow_tula/runs/run.py",
            "            if len(text) > MAX_PARAM:",
            "            if False:",
        ),
    ),
    guard(
        "mlflow 23634",
        "complaints_mlflow",
        "23634",
        (
            "mlflow_tula/stores/__init__.py",
            "    if setting is None or setting.get():\n",
            "    if True:\n",
        ),
    ),
    guard(
        "mlflow 4061, 12377",
        "complaints_mlflow",
        "4061",
        (
            "mlflow_tula/registry/pyfunc_model.py",
            'name = f"tula_formulas_{digest.hexdigest()[:16]}"',
            'name = "tula_formulas"',
        ),
    ),
    guard(
        "composer PR 2117, 3510",
        "profiler",
        "2117 and oom",
        (
            "mlflow_tula/launch/ranks.py",
            "        report_failure(error)\n        code = 1\n",
            "        time.sleep(3600)\n",
        ),
    ),
)
