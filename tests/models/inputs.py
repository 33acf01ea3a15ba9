"""Tiny models of `transformers` and batches for them: what a model's forward takes, by the names of its arguments."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import nn

from tests.models.configs import VOCABULARY, tiny_config
from tests.models.own import OWN

LENGTH = 16
WAVE = 8000
FRAMES = 64


def build(name: str) -> nn.Module:
    """A tiny model of a class, in train mode, with the same random weights in every process."""
    if name in OWN:
        torch.manual_seed(3)
        return OWN[name]().train()
    cls = getattr(transformers, name)
    config = tiny_config(cls.config_class)
    _small_ids(config)
    torch.manual_seed(3)
    model = cls(config)
    model.train()
    return model


def _small_ids(config: Any) -> None:
    """Special tokens that lie outside a tiny vocabulary get numbers inside it, each its own."""
    parts = [
        config,
        *(
            getattr(config, n)
            for n in getattr(type(config), "sub_configs_defaults", {})
            if getattr(config, n, None) is not None
        ),
    ]
    used: dict[int, int] = {}
    for part in parts:
        for name, value in list(vars(part).items()):
            if not name.endswith(("_token_id", "_token_index", "_token")) or isinstance(value, bool):
                continue
            if isinstance(value, int) and value >= VOCABULARY:
                setattr(part, name, used.setdefault(value, VOCABULARY - 1 - len(used)))
            elif isinstance(value, list) and any(isinstance(v, int) and v >= VOCABULARY for v in value):
                setattr(
                    part,
                    name,
                    [used.setdefault(v, VOCABULARY - 1 - len(used)) if v >= VOCABULARY else v for v in value],
                )
    if getattr(config, "is_encoder_decoder", False):
        for name, value in (("pad_token_id", 0), ("decoder_start_token_id", 1)):
            if getattr(config, name, None) is None:
                setattr(config, name, value)


class Inputs:
    """What the inputs of one model are made from."""

    def __init__(self, model: nn.Module, samples: int, seed: int) -> None:
        self.model, self.samples = model, samples
        self.config = model.config
        self.name = type(model).__name__
        self.random = torch.Generator().manual_seed(1000 + seed)
        self.names = list(inspect.signature(model.forward).parameters)
        self.made: dict[str, Any] = {}

    def integers(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, max(high, low + 1), (self.samples, *shape), generator=self.random)

    def numbers(self, *shape: int) -> torch.Tensor:
        return torch.randn(self.samples, *shape, generator=self.random)

    def find(self, *names: str, default: Any = None) -> Any:
        """The first of the names that the configuration or a part of it has."""
        for config in parts_of(self.config):
            for name in names:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return default


def parts_of(config: Any) -> list[Any]:
    found = [config]
    for name in getattr(type(config), "sub_configs_defaults", {}):
        part = getattr(config, name, None)
        if part is not None and not isinstance(part, dict):
            found += parts_of(part)
    return found


def batch(model: nn.Module, samples: int, seed: int) -> dict[str, Any]:
    """Inputs and, where the class takes them, labels: tensors with the samples along dim 0."""
    own = getattr(model, "batch", None)
    if type(model).__name__ in OWN and own is not None:
        return dict(own(samples, torch.Generator().manual_seed(1000 + seed)))
    make = Inputs(model, samples, seed)
    special = SPECIAL.get(make.name) or SPECIAL.get(type(model.config).__name__)
    if special is not None:
        return special(make)
    plain_inputs(make)
    labels(make)
    return make.made


SPECIAL: dict[str, Callable[[Inputs], dict[str, Any]]] = {}


def plain_inputs(make: Inputs) -> None:
    """The inputs that follow from the names of the forward's arguments."""
    names, made = make.names, make.made
    main = getattr(make.model, "main_input_name", "input_ids")
    if "input_ids" in names and main in ("input_ids", "pixel_values", "input_features"):
        text(make, LENGTH)
    if "image_grid_thw" in names:
        grid_images(make)
    elif "pixel_values" in names:
        shape = image_shape(make)
        name = make.name
        if name.startswith(("Timesformer", "VideoMAE", "Vivit")):
            shape = (make.find("num_frames", default=2), *shape)
        elif name.startswith(
            (
                "Idefics",
                "SmolVLM",
                "ModernVBert",
                "UltraVBert",
                "ColModernVBert",
                "LightGlue",
                "SuperGlue",
                "EfficientLoFTR",
                "Mllama",
            )
        ):
            shape = (2, *shape) if "Match" in name else (1, *shape)
        made["pixel_values"] = make.numbers(*shape)
    if "pixel_values_videos" in names and "pixel_values" not in names:
        frames = make.find("num_frames", "frames_per_clip", default=2)
        made["pixel_values_videos"] = make.numbers(frames, *image_shape(make))
    if "past_values" in names:
        length = make.find("context_length", default=32)
        if "freq" in names or "TimesFm" in make.name:
            made["past_values"] = make.numbers(length)
        else:
            made["past_values"] = make.numbers(length, make.find("num_input_channels", default=1))
            if "target_values" in names:
                made["target_values"] = (
                    make.integers(2)
                    if "Classification" in make.name
                    else make.numbers(make.find("num_targets", default=2))
                )
    if "input_values" in names:
        spectrum = (make.find("max_length"), make.find("num_mel_bins")) if make.name.startswith("AST") else (WAVE,)
        made["input_values"] = make.numbers(*spectrum)
    if "input_features" in names:
        made["input_features"] = make.numbers(*feature_shape(make))
        if "input_features_mask" in names:
            frames = made["input_features"].shape[1 if make.name.startswith(FEATURES_LAST) else 2]
            made["input_features_mask"] = torch.ones(make.samples, frames, dtype=torch.bool)
    if "image_sizes" in names and "pixel_values" in made:
        made["image_sizes"] = torch.tensor([made["pixel_values"].shape[-2:]] * make.samples)
    if "input_ids" in made and "pixel_values" in made:
        image_tokens(make)


def text(make: Inputs, length: int) -> None:
    vocabulary = min(make.find("vocab_size", default=VOCABULARY), VOCABULARY)
    make.made["input_ids"] = make.integers(
        vocabulary - 20 if vocabulary > 40 else vocabulary, length, low=min(8, vocabulary // 2)
    )
    if "attention_mask" in make.names:
        mask = torch.ones(make.samples, length, dtype=torch.int64)
        mask[::2, -2:] = 0
        make.made["attention_mask"] = mask


def grid_images(make: Inputs) -> None:
    """Images as rows of patches, and their grids of patches: time, height, width."""
    vision = make.find("vision_config")
    merged = getattr(vision, "spatial_merge_size", None) or getattr(vision, "merge_size", 2)
    merged = merged[0] if isinstance(merged, (list, tuple)) else merged
    side = 2 * merged
    channels = (
        getattr(vision, "in_channels", None) or getattr(vision, "in_chans", None) or getattr(vision, "num_channels", 3)
    )
    width = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    make.made["pixel_values"] = torch.randn(make.samples * side * side, width, generator=make.random)
    make.made["image_grid_thw"] = torch.tensor([[1, side, side]] * make.samples)


def image_tokens(make: Inputs) -> None:
    """As many image tokens in the text as the image gives features."""
    token = next(
        (v for n in ("image_token_id", "image_token_index") if (v := getattr(make.config, n, None)) is not None), None
    )
    owner = next(
        (m for m in (make.model, getattr(make.model, "model", None)) if hasattr(m, "get_image_features")), None
    )
    if token is None or owner is None:
        return
    wanted = inspect.signature(owner.get_image_features).parameters
    with torch.no_grad():
        found = owner.get_image_features(**{n: v.clone() for n, v in make.made.items() if n in wanted})
    found = getattr(found, "pooler_output", None) if getattr(found, "pooler_output", None) is not None else found
    found = getattr(found, "last_hidden_state", found)
    width = make.config.get_text_config().hidden_size
    count = (
        sum(t.numel() for t in torch.utils._pytree.tree_leaves(found) if isinstance(t, torch.Tensor))
        // width
        // make.samples
    )
    text(make, LENGTH + count)
    make.made["input_ids"][:, 2 : 2 + count] = token
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in make.names and "image_grid_thw" in make.names:
            make.made[name] = (make.made["input_ids"] == token).int()


def image_shape(make: Inputs) -> tuple[int, ...]:
    channels = make.find("num_channels", "in_channels", "in_chans", default=3)
    size = make.find("image_size", "img_size", default=32)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return channels, height, width


FEATURES_LAST = ("Parakeet", "Lasr", "Canary", "Cohere", "Nemotron", "Wav2Vec2Bert", "Seamless", "Speech2Text")


def feature_shape(make: Inputs) -> tuple[int, ...]:
    bins = make.find(
        "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", default=80
    )
    positions = make.find("max_source_positions")
    if "attention_mask" in make.names and "input_ids" not in make.names and make.name.startswith(("Parakeet", "Lasr")):
        make.made["attention_mask"] = torch.ones(make.samples, FRAMES, dtype=torch.bool)
    if make.name.startswith("Whisper"):
        return bins, 2 * positions
    return FRAMES, bins


CLASSES_OF_SAMPLES = (
    "ForImageClassification", "ForAudioClassification", "ForSequenceClassification", "ForXVector",
    "ForVideoClassification", "ForImageClassificationWithTeacher", "ForMultipleChoice",
)  # fmt: skip
OWN_LOSS_OF_OUTPUTS = (
    "ForObjectDetection",
    "ForUniversalSegmentation",
    "ForInstanceSegmentation",
    "DetrForSegmentation",
)
"""Classes whose labels are lists of boxes or masks: their loss here is one of the outputs."""


def labels(make: Inputs) -> None:
    """Labels by the task that the name of the class tells."""
    made, name = make.made, make.name
    count = getattr(make.config, "num_labels", 2)
    if "labels" in make.names and not name.endswith(OWN_LOSS_OF_OUTPUTS):
        if name.endswith(CLASSES_OF_SAMPLES) or "ForImageClassification" in name:
            made["labels"] = make.integers(count)
        elif name.endswith("ForTokenClassification"):
            made["labels"] = make.integers(count, LENGTH)
        elif name.endswith("ForCTC"):
            made["labels"] = make.integers(min(20, make.find("vocab_size")), 4, low=1)
        elif name.endswith("ForSemanticSegmentation"):
            made["labels"] = make.integers(count, *image_shape(make)[1:])
        elif getattr(make.config, "is_encoder_decoder", False) and not name.endswith("ForCausalLM"):
            known = min(VOCABULARY, make.find("vocab_size", default=VOCABULARY))
            made["labels"] = make.integers(known - 20, LENGTH // 2, low=8)
        elif "input_ids" in made:
            made["labels"] = made["input_ids"].clone()
    if "start_positions" in make.names:
        made["start_positions"] = make.integers(LENGTH)
        made["end_positions"] = make.integers(LENGTH)
    if "next_sentence_label" in make.names:
        made["next_sentence_label"] = make.integers(2)
    if "return_loss" in make.names:
        made["return_loss"] = True


def _speech(make: Inputs) -> dict[str, Any]:
    text(make, LENGTH)
    bins = make.config.num_mel_bins
    speaker = make.numbers(make.config.speaker_embedding_dim)
    return make.made | {"labels": make.numbers(LENGTH, bins), "speaker_embeddings": speaker}


SPECIAL["SpeechT5ForTextToSpeech"] = _speech


def _own(output: Any) -> torch.Tensor | None:
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor) and found.numel() == 1:
        return found.reshape(())
    return None


def loss_of(model: Callable[..., Any], given: Mapping[str, Any]) -> torch.Tensor:
    """The model's own loss; the mean square of what it returns where it has none."""
    return loss_in(model(**given))


def loss_in(output: Any) -> torch.Tensor:
    """The loss in what a model returned; see `loss_of`."""
    loss = _own(output)
    if loss is not None:
        return loss
    total: torch.Tensor | None = None
    for tensor in floats_in(output):
        part = tensor.float().pow(2).mean()
        total = part if total is None else total + part
    if total is None:
        raise ValueError(f"the model returns no floating tensor that depends on a parameter: {type(output).__name__}")
    return total


def floats_in(output: Any) -> list[torch.Tensor]:
    """The floating tensors that depend on a parameter; all of them where no gradients are recorded."""
    every = not torch.is_grad_enabled()
    leaves = torch.utils._pytree.tree_leaves(dict(output) if isinstance(output, Mapping) else output)
    found = [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point() and (every or t.requires_grad)]
    return list({id(t): t for t in found}.values())
