"""The layers of `torch.nn`, each in a small model: what `memory_modules.py` measures."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH = 8


def layer_classes() -> set[str]:
    """The names of all classes of `torch.nn` that are modules."""
    return {name for name, value in inspect.getmembers(nn, inspect.isclass) if issubclass(value, nn.Module)}


@dataclass(frozen=True)
class Case:
    """A layer, the value that it is given and what else it takes.

    Attributes:
        name: the class of torch.nn.
        build: makes the layer.
        shape: of one sample of the value.
        others: further arguments of the layer by name: a shape of one sample (random floats), or a function from the
            batch size to a tensor.
        call: how the layer is called, from (layer, value, others) to what the loss is taken of.
        note: what tells the cases of one class apart.
    """

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    others: dict[str, Any] = field(default_factory=dict)
    call: Callable[..., Any] = lambda layer, value, **others: layer(value, *others.values())
    note: str = ""

    @property
    def title(self) -> str:
        return f"{self.name}, {self.note}" if self.note else self.name

    def batch(self, size: int = BATCH) -> dict[str, torch.Tensor]:
        made = {"value": torch.rand(size, *self.shape)}
        for name, other in self.others.items():
            made[name] = other(size) if callable(other) else torch.rand(size, *other)
        return made


class Layered(nn.Module):
    """A layer between a value that needs a gradient and a loss: a scale for each entry of the last dim before it, and
    one of each entry of its last dim behind it."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.call = case.call
        self.before = nn.Parameter(torch.rand(case.shape[-1]))
        self.layer = case.build()
        with torch.no_grad():
            made = self._run(case.batch(2))
        self.behind = nn.Parameter(torch.rand(made.shape[-1])) if made.dim() > 1 else None

    def _run(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        value = batch.pop("value") * self.before
        made = self.call(self.layer, value, **batch)
        while not isinstance(made, torch.Tensor):
            made = made[0]
        return made

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        made = self._run(dict(batch))
        if self.behind is None:
            return made.mean()
        return (made * self.behind).square().mean()


def _integers(below: int, *shape: int) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.randint(0, below, (size, *shape))


def _signs(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda size: torch.randint(0, 2, (size, *shape)).float() * 2 - 1


ROWS = (64, 512)  # one MiB of 8 samples
SIGNAL, IMAGE, VOLUME = (32, 1024), (32, 32, 32), (16, 8, 16, 16)

CASES: list[Case] = []


def _add(name: str, *arguments: Any, shape: tuple[int, ...] = ROWS, note: str = "", others: Any = None,
         call: Any = None, **options: Any) -> None:  # fmt: skip
    extra: dict[str, Any] = {"call": call} if call is not None else {}
    CASES.append(Case(name, lambda: getattr(nn, name)(*arguments, **options), shape, others or {}, note=note, **extra))


# Activations, dropout, and the like.
for _name in ("CELU", "ELU", "GELU", "GLU", "Hardshrink", "Hardsigmoid", "Hardswish", "Hardtanh", "Identity",
              "LeakyReLU", "LogSigmoid", "Mish", "PReLU", "RReLU", "ReLU", "ReLU6", "SELU", "SiLU", "Sigmoid",
              "Softplus", "Softshrink", "Softsign", "Tanh", "Tanhshrink", "Flatten", "Dropout", "AlphaDropout",
              "FeatureAlphaDropout"):  # fmt: skip
    _add(_name)
_add("GELU", approximate="tanh", note="tanh")
_add("ReLU", inplace=True, note="in place")
_add("SiLU", inplace=True, note="in place")
_add("PReLU", 64, note="a slope for each of 64")
_add("Threshold", 0.1, 0.2)
for _name in ("LogSoftmax", "Softmax", "Softmin"):
    _add(_name, dim=-1)
_add("Softmax2d", shape=IMAGE)
_add("Dropout1d", shape=SIGNAL)
_add("Dropout2d", shape=IMAGE)
_add("Dropout3d", shape=VOLUME)
_add("Unflatten", 2, (16, 32))

# Products.
_add("Linear", 512, 512)
_add("Linear", 512, 512, bias=False, note="without bias")
_add("LazyLinear", 512)
_add("Bilinear", 64, 48, 32, shape=(64, 64), others={"other": (64, 48)})

# Convolutions.
for _d, _shape in (("1d", SIGNAL), ("2d", IMAGE), ("3d", VOLUME)):
    _c = _shape[0]
    _add(f"Conv{_d}", _c, 48, 3, padding=1, shape=_shape)
    _add(f"Conv{_d}", _c, _c, 3, padding=1, groups=_c, shape=_shape, note="depthwise")
    _add(f"Conv{_d}", _c, 48, 3, padding=1, padding_mode="circular", shape=_shape, note="circular padding")
    _add(f"ConvTranspose{_d}", _c, 24, 3, stride=2, shape=_shape)
    _add(f"LazyConv{_d}", 48, 3, shape=_shape)
    _add(f"LazyConvTranspose{_d}", 24, 3, shape=_shape)
    # Normalisations.
    _add(f"BatchNorm{_d}", _c, shape=_shape)
    _add(f"LazyBatchNorm{_d}", shape=_shape)
    _add(f"InstanceNorm{_d}", _c, shape=_shape)
    _add(
        f"InstanceNorm{_d}", _c, affine=True, track_running_stats=True, shape=_shape, note="affine, running statistics"
    )
    _add(f"LazyInstanceNorm{_d}", shape=_shape)
    # Pooling.
    for _kind in ("Max", "Avg"):
        _add(f"{_kind}Pool{_d}", 2, shape=_shape)
        _add(f"Adaptive{_kind}Pool{_d}", 4, shape=_shape)
    _add(f"MaxPool{_d}", 3, stride=1, padding=1, shape=_shape, note="overlapping")
    _add(f"LPPool{_d}", 2, 2, shape=_shape)
    _add(f"MaxUnpool{_d}", 2, shape=_shape, others={"places": (lambda shape: lambda size: getattr(
        nn.functional, f"max_pool{len(shape) - 1}d")(torch.rand(size, shape[0], *(2 * s for s in shape[1:])), 2,
        return_indices=True)[1])(_shape)})  # fmt: skip
    if _d != "1d":
        _add(f"FractionalMaxPool{_d}", 2, output_ratio=0.5, shape=_shape)
    # Padding.
    for _kind in ("Circular", "Reflection", "Replication", "Zero"):
        _add(f"{_kind}Pad{_d}", 2, shape=_shape)
    _add(f"ConstantPad{_d}", 2, 1.0, shape=_shape)
_add("BatchNorm2d", 32, affine=False, shape=IMAGE, note="not affine")
_add("BatchNorm1d", 512, shape=(512,), note="rows alone")
_add("LayerNorm", 512)
_add("LayerNorm", 512, elementwise_affine=False, note="not affine")
_add("RMSNorm", 512)
_add("GroupNorm", 4, 32, shape=IMAGE)
_add("LocalResponseNorm", 3, shape=IMAGE)
_add("CrossMapLRN2d", 3, shape=IMAGE)

# Positions.
_add("PixelShuffle", 2, shape=IMAGE)
_add("PixelUnshuffle", 2, shape=IMAGE)
_add("ChannelShuffle", 4, shape=IMAGE)
_add("Fold", (32, 32), 2, stride=2, shape=(64, 256))
_add("Unfold", 3, padding=1, shape=(8, 32, 32))
for _mode, _shape in (("nearest", SIGNAL), ("linear", SIGNAL), ("nearest", IMAGE), ("bilinear", IMAGE),
                      ("bicubic", IMAGE), ("nearest", VOLUME), ("trilinear", VOLUME)):  # fmt: skip
    _add("Upsample", scale_factor=2, mode=_mode, shape=_shape, note=f"{_mode}, {len(_shape) - 1} dims")
_add("UpsamplingBilinear2d", scale_factor=2, shape=IMAGE)
_add("UpsamplingNearest2d", scale_factor=2, shape=IMAGE)

# Look-ups: their value is added, as they read none.
for _name in ("Embedding", "EmbeddingBag"):
    for _mode in ("mean", "sum", "max") if _name == "EmbeddingBag" else ("",):
        _add(_name, 4096, 512, **({"mode": _mode} if _mode else {}), note=_mode,
             shape=(512,) if _mode else ROWS, others={"rows": _integers(4096, 64)},
             call=lambda layer, value, rows: layer(rows) + value)  # fmt: skip


# Recurrent layers.
def _packed(layer: nn.Module, value: torch.Tensor) -> torch.Tensor:
    lengths = torch.full((len(value),), value.shape[1])
    packed, _ = layer(pack_padded_sequence(value, lengths, batch_first=True))
    return pad_packed_sequence(packed, batch_first=True)[0]


def _cells(layer: nn.Module, value: torch.Tensor) -> torch.Tensor:
    state, made = None, []
    for step in value.unbind(1):
        state = layer(step, state)
        made.append(state[0] if isinstance(state, tuple) else state)
    return torch.stack(made, 1)


SEQUENCE = (32, 128)
for _name in ("LSTM", "GRU", "RNN"):
    _add(_name, 128, 256, batch_first=True, shape=SEQUENCE)
    _add(_name, 128, 256, num_layers=2, batch_first=True, shape=SEQUENCE, note="2 layers")
    _add(_name, 128, 128, bidirectional=True, batch_first=True, shape=SEQUENCE, note="both directions")
    _add(_name, 128, 128, num_layers=2, dropout=0.1, batch_first=True, shape=SEQUENCE, note="2 layers, dropout")
    _add(_name, 128, 128, bias=False, batch_first=True, shape=SEQUENCE, note="without bias")
    _add(_name, 128, 256, batch_first=True, shape=SEQUENCE, call=_packed, note="packed")
    _add(f"{_name}Cell", 128, 256, shape=SEQUENCE, call=_cells)
_add("RNN", 128, 256, nonlinearity="relu", batch_first=True, shape=SEQUENCE, note="relu")
_add("LSTM", 128, 256, proj_size=64, batch_first=True, shape=SEQUENCE, note="projected")


# Attention.
def _attended(layer: nn.Module, value: torch.Tensor) -> Any:
    return layer(value, value, value, need_weights=False)


TOKENS = (128, 128)
_add("MultiheadAttention", 128, 4, batch_first=True, shape=TOKENS, call=_attended)
_add("MultiheadAttention", 128, 4, batch_first=True, shape=TOKENS, note="with weights",
     call=lambda layer, value: layer(value, value, value))  # fmt: skip
_add("MultiheadAttention", 128, 4, dropout=0.1, batch_first=True, shape=TOKENS, call=_attended, note="dropout")
for _p in (0.0, 0.1):
    _note = "dropout" if _p else ""
    _add("TransformerEncoderLayer", 128, 4, 256, _p, batch_first=True, shape=TOKENS, note=_note)
    _add("TransformerDecoderLayer", 128, 4, 256, _p, batch_first=True, shape=TOKENS, note=_note,
         others={"memory": TOKENS})  # fmt: skip
    CASES.append(Case("TransformerEncoder", lambda p=_p: nn.TransformerEncoder(  # type: ignore[misc]
        nn.TransformerEncoderLayer(128, 4, 256, p, batch_first=True), 2), TOKENS, note=_note))  # fmt: skip
    CASES.append(Case("TransformerDecoder", lambda p=_p: nn.TransformerDecoder(  # type: ignore[misc]
        nn.TransformerDecoderLayer(128, 4, 256, p, batch_first=True), 2), TOKENS, {"memory": TOKENS},
        note=_note))  # fmt: skip
    _add("Transformer", 128, 4, 1, 1, 256, _p, batch_first=True, shape=TOKENS, note=_note, others={"target": TOKENS})
_add("TransformerEncoderLayer", 128, 4, 256, 0.0, "gelu", norm_first=True, batch_first=True, shape=TOKENS,
     note="gelu, norm first")  # fmt: skip

# Distances and losses.
_add("CosineSimilarity", -1, others={"other": ROWS})
_add("PairwiseDistance", others={"other": ROWS})
for _name in ("BCELoss", "BCEWithLogitsLoss", "HuberLoss", "L1Loss", "MSELoss", "SmoothL1Loss", "PoissonNLLLoss",
              "KLDivLoss", "SoftMarginLoss"):  # fmt: skip
    _add(_name, others={"target": ROWS})
_add("MSELoss", reduction="none", note="no reduction", others={"target": ROWS})
_add("GaussianNLLLoss", others={"target": ROWS, "variance": ROWS})
_add("HingeEmbeddingLoss", others={"target": _signs(*ROWS)})
_add("CosineEmbeddingLoss", shape=(32768,), others={"other": (32768,), "target": _signs()})
_add("MarginRankingLoss", others={"other": ROWS, "target": _signs(*ROWS)})
_add("TripletMarginLoss", others={"positive": ROWS, "negative": ROWS})
_add("TripletMarginWithDistanceLoss", others={"positive": ROWS, "negative": ROWS})
_add("CrossEntropyLoss", shape=(512, 64), others={"target": _integers(512, 64)})
_add(
    "CrossEntropyLoss", shape=(32768,), note="label smoothing", label_smoothing=0.1, others={"target": _integers(32768)}
)
_add("CrossEntropyLoss", shape=(32768,), note="probabilities", others={"target": (32768,)})
_add("NLLLoss", shape=(32768,), others={"target": _integers(32768)})
_add("NLLLoss2d", shape=IMAGE, others={"target": _integers(32, 32, 32)})
_add("MultiLabelMarginLoss", shape=(2048,), others={"target": lambda size: torch.full((size, 2048), -1).index_fill(
    1, torch.arange(3), 5)})  # fmt: skip
_add("MultiLabelSoftMarginLoss", shape=(32768,), others={"target": _integers(2, 32768)})
_add("MultiMarginLoss", shape=(32768,), others={"target": _integers(32768)})
_add("CTCLoss", shape=(128, 256), others={"target": lambda size: torch.randint(1, 256, (size, 30))},
     call=lambda layer, value, target: layer(value.log_softmax(-1).transpose(0, 1), target,
                                             [value.shape[1]] * len(value), [30] * len(value)))  # fmt: skip
_add("AdaptiveLogSoftmaxWithLoss", 256, 4096, [512, 2048], shape=(256,), others={"target": _integers(4096)},
     call=lambda layer, value, target: layer(value, target).loss)  # fmt: skip
_add("LinearCrossEntropyLoss", 256, 4096, shape=(256,), others={"target": _integers(4096)})
_add("SyncBatchNorm", 32, shape=IMAGE)

NO_LAYERS = {
    "Module": "the base class",
    "Container": "a base class that is deprecated and adds nothing",
    "RNNBase": "the base class of LSTM, GRU and RNN",
    "RNNCellBase": "the base class of their cells",
    "Sequential": "a container: it runs what it holds",
    "ModuleList": "a container without a forward pass",
    "ModuleDict": "a container without a forward pass",
    "ParameterList": "a container without a forward pass",
    "ParameterDict": "a container without a forward pass",
    "DataParallel": "a way to run several GPUs from one process, in place of a plan",
}
"""The modules that are not tried, each with the reason."""
