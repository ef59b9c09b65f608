"""Every test starts from a clean Dynamo; without a GPU, Triton kernels run in Triton's interpreter.

``pytest`` runs the quick suite: every feature and every layer, and of a test with many cases some of them, as its marker
``breadth(n)`` says (n cases, spread evenly; 0 for none). ``pytest -m full`` runs all the others. With ``--share 1/3`` both run
a third of their tests. With ``--seconds 600`` a test is skipped if ten minutes have passed when it would begin.
"""

import contextlib
import os
import time
from collections import defaultdict

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.torch_api.config import without_caches
from tests.support.offline import Builder

BEGIN = pytest.StashKey[float]()


def pytest_addoption(parser):
    parser.addoption("--share", help="I/N: of the tests that would run, run every N-th from the I-th on")
    parser.addoption("--seconds", type=float, default=float("inf"), help="skip the tests that would begin later than this")


def pytest_configure(config):
    config.stash[BEGIN] = time.monotonic()


def pytest_runtest_setup(item):
    if time.monotonic() - item.config.stash[BEGIN] > item.config.getoption("--seconds"):
        pytest.skip("the seconds are over")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    mark_breadth(items)
    if config.getoption("--share"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        quick = [item for item in items if not item.get_closest_marker("full")]
        others = set(items).difference(*(share_of(tests, config.getoption("--share")) for tests in (left_out, quick)))
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]
    if not torch.cuda.is_available():
        without = [item for item in items if "gpu" in item.keywords]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if "gpu" not in item.keywords]


def share_of(items, share):
    """The items of a share, which is written I/N: every N-th from the I-th on."""
    number, shares = map(int, share.split("/"))
    if not 1 <= number <= shares:
        raise pytest.UsageError(f"--share {share}: shares are numbered from 1 to {shares}")
    return items[number - 1 :: shares]


def mark_breadth(items):
    """Give the marker ``full`` to what the quick suite leaves out of each test. Slow tests are chosen by their own marker."""
    cases = defaultdict(list)
    for item in items:
        skipped = {"slow", "multi_gpu"} & set(item.keywords)
        if not skipped and item.get_closest_marker("breadth"):
            cases[item.nodeid.split("[")[0], "gpu" in item.keywords].append(item)
    for of_one_test in cases.values():
        (keep,) = of_one_test[0].get_closest_marker("breadth").args
        kept = {i * len(of_one_test) // keep for i in range(keep)}
        for i, item in enumerate(of_one_test):
            if i not in kept:
                item.add_marker(pytest.mark.full)


@pytest.fixture(autouse=True)
def new_memory_is_nan(request):
    """Before a GPU test, fill the memory that the allocator will hand out with NaN: what is read unwritten is seen."""
    if "gpu" in request.keywords:
        torch.cuda.empty_cache()
        small = [torch.full((2**18,), torch.nan, device="cuda") for _ in range(64)]
        large = [torch.full((2**26,), torch.nan, device="cuda") for _ in range(2)]
        del small, large


@pytest.fixture(autouse=True)
def no_caches(request):
    """Inductor's caches do not know which constants of gradfuse a test changes: they would return the code from before."""
    with contextlib.nullcontext() if "caches" in request.keywords else without_caches():
        yield


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def builder(tmp_path_factory):
    """Builds kernels for GPUs that are not here."""
    with Builder(tmp_path_factory.mktemp("kernels")) as running:
        yield running
