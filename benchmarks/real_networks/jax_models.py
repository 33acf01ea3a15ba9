"""Models of JAX libraries: Equinox, Haiku, Linen and NNX, as their users would write the loss."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

SAMPLES, CLASSES, VOCABULARY, LENGTH = 4, 5, 32, 10


@dataclass(frozen=True, slots=True)
class Made:
    """A model to train.

    Attributes:
        model: an NNX module, or a pytree of parameters.
        batch: arrays of `SAMPLES` samples.
        loss: as `shardwright.jax.train_step` takes it.
        state: what the loss function is handed as ``state=``.
        is_coupled: whether a microbatch is meant to be taken by itself, as batch norms do.
    """

    model: Any
    batch: dict[str, Any]
    loss: Callable[..., Any]
    state: Any = None
    is_coupled: bool = False


BUILDERS: dict[str, Callable[[], Made]] = {}
"""By ``package:model``, where the package is what is imported."""


def built_by(package: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def register(function: Callable[[], Made]) -> Callable[[], Made]:
        BUILDERS[f"{package}:{function.__name__}"] = function
        return function

    return register


def images(size: int = 32, channels: int = 3) -> dict[str, Any]:
    """Of the form that Linen and NNX take, channels last."""
    drawn = np.random.default_rng(0)
    return {
        "x": drawn.standard_normal((SAMPLES, size, size, channels), np.float32),
        "y": drawn.integers(0, CLASSES, SAMPLES),
    }


def texts() -> dict[str, Any]:
    return {"x": np.random.default_rng(0).integers(1, VOCABULARY, (SAMPLES, LENGTH))}


def classified(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def continued(logits: Any, batch: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], batch["x"][:, 1:]).mean()


# Equinox --------------------------------------------------------------------------------------------------------------


def equinox_classifier(model: Any, batch: dict[str, Any], wants_key: bool = False) -> Made:
    """An Equinox model of one sample, channels first, in inference mode: its arrays are trained, the rest is not."""
    import equinox as eqx

    params, static = eqx.partition(eqx.nn.inference_mode(model), eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> Any:
        whole = eqx.combine(params, static)
        given = {"key": jax.random.key(0)} if wants_key else {}
        made = jax.vmap(lambda x: whole(x, **given))(batch["x"])
        return classified(made[0] if isinstance(made, tuple) else made, batch)

    return Made(params, batch, loss)


def channels_first(batch: dict[str, Any]) -> dict[str, Any]:
    return {**batch, "x": np.ascontiguousarray(np.moveaxis(batch["x"], -1, 1))}


@built_by("equinox")
def mlp() -> Made:
    import equinox as eqx

    model = eqx.nn.MLP(12, CLASSES, 32, 4, key=jax.random.key(0))
    drawn = np.random.default_rng(0)
    batch = {"x": drawn.standard_normal((SAMPLES, 12), np.float32), "y": drawn.integers(0, CLASSES, SAMPLES)}
    return equinox_classifier(model, batch)


@built_by("esm2quinox")
def esm2() -> Made:
    import equinox as eqx
    from esm2quinox import ESM2

    params, static = eqx.partition(ESM2(3, 32, 2, False, key=jax.random.key(0)), eqx.is_inexact_array)

    def loss(params: Any, batch: Any) -> Any:
        return continued(jax.vmap(eqx.combine(params, static))(batch["x"]).logits, batch)

    return Made(params, texts(), loss)


@built_by("equimo")
def vision_transformer() -> Made:
    from equimo.models import VisionTransformer

    model = VisionTransformer(
        img_size=16, in_channels=3, dim=32, patch_size=4, num_heads=[2], depths=[3], num_classes=CLASSES,
        key=jax.random.key(0),
    )  # fmt: skip
    return equinox_classifier(model, channels_first(images(16)), wants_key=True)


@built_by("equimo")
def convnext() -> Made:
    from equimo.models import ConvNeXt

    model = ConvNeXt(3, depths=[1, 1, 2, 1], dims=[16, 24, 32, 48], num_classes=CLASSES, key=jax.random.key(0))
    return equinox_classifier(model, channels_first(images()), wants_key=True)


@built_by("jaxonmodels")
def vit() -> Made:
    from jaxonmodels.models.vit import VisionTransformer

    model = VisionTransformer(16, 4, 32, 3, 2, CLASSES, key=jax.random.key(0), dtype=jnp.float32)
    return equinox_classifier(model, channels_first(images(16)))


# Haiku ----------------------------------------------------------------------------------------------------------------


def haiku_model(forward: Callable[[Any], Any], batch: dict[str, Any], judge: Callable[..., Any], coupled: bool) -> Made:
    """A function of a batch's input, transformed: its state and random keys are handed to it in every call."""
    import haiku as hk

    made = hk.transform_with_state(forward)
    params, state = jax.jit(made.init)(jax.random.key(0), batch["x"])

    def stateful(params: Any, batch: Any, *, rngs: Any, state: Any) -> Any:
        output, state = made.apply(params, state, rngs, batch["x"])
        return judge(output, batch), state

    def stateless(params: Any, batch: Any, *, rngs: Any) -> Any:
        return judge(made.apply(params, state, rngs, batch["x"])[0], batch)

    return Made(params, batch, stateful, state, coupled) if state else Made(params, batch, stateless)


@built_by("haiku")
def mlp_with_dropout() -> Made:
    import haiku as hk

    def forward(x: Any) -> Any:
        return hk.nets.MLP([32, 32, 32, CLASSES])(x.reshape(len(x), -1), 0.1, hk.next_rng_key())

    return haiku_model(forward, images(8), classified, coupled=False)


@built_by("haiku")
def resnet() -> Made:
    import haiku as hk

    def forward(x: Any) -> Any:
        model = hk.nets.ResNet(
            (1, 1, 1, 1), CLASSES, channels_per_group=(16, 16, 32, 32), bottleneck=False, resnet_v2=True
        )
        return model(x, is_training=True)

    return haiku_model(forward, images(), classified, coupled=True)


@built_by("haiku")
def mobilenet() -> Made:
    import haiku as hk

    def forward(x: Any) -> Any:
        return hk.nets.MobileNetV1(strides=(1, 2, 1), channels=(16, 16, 32), num_classes=CLASSES)(x, is_training=True)

    return haiku_model(forward, images(), classified, coupled=True)


@built_by("haiku")
def transformer_example() -> Made:
    """The language model of the examples that come with dm-haiku."""
    import haiku as hk

    path = Path(hk.__file__).parents[1] / "examples" / "transformer" / "model.py"
    spec = importlib.util.spec_from_file_location("haiku_transformer", path)
    if spec is None or spec.loader is None or not path.exists():
        raise ImportError("dm-haiku came without its examples", name="haiku")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)

    def forward(x: Any) -> Any:
        stack = example.Transformer(num_heads=2, num_layers=3, attn_size=16, dropout_rate=0.1)
        return example.LanguageModel(stack, 32, VOCABULARY, pad_token=0)(x)

    return haiku_model(forward, texts(), continued, coupled=False)


@built_by("haiku")
def lstm() -> Made:
    import haiku as hk

    def forward(x: Any) -> Any:
        embedded = hk.Embed(VOCABULARY, 32)(x)
        stack = hk.DeepRNN([hk.LSTM(32), jax.nn.relu, hk.LSTM(32)])
        found, _ = hk.dynamic_unroll(stack, embedded, stack.initial_state(len(x)), time_major=False)
        return hk.BatchApply(hk.Linear(VOCABULARY))(found)

    return haiku_model(forward, texts(), continued, coupled=False)


@built_by("jraph")
def graph_network() -> Made:
    import haiku as hk
    import jraph

    nodes, edges = 6, 12

    def forward(x: Any) -> Any:
        def update(*features: Any) -> Any:
            return hk.nets.MLP([16, 16])(jnp.concatenate([f for f in features if f is not None], -1))

        rounds = [
            jraph.GraphNetwork(jraph.concatenated_args(lambda f: hk.nets.MLP([16, 16])(f)),
                               jraph.concatenated_args(lambda f: hk.nets.MLP([16, 16])(f)))
            for _ in range(3)
        ]  # fmt: skip
        count = len(x["nodes"])
        first = (jnp.arange(count) * nodes)[:, None]
        graph = jraph.GraphsTuple(
            nodes=x["nodes"].reshape(count * nodes, -1), edges=x["edges"].reshape(count * edges, -1),
            senders=(x["senders"] + first).reshape(-1), receivers=(x["receivers"] + first).reshape(-1), globals=None,
            n_node=jnp.full(count, nodes), n_edge=jnp.full(count, edges),
        )  # fmt: skip
        for one in rounds:
            graph = one(graph)
        pooled = graph.nodes.reshape(count, nodes, -1).mean(1)
        return hk.Linear(CLASSES)(pooled)

    drawn = np.random.default_rng(0)
    x = {
        "nodes": drawn.standard_normal((SAMPLES, nodes, 8), np.float32),
        "edges": drawn.standard_normal((SAMPLES, edges, 4), np.float32),
        "senders": drawn.integers(0, nodes, (SAMPLES, edges)), "receivers": drawn.integers(0, nodes, (SAMPLES, edges)),
    }  # fmt: skip
    return haiku_model(forward, {"x": x, "y": drawn.integers(0, CLASSES, SAMPLES)}, classified, coupled=False)


# Linen ----------------------------------------------------------------------------------------------------------------


def linen_model(
    module: Any, batch: dict[str, Any], judge: Callable[..., Any] = classified, *more: Any, **options: Any
) -> Made:
    """A Linen module: its parameters are trained, its batch statistics are state."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(lambda keys: module.init(keys, batch["x"], *more, **options))(keys)
    params = variables["params"]
    state = {name: collection for name, collection in variables.items() if name != "params"}

    def stateful(params: Any, batch: Any, *, rngs: Any, state: Any) -> Any:
        output, state = module.apply(
            {"params": params, **state}, batch["x"], *more, rngs={"dropout": rngs}, mutable=list(state), **options
        )
        return judge(output, batch), state

    def stateless(params: Any, batch: Any, *, rngs: Any) -> Any:
        output = module.apply({"params": params}, batch["x"], *more, rngs={"dropout": rngs}, **options)
        return judge(output, batch)

    return Made(params, batch, stateful, state, is_coupled=True) if state else Made(params, batch, stateless)


@built_by("jax_resnet")
def resnet_d() -> Made:
    import jax_resnet

    return linen_model(
        jax_resnet.ResNet(
            block_cls=jax_resnet.ResNetDBlock, stage_sizes=[1, 1], n_classes=CLASSES, hidden_sizes=(16, 32),
            stem_cls=jax_resnet.ResNetDStem,
        ),
        images(),
    )  # fmt: skip


@built_by("jax_models")
def mlp_mixer() -> Made:
    from jax_models.models.mlp_mixer import MLPMixer

    model = MLPMixer(8, 3, 32, 48, 48, attach_head=True, num_classes=CLASSES, deterministic=False)
    return linen_model(model, images())


@built_by("jax_models")
def conv_mixer() -> Made:
    from jax_models.models.conv_mixer import ConvMixer

    return linen_model(ConvMixer(32, 4, 3, 3, num_classes=CLASSES), images(), classified, False)


@built_by("flaxmodels")
def flax_resnet() -> Made:
    import flaxmodels

    return linen_model(
        flaxmodels.ResNet18(output="logits", pretrained=None, normalize=False, num_classes=CLASSES), images()
    )


@built_by("flaxdiff")
def unet() -> Made:
    from flaxdiff.models.simple_unet import Unet

    model = Unet(emb_features=32, feature_depths=[16, 32], num_res_blocks=1, attention_configs=[None, {"heads": 2}])
    drawn = np.random.default_rng(0)
    batch = {
        "x": drawn.standard_normal((SAMPLES, 16, 16, 3), np.float32), "t": drawn.random(SAMPLES, np.float32),
        "text": drawn.standard_normal((SAMPLES, 4, 32), np.float32),
        "target": drawn.standard_normal((SAMPLES, 16, 16, 3), np.float32),
    }  # fmt: skip
    params = model.init(jax.random.key(0), batch["x"], batch["t"], batch["text"])

    def loss(params: Any, batch: Any) -> Any:
        return ((model.apply(params, batch["x"], batch["t"], batch["text"]) - batch["target"]) ** 2).mean()

    return Made(params, batch, loss)


# NNX ------------------------------------------------------------------------------------------------------------------


@built_by("attnax")
def encoder() -> Made:
    import attnax

    config = attnax.TransformerConfig(
        vocab_size=VOCABULARY, d_model=32, num_heads=2, num_layers=3, d_ff=64, dropout_rate=0.0, max_len=LENGTH
    )
    model = attnax.TransformerEncoder(nnx.Rngs(0), config)
    project = jnp.asarray(np.random.default_rng(1).standard_normal((32, VOCABULARY), np.float32)) / 6

    def loss(model: Any, batch: Any) -> Any:
        return continued(model(batch["x"], deterministic=True) @ project, batch)

    return Made(model, texts(), loss)


@built_by("attnax")
def nnx_vision() -> Made:
    import attnax

    config = attnax.VisionTransformerConfig(
        image_size=16, patch_size=4, num_channels=3, num_classes=CLASSES, d_model=32, num_heads=2, num_layers=3,
        d_ff=64, dropout_rate=0.0,
    )  # fmt: skip
    model = attnax.VisionTransformer(nnx.Rngs(0), config)
    return Made(model, images(16), lambda model, batch: classified(model(batch["x"], deterministic=True), batch))
