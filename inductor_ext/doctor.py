"""``gradfuse doctor`` prints versions, the device, and what works on this machine. Each check tries the thing itself."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

import torch


def examine() -> int:
    """Print the results of the checks. Returns 0 if training works on this machine, otherwise 1."""
    for package in ("gradfuse", "torch", "triton", "sympy"):
        print(f"{package:<12} {_version(package)}")
    print(f"{'python':<12} {platform.python_version()}")
    print(f"{'device':<12} {_device()}")
    checks: list[tuple[str, Callable[[], str]]] = [
        ("torch is supported", _supported),
        ("backend registered", _registered),
        (
            "C++ compiler",
            lambda: shutil.which("g++") or shutil.which("clang++") or _fail("CPU kernels need g++ or clang++"),
        ),
        ("attention trains on CPU", lambda: _trains("cpu")),
        ("attention trains on CUDA", lambda: _trains("cuda") if torch.cuda.is_available() else _fail("no CUDA device")),
    ]
    outcomes = [_attempt(name, check) for name, check in checks]
    return 0 if all(outcomes[:2]) and any(outcomes[3:]) else 1


def _attempt(name: str, check: Callable[[], str]) -> bool:
    try:
        answer, ok = check(), True
    except Exception as error:
        lines = str(error).strip().splitlines()
        answer, ok = lines[0] if lines else type(error).__name__, False
    print(f"{'yes' if ok else 'no ':<4} {name:<26} {answer}")
    return ok


def _fail(why: str) -> str:
    raise RuntimeError(why)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _device() -> str:
    if not torch.cuda.is_available():
        return f"CPU, {torch.get_num_threads()} threads"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"


def _supported() -> str:
    try:
        from .torch_api.versions import NEWEST, OLDEST
    except ImportError as error:
        # The first line of the error says what is supported, and the others name what is missing.
        print(error)
        return _fail(f"torch {torch.__version__} lacks names that gradfuse needs")
    return f"{OLDEST} to {NEWEST}"


def _registered() -> str:
    if "gradfuse" not in torch.compiler.list_backends():
        return _fail("torch.compile does not list the backend 'gradfuse'")
    return 'torch.compile(model, backend="gradfuse")'


def _trains(device: str) -> str:
    """Compile one small attention with a learned bias, and compare its gradient with float64."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.manual_seed(0)
    bias = torch.randn(2, device=device, requires_grad=True)
    query = torch.randn(1, 2, 64, 16, device=device, requires_grad=True)

    def attention(query: torch.Tensor) -> torch.Tensor:
        return flex_attention(query, query, query, score_mod=lambda s, b, h, q, k: s * bias[h])

    out = torch.compile(attention, backend="gradfuse")(query)
    (got,) = torch.autograd.grad(out.sum(), bias)
    exact, scale = query.detach().double(), bias.detach().double().requires_grad_()
    scores = exact @ exact.mT / 4 * scale[:, None, None]
    (want,) = torch.autograd.grad((scores.softmax(-1) @ exact).sum(), scale)
    error = float((got.double() - want).norm() / want.norm())
    return (
        f"gradient of a learned bias within {error:.0e} of float64"
        if error < 1e-3
        else _fail(f"the gradient of a learned bias has a relative error of {error:.0e}")
    )
