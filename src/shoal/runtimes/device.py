"""What a device's own memory holds, where it has one.

Owns that one question. CUDA is asked through torch, and only where the runtime has loaded torch:
asking by other means would start a second CUDA context. On the CPU the memory is the host's, which
the process's resident set tells. The CUDA path is written with care and has not been run.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes of a device's own memory. All are 0 where that is the host's, or cannot be asked.

    held_bytes: what tensors of this process occupy. reserved_bytes: what the process keeps, free
    blocks for its next tensors included. free_bytes, total_bytes: of the device, whoever uses it.
    """

    held_bytes: int = 0
    reserved_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0


def device_memory(device: str) -> DeviceMemory:
    """The memory of `cpu` or `cuda:<n>` as it is now."""
    torch = sys.modules.get("torch")
    if torch is None or not device.startswith("cuda"):
        return DeviceMemory()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        held_bytes=torch.cuda.memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
        free_bytes=free_bytes,
        total_bytes=total_bytes,
    )
