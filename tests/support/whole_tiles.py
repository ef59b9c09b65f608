"""What makes Triton's interpreter slow, done for whole tiles at once.

The interpreter combines the elements of a reduction or of a scan one by one, and patches ``triton.language`` again whenever a
kernel calls a jitted function.
"""

import contextlib
import inspect
from unittest import mock

import numpy as np


@contextlib.contextmanager
def whole_tiles():
    """Inside the block reductions, scans and calls of jitted functions are fast."""
    from triton.runtime import interpreter

    with (
        mock.patch.object(interpreter.ReduceOps, "generic_reduce", _reduce),
        mock.patch.object(interpreter.ScanOps, "generic_scan", _scan),
        mock.patch.object(interpreter, "_patch_lang", _unless_patched(interpreter._patch_lang)),
    ):
        yield


def _combined(operation, left, right, dtypes):
    """The arrays that the function of a reduction or scan gives for two groups of arrays."""
    tensors = [operation.to_tensor(x, dtype) for group in (left, right) for x, dtype in zip(group, dtypes, strict=True)]
    result = operation.combine_fn.fn(*tensors)
    return [x.handle.data for x in (result if isinstance(result, tuple) else (result,))]


def _reduce(operation, inputs):
    """Combine neighbours along the axis until one is left. The length of a tile is a power of two."""
    tensors, axis = operation.unravel(inputs, operation.axis)
    dtypes, parts = [x.dtype for x in tensors], [x.handle.data for x in tensors]
    while (length := parts[0].shape[axis]) > 1:
        left, right = ([np.take(x, range(start, length, 2), axis) for x in parts] for start in (0, 1))
        parts = _combined(operation, left, right, dtypes)
    if operation.axis is None:
        parts = [x.reshape([1] * inputs[0].handle.data.ndim) if operation.keep_dims else x.item() for x in parts]
    elif not operation.keep_dims:
        parts = [x.squeeze(axis) for x in parts]
    return [operation.to_tensor(x, dtype) for x, dtype in zip(parts, dtypes, strict=True)]


def _scan(operation, inputs):
    """Combine every element with the one 1, 2, 4, ... places before it."""
    axis, dtypes, parts = operation.axis, [x.dtype for x in inputs], [x.handle.data for x in inputs]
    shape = parts[0].shape
    place = np.arange(shape[axis]).reshape([-1 if dim == axis % len(shape) else 1 for dim in range(len(shape))])
    distance = 1
    while distance < shape[axis]:
        before = [np.roll(x, distance, axis) for x in parts]
        combined = _combined(operation, before, parts, dtypes)
        parts = [np.where(place >= distance, new, old) for new, old in zip(combined, parts, strict=True)]
        distance *= 2
    return [operation.to_tensor(x, dtype) for x, dtype in zip(parts, dtypes, strict=True)]


def _unless_patched(patch_lang):
    """Patch the language for a kernel, and not again for the functions that it calls."""
    import triton.language as tl
    from triton.runtime import interpreter

    def patched(fn):
        languages = [x for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)]
        if languages and not any(tl.core.is_builtin(language.load) for language in languages):
            return interpreter._LangPatchScope()
        return patch_lang(fn)

    return patched
