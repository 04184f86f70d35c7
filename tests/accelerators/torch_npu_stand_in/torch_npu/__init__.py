"""Plays torch_npu on a host without an NPU: the device type "npu" over host memory, without backward operators.

Put the folder above this one on `sys.path` before `lightning_hybridop` looks for `torch_npu`, in a process of its
own: torch cannot be told again that it has no such device. Tensors on "npu" are ordinary ones whose memory happens to
be the host's; every operator on them runs torch's CPU kernel, but what an Ascend 310 cannot do is refused.

HYBRIDOP_STAND_IN_NPUS says how many devices there are (default 1), HYBRIDOP_STAND_IN_NAME what they are called.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# They move or allocate values and compute nothing.
_COPIES = ("aten::_copy_from", "aten::_to_copy", "aten::copy_", "aten::clone", "aten::empty", "aten::detach")


class RefusedOperatorError(RuntimeError):
    """The stand-in was asked for what a forward-only NPU does not have."""


def device_count() -> int:
    return int(os.environ.get("HYBRIDOP_STAND_IN_NPUS", "1"))


def get_device_name(device: Any = None) -> str:
    return os.environ.get("HYBRIDOP_STAND_IN_NAME", "Ascend310B4")


class _Namespace:
    """The counterpart of `torch.cuda`; `calls` counts what was asked of it."""

    device_count = staticmethod(device_count)
    get_device_name = staticmethod(get_device_name)

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self._current = 0

    def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1

    def is_available(self) -> bool:
        return device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return self._current

    def set_device(self, device: Any) -> None:
        index = torch.device(device).index
        self._current = 0 if index is None else index

    def synchronize(self, device: Any = None) -> None:
        self._called("synchronize")

    def empty_cache(self) -> None:
        self._called("empty_cache")

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        return {"allocated_bytes.all.current": 4096}

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        return 3 * 2**30, 4 * 2**30

    def utilization(self, device: Any = None) -> int:
        return 37

    def get_device_properties(self, device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(name=get_device_name(), total_memory=4 * 2**30)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16]

    # One generator for host and device: what is drawn here is what a run on the CPU draws.

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


def npu_fusion_attention(*arguments: Any, **options: Any) -> Any:
    """Refuse: transformers imports it and calls it only where flash attention is asked for."""
    raise RefusedOperatorError("npu_fusion_attention is not part of the stand-in.")


npu = _Namespace()

_setup_privateuseone_for_python_backend("npu", backend_module=npu)


def _on_host(tensor: Tensor) -> Tensor:
    """Return a CPU tensor over the memory of an NPU tensor."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty(tensor.size(), dtype=tensor.dtype)  # an operator may give it a size
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), torch.device("cpu"), storage.nbytes()
    )
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(memory, tensor.storage_offset(), tensor.size(), tensor.stride())


def _laid_out(tensor: Tensor, storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Make an NPU tensor cover a part of `storage` as the CPU tensor `like` covers its own."""
    set_ = torch.ops.aten.set_.source_Storage_storage_offset
    laid: Tensor = set_.redispatch(_CPU, tensor, storage, like.storage_offset(), like.size(), like.stride())
    return laid


def _on_device(host: Tensor) -> Tensor:
    """Return an NPU tensor over the memory of a CPU tensor, which it keeps alive."""
    memory = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        memory.data_ptr(), torch.device("npu", 0), memory.nbytes()
    )
    storage.memory = memory  # lives as long as the storage does
    return _laid_out(torch._C._acc.create_empty_tensor([0], host.dtype), storage, host)


def _refuse(operator: Any, tensors: list[Tensor]) -> None:
    name = operator._schema.name
    if "backward" in name:
        raise RefusedOperatorError(f"{name} does not exist on this NPU: it is forward-only.")
    cast_on_device = name == "aten::_copy_from" and len({tensor.dtype for tensor in tensors}) == 2
    if name.startswith(_COPIES) and not cast_on_device:
        return
    if not cast_on_device and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RefusedOperatorError(f"{name} would be recorded by autograd on this NPU: it is forward-only.")
    for tensor in tensors:
        if tensor.dtype == torch.float64 or (
            tensor.dtype == torch.bfloat16 and get_device_name().startswith("Ascend310")
        ):
            raise RefusedOperatorError(f"{name} has no kernel for {tensor.dtype} on {get_device_name()}.")


def _run(operator: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Run an operator's CPU kernel on the memory of NPU tensors."""
    pairs: list[tuple[Tensor, Tensor]] = []

    def to_host(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        if not isinstance(value, Tensor) or value.device.type != "npu":
            return value
        host = _on_host(value)
        pairs.append((value, host))
        return host

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        for tensor, host in pairs:
            if value is host:
                if (tensor.size(), tensor.stride()) == (host.size(), host.stride()):
                    return tensor
                return _laid_out(tensor, _on_device(host).untyped_storage(), host)  # it was resized
        for tensor, _ in pairs:
            memory = tensor.untyped_storage()
            if memory.data_ptr() and memory.data_ptr() == value.untyped_storage().data_ptr():
                return _laid_out(torch._C._acc.create_empty_tensor([0], value.dtype), memory, value)
        return _on_device(value)

    host_arguments, host_options = tree_map(to_host, (arguments, options))
    _refuse(operator, [tensor for tensor, _ in pairs])
    name = operator._schema.name  # type: ignore[attr-defined]
    if name == "aten::_copy_from":
        source, destination = host_arguments[:2]
        destination.copy_(source)
        return arguments[1]
    if name == "aten::_fused_sdp_choice":
        return 0  # attention as sums and products: the fused kernels are the CPU's own
    return tree_map(to_device, operator(*host_arguments, **host_options))


_library = torch.library.Library("_", "IMPL")
_library.fallback(_run, "PrivateUse1")
