"""A training step of unmodified models of transformers: stock Inductor, gradfuse and eager, in bf16.

python -m benchmarks.models                           # every model; writes results/models.json
python -m benchmarks.models --model t5_base_512 --peer stock --peer gradfuse
python -m benchmarks.models --model swin_b --profile  # the kernels of a step, one line for each; nothing written
python -m benchmarks.models --model swin_b --smoke    # a reduced model on any device, one step, nothing written

A step is forward, loss and backward, under autocast, or with parameters in bf16 for models of experts. The time is the
median, and the peak is what a step allocates beyond parameters. Every model has a process for each peer, with an empty
cache of its own. All processes compile at the same time, and then they are timed, one at a time on each GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch._dynamo.utils import counters
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock
from transformers.models.mamba import modeling_mamba

import inductor_ext  # noqa: F401  (registers the backend)
from inductor_ext.core.report import collect
from inductor_ext.core.table import progress

from .mlstm import plain as plain_mlstm
from .runner import RESULTS, _kernel_time, environment, kernels

BACKENDS = {"stock": "inductor", "gradfuse": "gradfuse", "eager": None}


@dataclass
class Model:
    """build: from overrides of the configuration to a model. batch, length: of the inputs. inputs: makes them.

    smaller: the overrides of a smoke test, and shorter: the length of its inputs. dtype: of the parameters. In fp32, a step
    runs under autocast to ``autocast``.
    """

    build: Callable[..., nn.Module]
    batch: int
    length: int
    inputs: Callable[[int, int], dict[str, Any]]
    smaller: dict[str, Any]
    shorter: int = 64
    dtype: torch.dtype = torch.float32
    autocast: torch.dtype = torch.bfloat16


def _ids(batch: int, length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 1000, (batch, length)), "use_cache": False}


def _only_ids(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 1000, (batch, length))}


def _tokens(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(3, 1000, (batch, length)), "attention_mask": torch.ones(batch, length).long()}


def _both_sides(batch: int, length: int) -> dict[str, torch.Tensor]:
    return _tokens(batch, length) | {"decoder_input_ids": torch.randint(3, 1000, (batch, length))}


def _images(batch: int, length: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, length, length)}


def _t5(**sizes: Any) -> nn.Module:
    base = {"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12, "vocab_size": 32128}
    return hf.T5Model(hf.T5Config(**base | sizes))


def _swin(model: type, config: type, **sizes: Any) -> nn.Module:
    base = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}
    return model(config(**base | sizes))


def _beit(**sizes: Any) -> nn.Module:
    return hf.BeitModel(hf.BeitConfig(**{"use_relative_position_bias": True} | sizes), add_pooling_layer=False)


def _deberta(**sizes: Any) -> nn.Module:
    base = {
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "max_position_embeddings": 512,
    }
    base |= {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
    return hf.DebertaV2Model(hf.DebertaV2Config(**base | sizes))


def _conformer(**sizes: Any) -> nn.Module:
    base = {"position_embeddings_type": "relative", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16}
    base |= {"intermediate_size": 4096, "layerdrop": 0.0, "mask_time_prob": 0.0}
    return hf.Wav2Vec2ConformerModel(hf.Wav2Vec2ConformerConfig(**base | sizes))


def _sam(**sizes: Any) -> nn.Module:
    return hf.SamVisionModel(hf.SamVisionConfig(**sizes))


def _vitdet(**sizes: Any) -> nn.Module:
    base = {"image_size": 1024, "use_relative_position_embeddings": True, "window_size": 14}
    base |= {"window_block_indices": [0, 1, 3, 4, 6, 7, 9, 10]}
    return hf.VitDetModel(hf.VitDetConfig(**base | sizes))


class _EsmFoldTrunk(nn.Module):
    """Blocks of ESMFold's trunk: attention with a bias from pairs, and two triangle attentions, as in AlphaFold."""

    def __init__(self, blocks: int, **sizes: Any) -> None:
        super().__init__()
        folding = hf.EsmConfig(vocab_size=33, is_folding_model=True, esmfold_config={"trunk": sizes}).esmfold_config
        self.blocks = nn.ModuleList(EsmFoldTriangularSelfAttentionBlock(folding.trunk) for _ in range(blocks))

    def forward(self, sequence: torch.Tensor, pairs: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for block in self.blocks:
            sequence, pairs = block(sequence, pairs, mask)
        return pairs, sequence


def _esmfold(blocks: int = 4, **sizes: Any) -> nn.Module:
    return _EsmFoldTrunk(blocks, **sizes)


def _residues(batch: int, length: int) -> dict[str, torch.Tensor]:
    sequence, pairs = torch.randn(batch, length, 1024), torch.randn(batch, length, length, 128)
    return {"sequence": sequence, "pairs": pairs, "mask": torch.ones(batch, length)}


def _mpnet(**sizes: Any) -> nn.Module:
    return hf.MPNetModel(hf.MPNetConfig(**{"max_position_embeddings": 514} | sizes), add_pooling_layer=False)


def _mixtral(**sizes: Any) -> nn.Module:
    return hf.MixtralModel(hf.MixtralConfig(**{"num_hidden_layers": 1} | sizes))


def _qwen3_moe(**sizes: Any) -> nn.Module:
    """Two layers of Qwen3-30B-A3B."""
    base = {"hidden_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 4}
    base |= {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    return hf.Qwen3MoeModel(hf.Qwen3MoeConfig(**base | {"vocab_size": 32000} | sizes))


def _gpt_oss(**sizes: Any) -> nn.Module:
    """Two layers of gpt-oss-20b."""
    base = {"num_hidden_layers": 2, "num_local_experts": 32, "vocab_size": 32000}
    return hf.GptOssModel(hf.GptOssConfig(**base | sizes))


def _mamba(**sizes: Any) -> nn.Module:
    # In torch 2.11 this is True in every graph, and the model takes a loop of 1024 steps. Later it takes associative_scan.
    modeling_mamba.is_torchdynamo_exporting = lambda: False
    return hf.MambaModel(hf.MambaConfig(**{"hidden_size": 768, "num_hidden_layers": 24} | sizes))


def _recurrent_gemma(**sizes: Any) -> nn.Module:
    """Two recurrent layers and one of attention, of the width of RecurrentGemma-2B."""
    base = {"num_hidden_layers": 3, "vocab_size": 32000}
    return hf.RecurrentGemmaModel(hf.RecurrentGemmaConfig(**base | sizes))


class _XLSTMBlock(nn.Module):
    """An mLSTM with its headwise norm and output gate, and a feed-forward layer, as in xLSTM-7B (arXiv 2503.13427)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.to_query, self.to_key = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.to_value, self.to_output_gate, self.out = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.to_gates = nn.Linear(width, 2 * heads)
        self.head_norm = nn.Parameter(torch.zeros(heads, width // heads))
        hidden = 64 * round(8 * width / 3 / 64)
        self.up, self.gate, self.down = (
            nn.Linear(*dims, bias=False) for dims in ((width, hidden),) * 2 + ((hidden, width),)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        query, key, value = (to(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for to in self._to_heads())
        input_gate, forget_gate = (15 * torch.tanh(self.to_gates(y).float() / 15)).transpose(1, 2).chunk(2, 1)
        cell = plain_mlstm(query, key, value, input_gate, forget_gate, self.head_norm).transpose(1, 2).flatten(2)
        x = x + self.out(torch.sigmoid(self.to_output_gate(y)) * cell)
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))

    def _to_heads(self) -> tuple[nn.Module, ...]:
        return self.to_query, self.to_key, self.to_value


class _XLSTM(nn.Module):
    """xLSTM with its cell in plain PyTorch. The defaults have 124 million parameters."""

    def __init__(self, width: int = 768, heads: int = 6, layers: int = 12, vocabulary: int = 50304) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(_XLSTMBlock(width, heads) for _ in range(layers)), nn.RMSNorm(width))

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.blocks(self.embedding(input_ids)),)


_TWO_LAYERS = {"num_hidden_layers": 2}
_FEW_EXPERTS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_FEW_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16}
_SMALL_SWIN = {"depths": [2, 2], "num_heads": [4, 8], "image_size": 64, "patch_size": 2, "window_size": 4}
MODELS = {
    "t5_base_512": Model(_t5, 8, 512, _both_sides, {"num_layers": 1}),
    "t5_base_2048": Model(_t5, 4, 2048, _both_sides, {"num_layers": 1}),
    "swin_b": Model(lambda **s: _swin(hf.SwinModel, hf.SwinConfig, **s), 64, 224, _images, _SMALL_SWIN),
    "swin_v2_b": Model(lambda **s: _swin(hf.Swinv2Model, hf.Swinv2Config, **s), 32, 256, _images, _SMALL_SWIN),
    "beit_b": Model(_beit, 32, 224, _images, _TWO_LAYERS),
    "deberta_v3_base": Model(_deberta, 16, 512, _tokens, _TWO_LAYERS),
    "mpnet": Model(_mpnet, 32, 512, _tokens, _TWO_LAYERS),
    "wav2vec2_conformer": Model(
        _conformer, 8, 240_000, lambda batch, length: {"input_values": torch.randn(batch, length)}, _TWO_LAYERS, 8000
    ),
    "sam_vit_b": Model(_sam, 1, 1024, _images, {**_TWO_LAYERS, "global_attn_indexes": [1]}, 1024),
    "vitdet_b": Model(_vitdet, 1, 1024, _images, {**_TWO_LAYERS, "window_block_indices": [0]}, 1024),
    # In bf16 its softmax tries to import another package, at which Dynamo ends the graph.
    "esmfold_trunk": Model(_esmfold, 1, 256, _residues, {"blocks": 1}, 20, autocast=torch.float16),
    "mixtral": Model(_mixtral, 2, 4096, _ids, {**_FEW_EXPERTS, "intermediate_size": 64}, dtype=torch.bfloat16),
    "qwen3_moe": Model(
        _qwen3_moe, 4, 4096, _ids, {**_FEW_EXPERTS, "moe_intermediate_size": 32, "num_experts": 8}, dtype=torch.bfloat16
    ),
    "gpt_oss": Model(_gpt_oss, 2, 4096, _ids, {**_FEW_EXPERTS, "intermediate_size": 64}, dtype=torch.bfloat16),
    "mamba_130m": Model(_mamba, 1, 1024, _ids, {**_TWO_LAYERS, "hidden_size": 64}),
    # Dynamo unrolls its loop over time.
    "recurrent_gemma": Model(
        _recurrent_gemma, 4, 512, _ids, {"hidden_size": 64, "lru_width": 64, "intermediate_size": 64, **_FEW_HEADS}
    ),
    "xlstm_125m": Model(
        _XLSTM, 4, 2048, _only_ids, {"width": 64, "heads": 2, "layers": 1, "vocabulary": 1000}, dtype=torch.bfloat16
    ),
}


def _step(model: nn.Module, inputs: dict[str, Any], device: str, autocast: torch.dtype | None) -> None:
    model.zero_grad(set_to_none=True)
    with torch.autocast(device, autocast, enabled=autocast is not None):
        hidden = model(**inputs)[0]
    hidden.float().square().mean().backward()


def measure(name: str, peer: str, smoke: bool) -> dict[str, Any]:
    """Return what gradfuse decided, and what the next line of input asks for: "time" or "profile", after the first step."""
    case, device = MODELS[name], "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = case.build(**(case.smaller if smoke else {})).train().to(device, case.dtype)
    batch, length = (1, case.shorter) if smoke else (case.batch, case.length)
    inputs = {k: v.to(device) if torch.is_tensor(v) else v for k, v in case.inputs(batch, length).items()}
    autocast = case.autocast if case.dtype is torch.float32 else None
    row: dict[str, Any] = {"model": name, "batch": batch, "length": length, "peer": peer}
    run = torch.compile(model, backend=BACKENDS[peer]) if peer != "eager" else model
    begin = time.perf_counter()
    with collect() as report:
        _step(run, inputs, device, autocast)
    if device == "cuda":
        torch.cuda.synchronize()
    row["first_step_s"] = time.perf_counter() - begin
    found = {**counters["aot_autograd"], **counters["inductor"]}
    row["caches"] = {name: count for name, count in found.items() if "cache" in name or "bundler" in name}
    if peer == "gradfuse":
        row["fired"] = Counter(d.pass_name for d in report.decisions if d.path != "stock")
    if not smoke:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
        print("ready", flush=True)
        measures = input()
        if measures == "time":
            row |= _times(lambda: _step(run, inputs, device, autocast))
        elif measures == "profile":
            row["kernels"] = kernels(lambda: _step(run, inputs, device, autocast), runs=3)
    return row


def _times(step: Callable[[], None]) -> dict[str, float]:
    from triton.testing import do_bench

    milliseconds = do_bench(step, warmup=200, rep=1000, return_mode="median")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {"step_ms": milliseconds, "step_kernels_ms": _kernel_time(step), "step_peak_mb": peak}


def _work(name: str, peer: str, smoke: bool) -> None:
    """Print a row, in a process of its own."""
    try:
        row = measure(name, peer, smoke)
    except Exception as error:
        traceback.print_exc()
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        row = {"model": name, "peer": peer, "refused": reason}
    print(json.dumps(row), flush=True)


def start(name: str, peer: str, smoke: bool, caches: str, gpu: str = "") -> subprocess.Popen[str]:
    """Start a worker. gpu: the number of the GPU that it sees, or "" for those that this process sees."""
    command = [sys.executable, "-m", "benchmarks.models", "--worker", "--model", name, "--peer", peer]
    pipe, own = subprocess.PIPE, os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/{name}-{peer}"}
    own |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {}
    return subprocess.Popen(command + ["--smoke"] * smoke, stdin=pipe, stdout=pipe, text=True, env=own)


def row_of(worker: subprocess.Popen[str], first_line: str, measures: str) -> dict[str, Any]:
    """Return the row of a worker that has printed its first line. measures: as in ``measure``, or "" for no more than that.

    A worker that failed has printed its row at once.
    """
    if not first_line:
        raise RuntimeError(f"a worker ended: {' '.join(map(str, worker.args))}")
    if first_line.strip() != "ready":
        return json.loads(first_line)
    out, _ = worker.communicate(f"{measures}\n")
    return json.loads(out.strip().splitlines()[-1])


def _rows(chosen: list[tuple[str, str]], measures: str, caches: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of the chosen models and peers, in order, after all have taken their first step.

    The models are dealt out to the GPUs, and all peers of a model have the same one.
    """
    numbers = ",".join(map(str, range(torch.cuda.device_count())))
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", numbers).split(",")
    models = list(dict.fromkeys(name for name, _ in chosen))
    places = [gpus[models.index(name) % len(gpus)] for name, _ in chosen]
    workers: list[subprocess.Popen[str]] = []
    one_at_a_time = {gpu: ThreadPoolExecutor(1) for gpu in gpus}
    try:
        for (name, peer), gpu in zip(chosen, places, strict=True):
            workers.append(start(name, peer, False, caches, gpu))
        first_lines = [worker.stdout.readline() for worker in workers]
        jobs = zip(places, workers, first_lines, strict=True)
        rows = [one_at_a_time[gpu].submit(row_of, worker, line, measures) for gpu, worker, line in jobs]
        for row in progress("models", "step", of=rows):
            yield row.result()
    finally:
        for worker in workers:
            worker.kill()
        for pool in one_at_a_time.values():
            pool.shutdown(cancel_futures=True)


def _write(rows: list[dict[str, Any]], path: Path) -> None:
    """Write rows, each with its date and device. Rows of other models stay if they were measured with the same versions."""
    here = environment() | {"transformers": hf.__version__}
    of_a_row = {name: here.pop(name) for name in ("date", "device")}
    rows = [row | of_a_row for row in rows]
    before = json.loads(path.read_text()) if path.exists() else {"environment": None}
    if before["environment"] == here:
        measured = {row["model"] for row in rows}
        rows += [row for row in before["rows"] if row["model"] not in measured]
    rows.sort(key=lambda row: [*MODELS].index(row["model"]))
    path.write_text(json.dumps({"suite": "models", "environment": here, "rows": rows}, indent=1) + "\n")


def main() -> None:
    """Measure the chosen models and write their rows, anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="may be given several times")
    parser.add_argument("--peer", action="append", choices=BACKENDS, help="may be given several times")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step, and write nothing")
    parser.add_argument("--smoke", action="store_true", help="one step of a reduced model, and write nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "models.json")
    parser.add_argument("--caches", help="a folder for the caches of each model and peer, which is kept")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    chosen = [(name, peer) for name in given.model or MODELS for peer in given.peer or BACKENDS]
    if given.worker:
        _work(*chosen[0], given.smoke)
        return
    with tempfile.TemporaryDirectory() as temporary:
        caches = given.caches or temporary
        if given.profile:
            for row in _rows(chosen, "profile", caches):
                print(row["model"], row["peer"], row.get("refused", ""))
                for kernel, (count, milliseconds) in row.get("kernels", {}).items():
                    print(f"{count:5} {milliseconds:8.3f} {kernel[:150]}", flush=True)
        elif given.smoke:
            for name, peer in chosen:
                print(start(name, peer, True, caches).communicate()[0].strip().splitlines()[-1], flush=True)
        else:
            _measure(chosen, caches, given.out)


def _measure(chosen: list[tuple[str, str]], caches: str, out: Path) -> None:
    rows: list[dict[str, Any]] = []
    for row in _rows(chosen, "time", caches):
        print(json.dumps(row), flush=True)
        _write(rows := [*rows, row], out)


if __name__ == "__main__":
    main()
