import pytest
import torch
from torch import nn

from mlflow_tula.errors import InvalidInputError, UnknownNameError
from mlflow_tula.specs import Workload
from mlflow_tula.workloads.describe import describe
from mlflow_tula.workloads.job import Job
from mlflow_tula.workloads.losses import build_loss, main_output, num_correct
from mlflow_tula.workloads.models import build_model, has_batch_norm, list_models, num_parameters
from mlflow_tula.workloads.optimizers import build_optimizer, list_optimizers
from mlflow_tula.workloads.resolve import call_with_known, resolve_callable

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, num_classes, image_size=8):
        super().__init__()
        self.head = nn.Linear(3 * image_size ** 2, num_classes)
    def forward(self, x):
        return {"logits": self.head(x.flatten(1)), "other": 1}

def no_module(num_classes): return 3
def fails(): raise RuntimeError("no weights\\nsecond line")
def stateful(num_classes, **rest):
    net = nn.Linear(4, num_classes)
    assert net.weight.sum().item() < 1e9
    return net
def sgd(parameters, lr): return torch.optim.SGD(parameters, lr=lr)
def squared(output, target): return output["logits"].square().mean()
constant = 3
"""


@pytest.fixture
def nets(tmp_path, monkeypatch) -> str:
    (tmp_path / "tula_test_nets.py").write_text(NETS)
    monkeypatch.chdir(tmp_path)
    return "tula_test_nets.py"


@pytest.mark.parametrize("name", list_models())
def test_every_torchvision_model_gets_a_head_of_the_datasets_size(name: str) -> None:
    model = build_model(Job(model=name, dataset="synthetic"), 7, device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    heads = [m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d))]
    width = getattr(heads[-1], "out_features", None) or heads[-1].out_channels
    assert width == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", list_models())
def test_every_torchvision_model_takes_its_image_size_in_training(name: str) -> None:
    job = Job(model=name, dataset="synthetic")
    size = job.resolved_image_size
    model = build_model(job, 7, device="meta").train()
    assert model(torch.empty(2, 3, size, size, device="meta")).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("alexnet", None),
        ("mobilenet_v3_small", None),
        ("resnet18", 8),
        ("vit_b_32", None),
        ("squeezenet1_1", None),
        ("googlenet", None),
        ("regnet_y_400mf", None),
    ],
)
def test_forward_and_backward_at_small_sizes(name: str, size: int | None) -> None:
    job = Job(model=name, dataset="synthetic", image_size=size)
    model = build_model(job, 5)
    side = job.resolved_image_size
    target = torch.tensor([0, 4])
    loss = build_loss(job)(model(torch.randn(2, 3, side, side)), target)
    loss.backward()
    assert loss.isfinite()
    assert all(p.grad is not None for p in model.parameters())


def test_vgg11_keeps_its_129_million_parameters_at_32_pixels() -> None:
    workload = describe(Job(model="vgg11", dataset="digits"))
    assert isinstance(workload, Workload)
    assert workload.num_parameters == 128_807_306
    assert (workload.dataset_size, workload.image_size, workload.num_classes) == (1438, 32, 10)
    assert not workload.batch_norm


def test_weights_come_from_the_seed_and_leave_the_callers_randomness_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    job = Job(model="squeezenet1_1")
    one, two = build_model(job, 3), build_model(job, 3)
    other = build_model(job.replace(seed=1), 3)
    assert torch.equal(torch.get_rng_state(), before)
    weights = [next(m.parameters()) for m in (one, two, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("name", "flag"), [("vgg11", False), ("vgg11_bn", True), ("swin_t", False)]
)
def test_batch_norm_is_seen(name: str, flag: bool) -> None:
    assert has_batch_norm(build_model(Job(model=name), 2, device="meta")) is flag


def test_unknown_model_suggests_the_nearest() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown model 'resnet5': did you mean resnet50"):
        build_model(Job(model="resnet5"), 10)


def test_own_model_from_module_and_file(nets: str) -> None:
    for path in ("tula_test_nets:Net", "tula_test_nets.py:Net"):
        model = build_model(Job(model=path), 6, image_size=4)
        assert main_output(model(torch.zeros(2, 3, 4, 4))).shape == (2, 6)
    assert num_parameters(model) == 6 * 48 + 6
    assert build_model(Job(model=f"{nets}:stateful"), 2, device="meta").weight.device.type == "meta"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_module", "must return a torch.nn.Module, not int"),
        ("fails", "RuntimeError: no weights$"),
        ("Nett", "did you mean"),
        ("constant", "must be a function or class, not int"),
    ],
)
def test_own_model_failures_are_one_line(nets: str, name: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        build_model(Job(model=f"{nets}:{name}"), 10, device="meta")


def test_resolving_what_is_not_there(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tula_broken.py").write_text("1 / 0")
    with pytest.raises(InvalidInputError, match="no module named 'tula_absent'"):
        resolve_callable("tula_absent:f")
    with pytest.raises(InvalidInputError, match=r"no file .*absent\.py"):
        resolve_callable("absent.py:f")
    with pytest.raises(InvalidInputError, match="ZeroDivisionError: division by zero"):
        resolve_callable("tula_broken.py:f")
    with pytest.raises(InvalidInputError, match=r"must have the form package\.module:function"):
        resolve_callable("plain")


def test_a_file_may_import_its_neighbours(tmp_path) -> None:
    (tmp_path / "tula_neighbour.py").write_text("size = 5")
    (tmp_path / "net.py").write_text("import tula_neighbour\ndef f(): return tula_neighbour.size")
    assert resolve_callable(f"{tmp_path}/net.py:f")() == 5
    assert resolve_callable(f"{tmp_path}/net.py:f") is resolve_callable(f"{tmp_path}/net.py:f")


def test_call_with_known_passes_what_is_taken() -> None:
    assert call_with_known(lambda a: a, a=1, b=2) == 1
    assert call_with_known(lambda x, b=0: (x, b), 9, x=1, b=2) == (9, 2)
    assert call_with_known(lambda **rest: rest, a=1, b=2) == {"a": 1, "b": 2}


@pytest.mark.parametrize("name", list_optimizers())
def test_every_optimizer_steps(name: str) -> None:
    model = nn.Linear(4, 3)
    job = Job(model="vgg11", optimizer=name, weight_decay=0.01)
    optimizer = build_optimizer(job, model.parameters())
    before = model.weight.detach().clone()
    build_loss(job)(model(torch.ones(2, 4)), torch.tensor([0, 1])).backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)
    assert optimizer.defaults["lr"] == job.resolved_learning_rate


def test_own_optimizer_and_loss(nets: str) -> None:
    job = Job(model=f"{nets}:Net", optimizer=f"{nets}:sgd", loss=f"{nets}:squared", learning_rate=2)
    model = build_model(job, 3, image_size=2)
    optimizer = build_optimizer(job, model.parameters())
    assert optimizer.defaults["lr"] == 2
    loss = build_loss(job)(model(torch.ones(2, 3, 2, 2)), torch.tensor([0, 1]))
    assert loss.ndim == 0


@pytest.mark.parametrize("loss", ["cross_entropy", "label_smoothing", "multi_margin", "mse"])
def test_losses_are_smaller_when_right(loss: str) -> None:
    criterion = build_loss(Job(model="vgg11", loss=loss))
    target = torch.tensor([0, 2])
    right = nn.functional.one_hot(target, 3).float()
    assert criterion(right, target) < criterion(1 - right, target)
    assert num_correct((right, "auxiliary"), target) == 2


def test_unknown_loss_and_optimizer_name_the_known() -> None:
    with pytest.raises(UnknownNameError, match="did you mean cross_entropy"):
        build_loss(Job(model="vgg11", loss="crossentropy"))
    with pytest.raises(UnknownNameError, match="did you mean adam or"):
        build_optimizer(Job(model="vgg11", optimizer="adamm"), [])
    with pytest.raises(InvalidInputError, match="must return logits"):
        main_output("text")
