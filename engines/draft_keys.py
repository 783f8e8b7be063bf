"""The keys of a draft's config.json that change its maths: where they stand and what is refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from eagle_chain.engines.fields import Place, Reader, is_number
from eagle_chain.engines.overrides import DraftOverrides

DRAFT_TYPES = ("llama", "qwen3")
LAYER_KEY = "transformer_layer_config"  # where speculators keeps the layer's own config
# Flag of `DraftConfig` -> the keys that say it, in any object of the file.
FLAGS = {
    "norm_before_residual": ("norm_before_residual",),
    "norm_before_fc": ("norm_before_fc",),
    "fc_norm": ("fc_norm", "use_aux_norm"),
    "norm_output": ("norm_output", "return_hidden_post_norm"),
}
BIAS_KEYS = ("attention_bias", "mlp_bias", "bias")

# Keys with no effect on what a layer computes, though some look as if they had one.
INERT = frozenset(
    """
    _attn_implementation _name_or_path add_cross_attention architectures attention_dropout
    attn_implementation auto_map base_model_name_or_path bos_token_id chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id dtype eagle_disable_moe
    eagle_freeze_base_model eagle_hidden_state_distillation eagle_report_acc
    eagle_self_logit_distillation embed_requires_grad enable_sp_ulysses eos_token_id has_lm_head
    has_no_defaults_at_init
    hidden_dropout initializer_range is_decoder max_position_embeddings max_window_layers
    mlp_dropout model_type output_attentions output_hidden_states pad_token_id pretraining_tp
    pruned_heads rope_scaling rope_parameters sep_token_id speculators_config
    speculators_model_type speculators_version target_model_type tie_encoder_decoder
    tie_word_embeddings torch_dtype transformers_version use_cache
    """.split()
)
# Keys that are read here or in `DraftConfig.from_json`.
READ = frozenset(
    """
    vocab_size draft_vocab_size hidden_size target_hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta
    rotary_emb_base partial_rotary_factor rotary_pct rotary_emb_fraction sliding_window layer_types
    eagle_aux_hidden_state_layer_ids num_aux_hidden_states num_aux_layers logit_scale eagle_config
    transformer_layer_config target_layer_ids layer_ids
    """.split()
).union(BIAS_KEYS, *FLAGS.values())
# A key we do not know is refused if its name has one of these words in it.
MATHS = re.compile(
    "norm|bias|scal|scale|multiplier|rope|rotary|residual|layer|attn|attention|proj|fc|embed|head|"
    "aux|act|gate|expert|moe|cap|window|mask|hidden|lora|eagle|draft|parallel|mtp|logit|vocab|"
    "clip|sink|quant|compress"
)


def is_draft(data: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a draft, of whatever format."""
    return data.get("model_type") in DRAFT_TYPES or "speculators_model_type" in data


def draft_places(read: Reader) -> list[Place]:
    """Every object of the file where a key may stand; also makes `read` look into the nested one.

    Raises:
        InputError: It is no EAGLE-3 draft of a kind that we know.
    """
    data = read.places[0][1]
    layer, eagle = data.get(LAYER_KEY), data.get("eagle_config")
    for key, value in ((LAYER_KEY, layer), ("eagle_config", eagle)):
        if value is not None and not isinstance(value, Mapping):
            read.note(key, value, "an object", "restore the published file")
    kinds = [("", data)]
    if isinstance(layer, Mapping):
        read.places.append((f"{LAYER_KEY}.", layer))
        kinds = read.places[1:]
    told = [data.get("speculators_model_type"), data.get("speculators_config")]
    if any(value is not None for value in told) or layer is not None:
        read.pin("speculators_model_type", "eagle3", because="only EAGLE-3 drafts are supported")
        inner = told[1]
        if isinstance(inner, Mapping):
            place = [("speculators_config.", inner)]
            read.pin("algorithm", "eagle3", because="only EAGLE-3 is supported", places=place)
        if layer is None:
            read.note(LAYER_KEY, None, "the config of the layer", "restore the published file")
    _check_kinds(read, kinds)
    read.finish()  # for another kind of model the rest of the list would be noise
    return [*read.places, ("eagle_config.", eagle or {})]


def read_variant(read: Reader, everywhere: list[Place], overrides: DraftOverrides) -> None:
    """Set the flags of `DraftConfig` and `sources`, refuse every variant that is not lowered."""
    sources = []
    speculators = read.places[-1][0] == f"{LAYER_KEY}."
    for flag, keys in FLAGS.items():
        given = getattr(overrides, flag, None)
        if given is not None:
            read.values[flag] = given
            sources.append(f"{flag} {_word(given)}, given as an option")
            continue
        found = read.find(*keys, places=everywhere)
        if found is None:
            if read.present(*keys, places=everywhere):
                continue  # places disagree, which is noted
            if flag == "norm_before_residual" and speculators:
                why = "vLLM takes true and speculators false for it: give --norm-before-residual"
                read.note(flag, None, "true or false", why)
            read.values[flag] = False
            sources.append(f"{flag} false, as nothing says otherwise")
        elif not isinstance(found[1], bool):
            read.note(*found, "true or false")
        else:
            read.values[flag] = found[1]
            sources.append(f"{flag} {_word(found[1])}, from {found[0]}")
    if read.values.get("norm_before_fc") and read.values.get("fc_norm"):
        why = "a norm over all features and one per chunk exclude each other"
        read.note("norm_before_fc", True, "false beside fc_norm", why)
    read.values["sources"] = tuple(sources)
    _read_scale(read, everywhere)
    _refuse_variants(read, everywhere)
    _refuse_unknown(read, everywhere)


def stated(data: Mapping[str, Any], key: str) -> bool | None:
    """What a config.json says about a flag that may stand in any of its objects."""
    for name in ("", LAYER_KEY, "eagle_config"):
        place = data.get(name, data if name == "" else None)
        value = place.get(key) if isinstance(place, Mapping) else None
        if isinstance(value, bool):
            return value
    return None


def _check_kinds(read: Reader, places: list[Place]) -> None:
    """The layer must be one of a Llama or of a Qwen3."""
    wanted, action = " or ".join(DRAFT_TYPES), "only these model types are supported"
    for prefix, place in places:
        kind = place.get("model_type")
        if kind not in DRAFT_TYPES:
            read.note(f"{prefix}model_type", kind, wanted, action)


def _read_scale(read: Reader, everywhere: list[Place]) -> None:
    """A factor on the logits; it changes no choice, but the shares that sampling draws from."""
    found = read.find("logit_scale", places=everywhere)
    if found is not None and not is_number(found[1], (1e-6, 1e6)):
        read.note(*found, "a number above 0")
    elif found is not None:
        read.values["logit_scale"] = float(found[1])


def _refuse_variants(read: Reader, everywhere: list[Place]) -> None:
    """Refuse each variant that we do not implement, wherever its key stands."""
    for key, usual, what in (
        ("use_aux_hidden_state", True, "a draft without auxiliary features (EAGLE-1)"),
        ("next_layer_regular", True, "a draft with irregular layers"),
        ("use_input_layernorm_in_first_layer", True, "an embedding that is not normed"),
        ("use_last_layernorm", True, "a head on a hidden state that is not normed"),
        ("use_mtp_layernorm", False, "a draft with the norms of an MTP head"),
        ("eh_proj_before_attn", False, "a projection in front of attention"),
        ("parallel_drafting", False, "parallel drafting"),
        ("parallel_draft_step", 1, "parallel drafting"),
        ("use_sliding_window", False, "a sliding window"),
        ("rope_interleave", False, "rotary pairs side by side"),
        ("rope_interleaved", False, "rotary pairs side by side"),
    ):
        read.pin(key, usual, because=f"{what} is not supported", places=everywhere)
    for key in BIAS_KEYS:
        found = read.find(key, places=everywhere)
        if found is not None and not isinstance(found[1], bool):
            read.note(*found, "true or false")
    if read.require("num_hidden_layers", wanted="1"):
        why = "engines disagree on the layers behind the first: none but 1 is supported"
        read.pin("num_hidden_layers", 1, because=why)
    kinds = read.find("layer_types")
    if kinds is not None and set(map(str, _items(kinds[1]))) != {"full_attention"}:
        read.note(*kinds, '["full_attention"]', "other kinds of layer are not supported")
    read.pin("hidden_act", "silu", "swish", because="only SiLU is implemented", places=everywhere)
    for key in ("quantization_config", "quantization"):  # transformers and MLX
        read.pin(key, because="use the original, unquantised draft")


def _refuse_unknown(read: Reader, everywhere: list[Place]) -> None:
    """A key that we have never seen and that may change the maths is an error, not a shrug."""
    pinned = {problem.split(":")[0] for problem in read.problems}
    usual = {"next_layer_regular", "use_aux_hidden_state", "use_last_layernorm"}
    usual |= {"use_input_layernorm_in_first_layer", "parallel_draft_step"}
    for prefix, place in everywhere:
        for key, value in place.items():
            known = key in READ or key in INERT or key in usual
            if known or not value or prefix + key in pinned or not MATHS.search(key):
                continue
            why = "is it part of the maths? if not, remove it from the file"
            read.note(prefix + key, value, "a key that is known here", why)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _word(value: bool) -> str:
    return "true" if value else "false"
