"""The models of benchmarks.models: unmodified ones of transformers, and an xLSTM in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock
from transformers.models.mamba import modeling_mamba

from .mlstm import plain as plain_mlstm


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


def _wavlm(**sizes: Any) -> nn.Module:
    return hf.WavLMModel(hf.WavLMConfig(**{"layerdrop": 0.0, "mask_time_prob": 0.0} | sizes))


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
    "t5_base_2048": Model(_t5, 8, 2048, _both_sides, {"num_layers": 1}),
    "swin_b": Model(lambda **s: _swin(hf.SwinModel, hf.SwinConfig, **s), 64, 224, _images, _SMALL_SWIN),
    "swin_v2_b": Model(lambda **s: _swin(hf.Swinv2Model, hf.Swinv2Config, **s), 32, 256, _images, _SMALL_SWIN),
    "beit_b": Model(_beit, 32, 224, _images, _TWO_LAYERS),
    "deberta_v3_base": Model(_deberta, 16, 512, _tokens, _TWO_LAYERS),
    "mpnet": Model(_mpnet, 32, 512, _tokens, _TWO_LAYERS),
    "wav2vec2_conformer": Model(
        _conformer, 8, 240_000, lambda batch, length: {"input_values": torch.randn(batch, length)}, _TWO_LAYERS, 8000
    ),
    "wavlm_base": Model(
        _wavlm, 8, 240_000, lambda batch, length: {"input_values": torch.randn(batch, length)}, _TWO_LAYERS, 8000
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
