from __future__ import annotations

import pytest
import torch

from mlflow_tula.launch.failures import RankFailure, is_out_of_memory, one_line, root_cause

OUT_OF_MEMORY = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 14.58 GiB",
    "HIP out of memory. Tried to allocate 512.00 MiB",
    "XPU out of memory. Tried to allocate 20.00 GiB",
    "MPS backend out of memory (MPS allocated: 17.99 GB, other allocations: 1.2 GB)",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "FIND was unable to find an engine to execute this computation",
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 400000000000 bytes. Error code 12 (Cannot allocate memory)",
    "[enforce fail at CPUAllocator.cpp:64] . DefaultCPUAllocator: can’t allocate memory",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 100 bytes.",
    "std::bad_alloc",
    "Unable to allocate 7.45 GiB for an array with shape (1000000000,) and data type float64",
    "[Errno 12] Cannot allocate memory",
    "torch.OutOfMemoryError: whatever it says",
    "CUDA driver error: out of memory",
    "CUDA runtime error (2) : out of memory at /pytorch/aten/src/THC/THCTensorMath.cu:35",
    "HIP error: out of memory",
    "hipErrorOutOfMemory",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "Native API returns: -5 (PI_ERROR_OUT_OF_RESOURCES) UR_RESULT_ERROR_OUT_OF_RESOURCES",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED",
    "DefaultCPUAllocator: can't allocate memory: you tried to allocate 7 bytes",
    "[enforce fail at alloc_cpu.cpp:83] data. DefaultCPUAllocator: not enough memory",
    "NCCL error: unhandled cuda error, Last error: Cuda failure 2 'out of memory'",
    "Caught MemoryError in DataLoader worker process 0: MemoryError",
    "unable to mmap 1024 bytes from file </x>: Cannot allocate memory (12)",
]
LOOK_ALIKES = [
    "CUDA error: an illegal memory access was encountered",
    "[Errno 28] No space left on device",
    "[Errno 24] Too many open files",
    "index 10 is out of bounds for dimension 0 with size 10",
    "Expected all tensors to be on the same device",
    "the model remembers nothing",
    "CUDA error: device-side assert triggered",
    "shared memory object not found",
    "CUDA error: misaligned address",
    "HIP error: invalid device function",
    "MPS backend does not support float64",
    "XPU is not available",
    "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED",
    "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED",
    "CUDA error: CUBLAS_STATUS_INVALID_VALUE",
    "Expected is_contiguous(memory_format) to be true",
    "pin_memory thread exited unexpectedly",
    "memory efficient attention: head dimension out of range",
    "index out of bounds",
    "cannot allocate a tensor of negative size",
    "[Errno 28] No space left on device: '/dev/shm/torch_1'",
    "unable to open shared memory object </torch_1> in read-write mode: Too many open files",
    "KeyError: 'out_of_memory_policy'",
    "the option --memory-limit must be a number of bytes",
    "",
]


@pytest.mark.parametrize("text", OUT_OF_MEMORY)
def test_out_of_memory_is_recognised_as_text_and_as_exception(text: str) -> None:
    assert is_out_of_memory(text)
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", LOOK_ALIKES)
def test_look_alikes_are_not_out_of_memory(text: str) -> None:
    assert not is_out_of_memory(text)
    assert not is_out_of_memory(RuntimeError(text))


def test_classes_and_causes_count() -> None:
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("no words"))
    wrapped = ValueError("the loader failed")
    wrapped.__cause__ = MemoryError()
    assert is_out_of_memory(wrapped)
    assert not is_out_of_memory(None)
    assert not is_out_of_memory(KeyError("memory"))


def test_a_real_refusal_of_the_cpu_allocator_is_recognised() -> None:
    with pytest.raises(RuntimeError, match="alloc") as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


def test_a_cycle_of_causes_ends() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert not is_out_of_memory(first)


def test_one_line_is_short_and_names_the_class() -> None:
    assert one_line(ValueError("first\nsecond")) == "ValueError: first"
    assert one_line(KeyError()) == "KeyError"
    assert len(one_line("x" * 1000)) == 300


def test_an_exit_code_tells_what_it_can() -> None:
    killed = RankFailure.from_exit(1, -9)
    assert (killed.status, killed.kind) == ("oom", "SIGKILL")
    assert killed.reason.startswith("rank 1: killed by SIGKILL, probably by the kernel")
    sure = RankFailure.from_exit(1, -9, for_memory=True)
    assert (sure.status, sure.message) == (
        "oom",
        "killed by SIGKILL by the kernel because memory ran out",
    )
    other = RankFailure.from_exit(1, -9, for_memory=False)
    assert (other.status, other.kind) == ("failed", "SIGKILL")
    assert "not for memory" in other.reason
    crashed = RankFailure.from_exit(0, -11)
    assert (crashed.status, crashed.kind) == ("failed", "SIGSEGV")
    ended = RankFailure.from_exit(None, 3, "KeyError: last words\nE1130 elastic failed\n\n")
    assert ended.reason == "ended with exit code 3: KeyError: last words"
    assert RankFailure.from_exit(None, 3, "all is well").reason == "ended with exit code 3"
    assert RankFailure.from_exit(0, -6, "what():  std::bad_alloc").status == "oom"
    assert RankFailure.from_exit(0, 1, "std::bad_alloc").status == "oom"
    assert RankFailure.from_exit(0, -77).kind == "signal 77"


def _failure(rank: int, message: str, *, time: float = 0.0, status: str = "failed") -> RankFailure:
    return RankFailure(rank=rank, status=status, kind="x", message=message, time=time)  # type: ignore[arg-type]


def test_the_root_cause_is_never_the_rank_that_lost_its_peer() -> None:
    lost = _failure(0, "RuntimeError: Connection closed by peer [127.0.0.1]", time=1.0)
    own = _failure(1, "ValueError: wrong", time=2.0)
    memory = _failure(2, "CUDA out of memory", time=3.0, status="oom")
    assert root_cause([lost, own]) is own
    assert root_cause([lost, own, memory]) is memory
    assert root_cause([_failure(1, "late", time=9.0), early := _failure(0, "early")]) is early
    with pytest.raises(ValueError, match="at least one"):
        root_cause([])


def test_a_failure_round_trips_through_json() -> None:
    failure = RankFailure.from_exception(1, MemoryError("x"), time=2.0)
    assert RankFailure.from_dict(failure.to_dict()) == failure
