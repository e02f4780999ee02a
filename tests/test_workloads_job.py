import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.workloads.describe import describe
from mlflow_tula.workloads.job import Job, fitting_image_size
from mlflow_tula.workloads.losses import list_losses
from mlflow_tula.workloads.optimizers import list_optimizers


@given(
    st.builds(
        Job,
        model=st.sampled_from(["vgg11", "ResNet18", "my.module:net"]),
        dataset=st.sampled_from(["digits", "cifar100", "my.module:data"]),
        image_size=st.none() | st.integers(1, 8192),
        precision=st.sampled_from(["fp32", "bf16", "fp16"]),
        learning_rate=st.none() | st.floats(1e-9, 10),
        momentum=st.floats(0, 0.99),
        augment=st.booleans(),
        seed=st.integers(0, 2**32 - 1),
    )
)
def test_a_job_survives_json(job: Job) -> None:
    assert Job.from_dict(job.to_dict()) == job


def test_job_needs_no_torch() -> None:
    code = (
        "import sys; from mlflow_tula.workloads.job import Job; Job(model='vgg11').workload_slug; "
        "print([m for m in ('torch', 'mlflow', 'pandas', 'scipy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("fields", "slug"),
    [
        ({}, "mobilenet_v3_small.digits"),
        ({"model": "ALEXNET"}, "alexnet.digits"),
        ({"image_size": 64}, "mobilenet_v3_small.digits-64px"),
        ({"image_size": 32}, "mobilenet_v3_small.digits"),
        ({"model": "alexnet", "image_size": 64}, "alexnet.digits"),
        ({"optimizer": "Adam", "precision": "bf16"}, "mobilenet_v3_small.digits-bf16-adam"),
        ({"momentum": 0.0, "loss": "mse"}, "mobilenet_v3_small.digits-no-momentum-mse"),
        ({"dataset_size": 500, "augment": True}, "mobilenet_v3_small.digits-n500-augment"),
        ({"num_workers": 2, "seed": 7, "learning_rate": 0.5}, "mobilenet_v3_small.digits"),
        (
            {"dataset": "synthetic", "channels": 1, "num_classes": 7, "dataset_size": 99},
            "mobilenet_v3_small.synthetic-1ch-7classes-n99",
        ),
    ],
)
def test_slug_is_known_without_torch_and_equals_the_described_one(fields, slug) -> None:
    job = Job(**{"model": "mobilenet_v3_small", **fields})
    assert job.workload_slug == slug
    assert describe(job).slug == slug


def test_own_code_and_folders_give_their_names() -> None:
    job = Job(
        model="pkg.nets:tiny", dataset="pkg.data:cats", loss="pkg.l:focal", optimizer="o:lars"
    )
    assert job.workload_slug == "pkg-nets-tiny.pkg-data-cats-o-lars-pkg-l-focal"
    folder = Job(model="vgg11", dataset="imagefolder", data_dir="/data/ImageNet/")
    assert folder.workload_slug == "vgg11.imagefolder-imagenet"


def test_data_dir_may_be_a_path() -> None:
    assert Job(model="vgg11", data_dir=Path("/data")).data_dir == "/data"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 0}, "image_size must be a whole number of at least 1, not 0"),
        ({"image_size": "big"}, "image_size must be a whole number"),
        ({"momentum": 1.5}, "momentum must be below 1"),
        ({"learning_rate": 0}, "learning_rate must be a finite number above 0"),
        ({"channels": 3}, "channels shapes the synthetic dataset only"),
        ({"num_classes": 3}, "num_classes is the digits dataset's own"),
        ({"seed": -1}, "seed must be a whole number of at least 0"),
        ({"model": "a:"}, "built-in name or package.module:function"),
        ({"model": ""}, "model must be a non-empty string"),
        ({"model": "os:system('x')"}, "built-in name or package.module:function"),
        ({"num_workers": -2}, "num_workers must be"),
    ],
)
def test_wrong_fields_are_refused(fields, message) -> None:
    with pytest.raises(InvalidInputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        Job(**{"model": "vgg11", **fields})


def test_wrong_precision_names_the_right_ones() -> None:
    with pytest.raises(UnknownNameError, match="did you mean"):
        Job(model="vgg11", precision="fp64")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "size", "fitted"),
    [
        ("alexnet", 32, 64),
        ("alexnet", 100, 100),
        ("vgg11", 8, 32),
        ("resnet18", 8, 8),
        ("vit_h_14", 32, 42),
        ("vit_b_32", 33, 64),
        ("maxvit_t", 32, 224),
        ("a.b:alexnet", 8, 8),
    ],
)
def test_images_are_enlarged_to_what_the_model_takes(model, size, fitted) -> None:
    assert fitting_image_size(model, size) == fitted


def test_enlarging_is_said() -> None:
    assert "enlarged to 64" in Job(model="alexnet").image_size_note
    assert Job(model="vgg11").image_size_note == ""


def test_every_optimizer_has_a_default_rate() -> None:
    from mlflow_tula.workloads.job import DEFAULT_LEARNING_RATES

    assert sorted(DEFAULT_LEARNING_RATES) == list_optimizers()
    assert "cross_entropy" in list_losses()
