"""A GPU's compute capability, without starting CUDA where that can be done without.

The launcher selects a backend by the rule its ranks follow, and CUDA once started in it holds some
hundred MiB of a GPU for as long as the run lasts. NVML (package nvidia-ml-py) knows the GPUs too,
but numbers them in an order of its own; so its answer counts where all are alike, and CUDA is asked
where they differ or NVML does not answer.
"""

import importlib

import torch

Capability = tuple[int, int]


def compute_capability(device: torch.device) -> Capability | None:
    """(major, minor) of this GPU; None where torch sees none, as on a login node."""
    if not torch.cuda.is_available():
        return None
    if not torch.cuda.is_initialized():
        found = nvml_capabilities()
        if len(found) == 1:
            return found.pop()
    return torch.cuda.get_device_capability(device)


def nvml_capabilities() -> set[Capability]:
    """Of all GPUs of this machine; empty where NVML cannot tell."""
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return set()
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return set()
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
        return {tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)) for handle in handles}
    except nvml.NVMLError:
        return set()
    finally:
        nvml.nvmlShutdown()
