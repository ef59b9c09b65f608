"""Prototype: a grouped matmul in Triton that gathers its rows on the way in, and weights and scatters them on the way out.

    TRITON_INTERPRET=1 python -m benchmarks.prototypes.grouped_gather --check   # small sizes against float64, without a GPU
    python -m benchmarks.prototypes.grouped_gather --check                      # the same on a GPU, in bf16
    python -m benchmarks.prototypes.grouped_gather --build                      # registers of every tile, without a GPU
    python -m benchmarks.prototypes.grouped_gather                              # writes results/grouped_gather.json

The question: where ``x[token]`` feeds a grouped matmul only, can that matmul gather its operand, and is it faster? The sizes
are those of benchmarks/moe_parts.py: 16384 tokens of width 2048, 64 experts of width 1024, 8 of them for a token, bf16. Gate
and up are one weight [64, 2048, 2048], and down is [64, 1024, 2048].

    program: for each of its tiles (rows of one expert) x (columns of that expert's weight):
        find the expert, by a comparison of the number of the tile with the numbers of tiles of all experts
        for each step along K: A by pointers to the rows of x (cp.async) or by TMA, B by TMA, multiply
        write the rows: as they are, or weighted to their slots (token * 8 + choice), or weighted and added in fp32 to tokens

Rows of A behind the last row of an expert are read (row 0 of x, or rows of the next expert) and not written.

What was predicted before the first run (H200; 664 TFLOP/s is what CUTLASS reaches in the layer, 4.3 TB/s the bandwidth):

* gate_up is 1.10 TFLOP, 1.656 ms at 664. It moves 537 MB of rows, as many of weights and as many of results: 1.61 GB or
  .375 ms. So the matmul is its bound, and the bytes of a gather on the way in cost no time. The gathered rows of one expert
  (8 MB) and its weight (8 MB) stay in 50 MB of L2 while all its tiles run, since 132 programs are about one expert at once.
* The L2 must deliver 13.3 GB to tiles of 128 x 256 (8.0 TB/s at 664), and 17.7 GB to tiles of 128 x 128 (10.7 TB/s).
  The programs of a cluster can share what they load, which Triton does not do. So 128 x 128 should be slower.
* An expert has about 2048 rows, so half of the experts need one more tile of rows than the other half: 3.1 % of the rows of
  tiles are empty with 128 rows, 6.3 % with 256. Without Triton it is the same.
* Triton's control, without a gather, should reach 600 TFLOP/s, and the gather should cost 0 to 5 % of it: it takes four
  instructions of a thread and a step, and more registers. That is 1.83 to 1.93 ms.
* For the gather to pay in the forward, gate_up must take less than 1.656 ms and the gather's time together. Against .244 ms
  (the permute by itself, but with its sort, which has to stay) that is 579 TFLOP/s. Against .170 ms (the gather in the order
  of the source, as the layer has it) it is 602.
* But the gradient of the weight reads the same rows along its K. Either the backward gathers them (.170 ms, and nothing is
  won but 537 MB of memory), or that matmul becomes ours too: the two are 2.20 TFLOP, 3.31 ms at 664, and must run at 618 to
  632.
* The .138 ms of the permute's backward are a sum of eight rows, which is bound by its bytes. Wherever the rows lie they must
  be read, so this stays.
* down is .55 TFLOP, .828 ms at 664. With rows written to slots, the plain sum takes .140 ms, where the weighted sum of
  gathered rows takes .170 to .211: down pays above 641 to 612 TFLOP/s. Sums in fp32 need zeros (.031 ms) and a cast (.047),
  so they pay above 598 to 572, if 67 million additions of four values are free. They are not: 134 MB do not fit into L2, so
  up to 2.1 GB are read and written (.50 ms) at the ends of tiles, where a kernel that is not flat multiplies nothing. They
  are in no fixed order, either.

So the expectation is a loss or a draw: the gathered matmul must be within 9 % of CUTLASS for the forward alone, and within
5 % together with the gradient of the weight.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..moe_parts import EXPERTS, HIDDEN, ROWS, TOKENS, TOP, WIDTH
from ..runner import RESULTS, environment, kernels, relative_error


@dataclass(frozen=True)
class Tile:
    """Rows, columns and step of a tile, and how it runs. ``flat``: the next tile's loads begin before this is written."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    per_sm: int = 1
    flat: bool = False


TILES = (
    Tile(128, 256, 64, 8, 3),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 256, 64, 8, 4, flat=True),
    Tile(256, 128, 64, 8, 4),
    Tile(128, 128, 64, 8, 3, per_sm=2),
    Tile(128, 128, 64, 4, 3, per_sm=2),
)
#: Written in fp32, a flat tile needs 320 KB of shared memory, and 128 x 128 in eight warps too many registers for two.
TILES_TO_TOKENS = tuple(tile for tile in TILES if not tile.flat and (tile.warps, tile.per_sm) != (8, 2))
CHECKED = Tile(16, 32, 32, 4, 2), Tile(32, 64, 32, 4, 3), Tile(64, 64, 64, 4, 3, flat=True)
#: Form -> whether A is gathered, where the rows go, and K of the full size.
FORMS = {
    "gate_up": (False, "rows", WIDTH),
    "gate_up, gathered": (True, "rows", WIDTH),
    "down": (False, "rows", HIDDEN),
    "down to slots": (False, "slots", HIDDEN),
    "down to tokens": (False, "tokens", HIDDEN),
}
ROUNDS = 3


def tiles(form: str) -> tuple[Tile, ...]:
    return TILES_TO_TOKENS if form == "down to tokens" else TILES


@triton.jit
def _grouped(
    A, B, OUT, ENDS, SLOT, WEIGHT,
    K: tl.constexpr, N: tl.constexpr, EXPERTS: tl.constexpr, TOP: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BAND: tl.constexpr,
    GATHER: tl.constexpr, WAY_OUT: tl.constexpr, FLAT: tl.constexpr,
):  # fmt: skip
    """A is [tokens, K] if it is gathered, else a descriptor of [rows, K]; B is a descriptor of [EXPERTS * K, N]."""
    COLUMNS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(ENDS + experts)
    begins = tl.load(ENDS + experts - 1, mask=experts > 0, other=0)
    tiles = (ends - begins + BLOCK_M - 1) // BLOCK_M
    tiles_until = tl.cumsum(tiles, 0)
    for number in tl.range(tl.program_id(0), tl.sum(tiles, 0) * COLUMNS, tl.num_programs(0), flatten=FLAT):
        expert = tl.sum((tiles_until * COLUMNS <= number).to(tl.int32), 0)
        here = experts == expert
        begin = tl.sum(tl.where(here, begins, 0), 0)
        end = tl.sum(tl.where(here, ends, 0), 0)
        # The tiles of an expert, in bands of BAND tiles of rows, column by column.
        place = number - tl.sum(tl.where(here, tiles_until - tiles, 0), 0) * COLUMNS
        band = place // (BAND * COLUMNS)
        place -= band * (BAND * COLUMNS)
        height = tl.minimum((end - begin + BLOCK_M - 1) // BLOCK_M - band * BAND, BAND)
        first_row = begin + (band * BAND + place % height) * BLOCK_M
        first_column = place // height * BLOCK_N
        row = first_row + tl.arange(0, BLOCK_M)
        inside = row < end
        if GATHER:
            token = tl.load(SLOT + row, mask=inside, other=0) // TOP
            row_of_x = A + token.to(tl.int64)[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(0, K, BLOCK_K):
            left = tl.load(row_of_x + k) if GATHER else A.load([first_row, k])
            total = tl.dot(left, B.load([expert * K + k, first_column]), total)
        if WAY_OUT == "rows":
            row_out = row
        else:
            slot = tl.load(SLOT + row, mask=inside, other=0)
            total *= tl.load(WEIGHT + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
            row_out = slot // TOP if WAY_OUT == "tokens" else slot
        column = first_column + tl.arange(0, BLOCK_N)
        target = OUT + row_out.to(tl.int64)[:, None] * N + column[None, :]
        mask = inside[:, None]
        if N % BLOCK_N != 0:
            mask = mask & (column < N)[None, :]
        if WAY_OUT == "tokens":
            tl.atomic_add(target, total, mask=mask, sem="relaxed")
        else:
            tl.store(target, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _permute(X, OUT, PLACE, H: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """A row of X to the rows of its token: the gather in the order of its source."""
    token, column = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(X + token.to(tl.int64) * H + column, mask=column < H)
    for j in tl.static_range(TOP):
        row = tl.load(PLACE + token * TOP + j).to(tl.int64)
        tl.store(OUT + row * H + column, x, mask=column < H)


@triton.jit
def _combine(Y, OUT, PLACE, WEIGHT, H: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr, SLOTS: tl.constexpr):
    """The sum of a token's rows of Y, which are weighted and in the order of slots, or neither."""
    token, column = tl.program_id(0), tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP):
        slot = token * TOP + j
        row = slot if SLOTS else tl.load(PLACE + slot)
        y = tl.load(Y + row.to(tl.int64) * H + column, mask=column < H, other=0.0).to(tl.float32)
        total += y if SLOTS else y * tl.load(WEIGHT + slot).to(tl.float32)
    tl.store(OUT + token.to(tl.int64) * H + column, total.to(OUT.dtype.element_ty), mask=column < H)


@dataclass
class Routing:
    """Where rows come from: the rows are sorted by expert, and a slot is token * top + choice."""

    top: int
    #: Of each expert, where its rows end, int32.
    ends: Tensor
    #: Of each row its slot, and of each slot its row, int32.
    slot: Tensor
    place: Tensor
    #: Of each slot its weight.
    weight: Tensor

    @property
    def token(self) -> Tensor:
        return self.slot // self.top

    @staticmethod
    def random(tokens: int, experts: int, top: int, dtype: torch.dtype, device: str, empty: tuple[int, ...] = ()) -> Routing:
        """Each token goes to ``top`` experts, and none to those of ``empty``."""
        scores = torch.rand(tokens, experts, device=device)
        scores[:, list(empty)] = -1
        weight, chosen = scores.topk(top, -1)
        chosen = chosen.view(-1)
        slot = chosen.argsort(stable=True).int()
        place = torch.empty_like(slot)
        place[slot.long()] = torch.arange(len(slot), device=device, dtype=torch.int32)
        ends = chosen.bincount(minlength=experts).cumsum(0).int()
        return Routing(top, ends, slot, place, weight.softmax(-1).view(-1).to(dtype))


def bind(
    form: str, tile: Tile, left: Tensor, weights: Tensor, routing: Routing, out: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the kernel: left is [tokens or rows, K], weights [experts, K, N], and out what the form writes."""
    gather, way_out, _ = FORMS[form]
    experts, k, n = weights.shape
    if k % tile.k:
        raise ValueError(f"K is {k}, and must be a multiple of the step of the tile, {tile.k}.")
    a = left if gather else TensorDescriptor.from_tensor(left, [tile.m, tile.k])
    b = TensorDescriptor.from_tensor(weights.view(experts * k, n), [tile.k, tile.n])
    slot = routing.slot if gather or way_out != "rows" else None
    weight = routing.weight if way_out != "rows" else None
    sizes = {"K": k, "N": n, "EXPERTS": experts, "TOP": routing.top, "BAND": 8, "FLAT": tile.flat}
    sizes |= {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BLOCK_K": tile.k, "GATHER": gather, "WAY_OUT": way_out}
    return (a, b, out, routing.ends, slot, weight), sizes | {"num_warps": tile.warps, "num_stages": tile.stages}


def empty_result(form: str, left: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """Rows or slots in the dtype of the operands, or zeros of the tokens in fp32."""
    if FORMS[form][1] == "tokens":
        shape = len(routing.slot) // routing.top, weights.shape[-1]
        return torch.zeros(shape, dtype=torch.float32, device=left.device)
    return left.new_empty(len(routing.slot), weights.shape[-1])


def grouped(form: str, tile: Tile, left: Tensor, weights: Tensor, routing: Routing, programs: int) -> Tensor:
    out = empty_result(form, left, weights, routing)
    arguments, sizes = bind(form, tile, left, weights, routing, out)
    _grouped[(programs * tile.per_sm,)](*arguments, **sizes)
    return out


def permute(x: Tensor, routing: Routing) -> Tensor:
    out = x.new_empty(len(routing.slot), x.shape[1])
    _permute[(len(x),)](x, out, routing.place, H=x.shape[1], TOP=routing.top, BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


def combine(y: Tensor, routing: Routing, *, slots: bool = False) -> Tensor:
    """The sums of the tokens: of weighted rows in the order of slots, or of rows as the experts have them."""
    rows, width = y.shape
    out = y.new_empty(rows // routing.top, width)
    sizes = {"H": width, "TOP": routing.top, "BLOCK": triton.next_power_of_2(width), "SLOTS": slots}
    _combine[(len(out),)](y, out, routing.place, routing.weight, **sizes, num_warps=8 if width >= 2048 else 4)
    return out


def exact_rows(left: Tensor, weights: Tensor, routing: Routing, rows: Tensor) -> Tensor:
    """Some rows of the grouped product in float64; left [len(rows), K] are their operands."""
    expert = torch.searchsorted(routing.ends, rows.int(), right=True)
    out = left.new_empty(len(rows), weights.shape[-1], dtype=torch.float64)
    for e in expert.unique().tolist():
        out[expert == e] = left[expert == e].double() @ weights[e].double()
    return out


def exact_tokens(left: Tensor, weights: Tensor, routing: Routing, tokens: Tensor) -> Tensor:
    """The weighted sums of some tokens in float64; left has all rows."""
    slots = (tokens[:, None] * routing.top + torch.arange(routing.top, device=tokens.device)).view(-1)
    rows = routing.place[slots].long()
    y = exact_rows(left[rows], weights, routing, rows) * routing.weight[slots].double()[:, None]
    return y.view(len(tokens), routing.top, -1).sum(1)


def check() -> None:
    """Every form on sizes that no tile divides, with an empty expert, against float64."""
    gpu = torch.cuda.is_available()
    device, dtype, most = ("cuda", torch.bfloat16, 4e-3) if gpu else ("cpu", torch.float32, 1e-6)
    torch.manual_seed(0)
    tokens, experts, k, n = 97, 4, 64, 96
    for empty in ((2,), (0, 3), ()):
        routing = Routing.random(tokens, experts, 2, dtype, device, empty)
        x = torch.randn(tokens, k, device=device, dtype=dtype)
        h = torch.randn(tokens * 2, k, device=device, dtype=dtype)
        weights = torch.randn(experts, k, n, device=device, dtype=dtype) / k**0.5
        every = torch.arange(tokens * 2, device=device)
        rows = exact_rows(h, weights, routing, every)
        wants = {
            "gate_up": rows,
            "gate_up, gathered": exact_rows(x[routing.token], weights, routing, every),
            "down": rows,
            "down to slots": (rows * routing.weight[routing.slot].double()[:, None])[routing.place],
            "down to tokens": exact_tokens(h, weights, routing, torch.arange(tokens, device=device)),
        }
        errors = {"permute": relative_error(permute(x, routing), x[routing.token])}
        errors["combine"] = relative_error(combine(rows.to(dtype), routing), wants["down to tokens"])
        in_slots = wants["down to slots"].to(dtype)
        errors["sum of slots"] = relative_error(combine(in_slots, routing, slots=True), wants["down to tokens"])
        for form, want in wants.items():
            for tile in CHECKED:
                got = grouped(form, tile, x if FORMS[form][0] else h, weights, routing, programs=3)
                errors[f"{form} {tile.m}x{tile.n}x{tile.k}"] = relative_error(got, want)
        for name, error in errors.items():
            print(f"experts without rows {empty}: {name}: {error:.1e}")
            if not error <= most:
                raise SystemExit(f"The relative error of {name} is {error:.1e}, above {most:.0e}.")


class _Hopper:
    """What Triton asks of a driver in order to build a kernel for a GPU that is not here."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: Any = None) -> int:
        return 0


def build(form: str, tile: Tile) -> dict[str, Any]:
    """Build the kernel of the full size: its registers, and the bytes of its stack (spills) and of its shared memory."""
    gather, _, k = FORMS[form]
    empty = partial(torch.empty, device="meta", dtype=torch.bfloat16)
    left, weights = empty(TOKENS if gather else ROWS, k), empty(EXPERTS, k, WIDTH)
    numbers = empty(ROWS, dtype=torch.int32)
    routing = Routing(TOP, numbers[:EXPERTS], numbers, numbers, empty(ROWS))
    arguments, sizes = bind(form, tile, left, weights, routing, empty_result(form, left, weights, routing))
    built = _grouped.warmup(*arguments, grid=(1,), **sizes)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    instructions = "wgmma.mma_async", "cp.async.bulk.tensor", "cp.async.cg", "red.global", "atom.global"
    used = [name for name in instructions if re.search(rf"\b{name}", built.asm["ptx"])]
    sizes = {"registers": registers, "stack": stack, "shared": built.metadata.shared}
    return {"form": form, "tile": asdict(tile), **sizes, "instructions": used}


def build_all() -> None:
    """A line for every form and tile."""
    triton.runtime.driver.set_active(_Hopper())
    print(f"triton {triton.__version__}, sm_90")
    for form in FORMS:
        for tile in tiles(form):
            print(json.dumps(build(form, tile)), flush=True)


@dataclass
class Peer:
    """Something to time; ``kind`` says which reference its result has, and ``tflop`` what it multiplies."""

    name: str
    run: Callable[[], Tensor]
    kind: str
    tflop: float = 0.0
    tile: Tile | None = None
    #: It has kernels beside its matmul, to be listed one by one.
    several: bool = False


def gate_up_peers(x: Tensor, weights: Tensor, routing: Routing, programs: int) -> Iterator[Peer]:
    """x[token] times the weights."""
    token, ends, tflop = routing.token.long(), routing.ends, 2e-12 * ROWS * WIDTH * weights.shape[-1]
    rows = permute(x, routing)
    gate, up = (w.contiguous() for w in weights.chunk(2, -1))

    def cutlass(rows: Tensor, weights: Tensor = weights) -> Tensor:
        return torch._grouped_mm(rows, weights, offs=ends)

    def apart() -> Tensor:
        first, _ = cutlass(rows, gate), cutlass(rows, up)
        return first

    in_order, then = "gather in the order of the source", "then CUTLASS"
    yield Peer("gather, eager", lambda: x[token], "gathered")
    yield Peer(in_order, lambda: permute(x, routing), "gathered")
    yield Peer("CUTLASS", lambda: cutlass(rows), "rows", tflop)
    yield Peer("CUTLASS, gate and up apart", apart, "gate", tflop)
    yield Peer(f"gather, eager, {then}", lambda: cutlass(x[token]), "rows", tflop, several=True)
    yield Peer(f"{in_order}, {then}", lambda: cutlass(permute(x, routing)), "rows", tflop, several=True)
    for form, left in (("gate_up", rows), ("gate_up, gathered", x)):
        for tile in tiles(form):
            yield Peer(form, partial(grouped, form, tile, left, weights, routing, programs), "rows", tflop, tile)


def down_peers(h: Tensor, weights: Tensor, routing: Routing, programs: int) -> Iterator[Peer]:
    """The rows h times the weights, weighted and added up to tokens."""
    token, ends, tflop = routing.token.long(), routing.ends, 2e-12 * ROWS * HIDDEN * weights.shape[-1]
    weight, place = routing.weight[routing.slot].unsqueeze(1), routing.place.long()
    y = torch._grouped_mm(h, weights, offs=ends)
    tokens = y.shape[0] // routing.top

    def cutlass() -> Tensor:
        return torch._grouped_mm(h, weights, offs=ends)

    def add(y: Tensor) -> Tensor:
        return y.new_zeros(tokens, y.shape[1]).index_add(0, token, y * weight)

    def view_and_sum(y: Tensor) -> Tensor:
        return (y * weight)[place].view(tokens, routing.top, -1).sum(1)

    def run(form: str, tile: Tile) -> Tensor:
        return grouped(form, tile, h, weights, routing, programs)

    def slots_and_sum(tile: Tile) -> Tensor:
        return combine(run("down to slots", tile), routing, slots=True)

    def tokens_and_cast(tile: Tile) -> Tensor:
        return run("down to tokens", tile).to(h.dtype)

    yield Peer("weighted sum, eager, by index_add", lambda: add(y), "tokens", several=True)
    yield Peer("weighted sum, eager, by a view", lambda: view_and_sum(y), "tokens", several=True)
    yield Peer("weighted sum in one kernel", lambda: combine(y, routing), "tokens")
    yield Peer("CUTLASS", cutlass, "rows", tflop)
    yield Peer("CUTLASS, then index_add, eager", lambda: add(cutlass()), "tokens", tflop, several=True)
    yield Peer("CUTLASS, then the view, eager", lambda: view_and_sum(cutlass()), "tokens", tflop, several=True)
    yield Peer("CUTLASS, then one kernel", lambda: combine(cutlass(), routing), "tokens", tflop, several=True)
    in_slots = run("down to slots", TILES[0])
    yield Peer("sum of slots", lambda: combine(in_slots, routing, slots=True), "tokens")
    for tile in TILES:
        yield Peer("down", partial(run, "down", tile), "rows", tflop, tile)
        yield Peer("down to slots", partial(run, "down to slots", tile), "slots", tflop, tile)
        yield Peer("down to slots, then the sum", partial(slots_and_sum, tile), "tokens", tflop, tile, several=True)
    for tile in tiles("down to tokens"):
        yield Peer("zeros, down to tokens, cast", partial(tokens_and_cast, tile), "tokens", tflop, tile, several=True)


def times(part: str, peers: Iterable[Peer], wants: dict[str, tuple[Tensor, Tensor]]) -> list[dict[str, Any]]:
    """A row for each peer: its error, and the median of its milliseconds, in turns with the others."""
    from triton.testing import do_bench

    rows: list[dict[str, Any]] = []
    running = []
    for peer in peers:
        rows.append({"part": part, "peer": peer.name, "tile": asdict(peer.tile) if peer.tile else None})
        try:
            index, want = wants[peer.kind]
            rows[-1]["error"] = relative_error(peer.run()[index], want)
            running.append((peer, rows[-1], []))
        except Exception as error:
            rows[-1]["refused"] = f"{type(error).__name__}: {(str(error).strip() or '?').splitlines()[0][:200]}"
    for _ in range(ROUNDS):
        for peer, _, found in running:
            found.append(do_bench(peer.run, warmup=10, rep=40, return_mode="median"))
    for peer, row, found in running:
        row["ms"] = statistics.median(found)
        if peer.several:
            parts = kernels(peer.run, runs=5)
            row["kernels_ms"] = sum(ms for _, ms in parts.values())
            row["kernels"] = {name[:60]: ms for name, (_, ms) in parts.items()}
        if peer.tflop:
            row["tflops"] = peer.tflop / row["ms"] * 1e3
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def wanted(left: Tensor, gathered: bool, weights: Tensor, routing: Routing) -> dict[str, tuple[Tensor, Tensor]]:
    """For each kind of result an index, and what is wanted there: the rows of three experts, and a thousand others."""
    begins = [0, *routing.ends.tolist()]
    rows = [torch.arange(begins[e], begins[e + 1], device=left.device) for e in (0, EXPERTS // 2, EXPERTS - 1)]
    rows = torch.cat([*rows, torch.randint(0, ROWS, (1000,), device=left.device)])
    operands = left[routing.token[rows]] if gathered else left[rows]
    product = exact_rows(operands, weights, routing, rows)
    wants = {"rows": (rows, product)}
    if gathered:
        return wants | {"gathered": (rows, operands), "gate": (rows, product.chunk(2, -1)[0])}
    slots = routing.slot[rows].long()
    tokens = torch.arange(0, TOKENS, 61, device=left.device)
    wants["slots"] = slots, product * routing.weight[slots].double()[:, None]
    return wants | {"tokens": (tokens, exact_tokens(left, weights, routing, tokens))}


def measure(device: str = "cuda") -> Iterator[list[dict[str, Any]]]:
    """The rows of each part."""
    torch.manual_seed(0)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    random = partial(torch.randn, device=device, dtype=torch.bfloat16)
    routing = Routing.random(TOKENS, EXPERTS, TOP, torch.bfloat16, device)
    x, weights = random(TOKENS, WIDTH), random(EXPERTS, WIDTH, 2 * HIDDEN) / WIDTH**0.5
    yield times("gate_up", gate_up_peers(x, weights, routing, programs), wanted(x, True, weights, routing))
    h, weights = random(ROWS, HIDDEN), random(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5
    yield times("down", down_peers(h, weights, routing, programs), wanted(h, False, weights, routing))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare small sizes with float64")
    parser.add_argument("--build", action="store_true", help="build for Hopper, and print registers and shared memory")
    parser.add_argument("--out", type=Path, default=RESULTS / "grouped_gather.json")
    given = parser.parse_args()
    if given.check:
        return check()
    if given.build:
        return build_all()
    rows: list[dict[str, Any]] = []
    for part in measure():
        rows += part
        result = {"suite": "grouped_gather", "environment": environment(), "rows": rows}
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
