"""Digests of 64 bits by which ranks compare what they hold: of texts, code, files and tensors."""

import hashlib
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

SMALL_BYTES = 2**18
"""The size in bytes up to which every byte of a tensor goes through a checksum; larger tensors are summed up first."""
WORDS = 1024
"""The length of the rows, in words of eight bytes, over which a large tensor is summed."""
BLOCK_BYTES = 2**16
BLOCKS = 64
"""The number of blocks of a file that are read."""


def digest_of(*parts: object) -> int:
    """A digest of texts, bytes and numbers, as a number that an int64 tensor holds."""
    found = hashlib.blake2b(digest_size=8)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        found.update(len(data).to_bytes(8, "little"))
        found.update(data)
    return int.from_bytes(found.digest(), "big", signed=True)


def fingerprint(tensor: torch.Tensor, *, in_full: bool = False) -> int:
    """A digest of the shape, the dtype and all bytes of a tensor; on the meta device, of shape and dtype.

    Large tensors are summed over rows and over columns of words first, on their device: that takes as long as reading
    them, and changes with any one entry and with the order of entries.

    Args:
        in_full: every byte goes through a cryptographic hash, on the host.
    """
    kind = f"{tuple(tensor.shape)} {tensor.dtype}"
    if tensor.is_meta or not tensor.numel():
        return digest_of(kind)
    data = _bytes_of(tensor)
    if in_full:
        return digest_of(kind, hashlib.blake2b(_on_host(data)).digest())
    if data.numel() <= SMALL_BYTES:
        return digest_of(kind, zlib.crc32(_on_host(data)))
    end = data.numel() // (8 * WORDS) * (8 * WORDS)
    words = data[:end].view(torch.int64).view(-1, WORDS)
    if words.device.type == "cpu":
        table = words.numpy()
        sums = [table.sum(0).tobytes(), table.sum(1).tobytes()]
    else:
        sums = [_on_host(torch.cat([words.sum(0), words.sum(1)]).view(torch.uint8))]
    return digest_of(kind, *sums, _on_host(data[end:]))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, on its device, from an address that eight divides."""
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    return whole if whole.data_ptr() % 8 == 0 else whole.clone()


def _on_host(data: torch.Tensor) -> bytes:
    return data.cpu().numpy().tobytes()


def digest_of_file(path: Path, blocks: int = BLOCKS) -> int:
    """A digest of the size of a file and of blocks spread over it, two at least. Raises OSError when it cannot be
    read."""
    size = path.stat().st_size
    found = hashlib.blake2b(str(size).encode(), digest_size=8)
    with path.open("rb") as file:
        for number in range(blocks):
            file.seek(max(0, size - BLOCK_BYTES) * number // (blocks - 1))
            found.update(file.read(BLOCK_BYTES))
            if size <= BLOCK_BYTES:
                break
    return int.from_bytes(found.digest(), "big", signed=True)


def code_of(function: Callable[..., Any]) -> str:
    """A text that two functions share when they were compiled from the same source; the name of a callable that has no
    Python code."""
    inner = getattr(function, "__func__", function)
    inner = getattr(inner, "__wrapped__", inner)
    code = getattr(inner, "__code__", None)
    return _text_of_code(code) if code is not None else getattr(function, "__qualname__", type(function).__name__)


def _text_of_code(code: CodeType) -> str:
    constants = ",".join(_constant(constant) for constant in code.co_consts)
    names = ",".join((*code.co_names, *code.co_varnames))
    return f"{code.co_code.hex()}({constants})({names})"


def _constant(constant: object) -> str:
    if isinstance(constant, CodeType):
        return _text_of_code(constant)
    if isinstance(constant, frozenset):
        return _sorted(constant)  # whose order differs between processes
    return repr(constant)


def _sorted(items: Iterable[object]) -> str:
    return "{" + ",".join(sorted(map(repr, items))) + "}"
