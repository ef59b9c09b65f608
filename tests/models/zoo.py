"""Small configurations of the models of transformers whose attention has a learned bias, as their users construct them."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from transformers.models.esm.modeling_esmfold import EsmFoldTriangularSelfAttentionBlock

LENGTH = 32
_SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_TEXT = {"vocab_size": 100, "max_position_embeddings": 64}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


@dataclasses.dataclass(frozen=True)
class Model:
    """build: makes the model. inputs: makes its inputs. attentions: the number of those that are replaced."""

    build: Callable[[], torch.nn.Module]
    inputs: Callable[[], dict[str, Any]]
    attentions: int


def tokens(padded=True):
    """Ids of two sequences; the second half of the first is padding."""
    inputs = {"input_ids": torch.randint(3, 90, (2, LENGTH))}
    if padded:
        inputs["attention_mask"] = torch.ones(2, LENGTH, dtype=torch.long)
        inputs["attention_mask"][0, LENGTH // 2 :] = 0
    return inputs


def image(size):
    return {"pixel_values": torch.randn(2, 3, size, size)}


def t5(implementation, dropout=0.0):
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    config = hf.T5Config(vocab_size=100, dropout_rate=dropout, **sizes)
    config._attn_implementation = implementation
    return hf.T5Model(config)


def mpnet():
    return hf.MPNetModel(hf.MPNetConfig(**_SMALL, **_TEXT, **_NO_DROPOUT), add_pooling_layer=False)


def deberta():
    relative = {"relative_attention": True, "position_buckets": 8, "norm_rel_ebd": "layer_norm"}
    shared = {"share_att_key": True, "pos_att_type": "p2c|c2p"}
    return hf.DebertaV2Model(hf.DebertaV2Config(**_SMALL, **_TEXT, **_NO_DROPOUT, **relative, **shared))


def swin(config, model):
    sizes = {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    return model(config(**sizes, drop_path_rate=0.0))


def beit():
    sizes = {"image_size": 32, "patch_size": 4, "use_relative_position_bias": True, "drop_path_rate": 0.0}
    return hf.BeitModel(hf.BeitConfig(**_SMALL, **_NO_DROPOUT, **sizes), add_pooling_layer=False)


def sam():
    sizes = {"hidden_size": 64, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_dim": 64}
    return hf.SamVisionModel(
        hf.SamVisionConfig(**sizes, image_size=64, patch_size=8, window_size=4, global_attn_indexes=[1])
    )


def vitdet():
    sizes = {"image_size": 64, "pretrain_image_size": 64, "patch_size": 8, "window_size": 4, "window_block_indices": [0]}
    sizes = _SMALL | sizes | {"use_relative_position_embeddings": True, "mlp_ratio": 1}
    return hf.VitDetModel(hf.VitDetConfig(**{k: n for k, n in sizes.items() if k != "intermediate_size"}))


class EsmFoldBlock(EsmFoldTriangularSelfAttentionBlock):
    """A block of ESMFold's trunk, with the pairs first."""

    def forward(self, sequence, pairs, mask):
        return super().forward(sequence, pairs, mask)[::-1]


def esmfold():
    widths = {"sequence_state_dim": 64, "pairwise_state_dim": 32, "sequence_head_width": 16, "pairwise_head_width": 16}
    config = hf.EsmConfig(vocab_size=33, is_folding_model=True, esmfold_config={"trunk": widths})
    block = EsmFoldBlock(config.esmfold_config.trunk)
    for parameter in block.parameters():
        # Many begin at zero, where the others have no gradient.
        torch.nn.init.normal_(parameter, std=0.2)
    return block


def residues():
    """No padding: the scores of a row that is all padding are -1e9, which in fp32 is all that is left of them."""
    sequence, pairs = torch.randn(2, LENGTH, 64), torch.randn(2, LENGTH, LENGTH, 32)
    return {"sequence": sequence, "pairs": pairs, "mask": torch.ones(2, LENGTH)}


def conformer():
    features = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    names = "hidden_dropout attention_dropout activation_dropout feat_proj_dropout layerdrop conformer_conv_dropout"
    off = dict.fromkeys([*names.split(), "mask_time_prob"], 0.0)
    positions = {"position_embeddings_type": "relative", "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    return hf.Wav2Vec2ConformerModel(
        hf.Wav2Vec2ConformerConfig(vocab_size=40, feat_extract_norm="layer", **_SMALL, **features, **off, **positions)
    )


def wavlm():
    """Its attention is torch's function for several heads, and its bias has a gate for each query."""
    features = {"conv_dim": (32, 32), "conv_stride": (5, 4), "conv_kernel": (10, 3), "num_feat_extract_layers": 2}
    names = "hidden_dropout attention_dropout activation_dropout feat_proj_dropout layerdrop mask_time_prob"
    positions = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
    return hf.WavLMModel(
        hf.WavLMConfig(vocab_size=40, **_SMALL, **features, **dict.fromkeys(names.split(), 0.0), **positions)
    )


def longt5(attention):
    """Queries of a block of 16 see its neighbours."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    blocks = {"local_radius": 15, "global_block_size": 4, "encoder_attention_type": attention}
    return hf.LongT5Model(hf.LongT5Config(vocab_size=100, dropout_rate=0.0, **sizes, **blocks))


def bloom():
    sizes = {"hidden_size": 64, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    return hf.BloomModel(hf.BloomConfig(vocab_size=100, **sizes))


def layoutlm():
    sizes = {"visual_embed": False, "coordinate_size": 12, "shape_size": 8, "max_2d_position_embeddings": 64}
    return hf.LayoutLMv3Model(hf.LayoutLMv3Config(**_SMALL, **_TEXT, **_NO_DROPOUT, **sizes))


def words_on_a_page():
    corners = torch.randint(0, 30, (2, LENGTH, 2)).repeat(1, 1, 2).sort(-1).values
    return tokens() | {"bbox": corners}


def gpt_oss():
    """Grouped heads, sinks and sliding windows. The products of other experts take no float64."""
    heads = {"num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
    config = hf.GptOssConfig(**_SMALL, vocab_size=100, num_local_experts=4, num_experts_per_tok=2, **heads)
    config._attn_implementation = config._experts_implementation = "eager"
    return hf.GptOssModel(config)


def encoder_and_decoder():
    return tokens() | {"decoder_input_ids": torch.randint(3, 90, (2, LENGTH))}


MODELS = {
    "t5_sdpa": Model(lambda: t5("sdpa"), encoder_and_decoder, 4),
    "t5_eager": Model(lambda: t5("eager"), encoder_and_decoder, 4),
    "mpnet": Model(mpnet, tokens, 2),
    "deberta_v2": Model(deberta, tokens, 2),
    "swin": Model(lambda: swin(hf.SwinConfig, hf.SwinModel), lambda: image(32), 4),
    "swin_v2": Model(lambda: swin(hf.Swinv2Config, hf.Swinv2Model), lambda: image(32), 4),
    "beit": Model(beit, lambda: image(32), 2),
    "sam": Model(sam, lambda: image(64), 2),
    "vitdet": Model(vitdet, lambda: image(64), 2),
    "esmfold": Model(esmfold, residues, 3),
    "gpt_oss": Model(gpt_oss, lambda: tokens() | {"use_cache": False}, 2),
    "wavlm": Model(wavlm, lambda: {"input_values": torch.randn(2, 1000)}, 2),
    "longt5_local": Model(lambda: longt5("local"), encoder_and_decoder, 4),
    "longt5_global": Model(lambda: longt5("transient-global"), encoder_and_decoder, 4),
    "wav2vec2_conformer": Model(conformer, lambda: {"input_values": torch.randn(2, 1000)}, 2),
}

#: Models whose attention has nothing learned, or (LayoutLM) looks its tables up without a gradient.
ORDINARY = {
    "bert": Model(lambda: hf.BertModel(hf.BertConfig(**_SMALL, **_TEXT, **_NO_DROPOUT), add_pooling_layer=False), tokens, 0),
    "bloom": Model(bloom, lambda: tokens() | {"use_cache": False}, 0),
    "layoutlm": Model(layoutlm, words_on_a_page, 0),
}
