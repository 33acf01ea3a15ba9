"""What AWS's scripts find in the place of what is not there: packages that need a GPU or a cloud, and their data.

Packages that only raise where they are used: ``flash_attn``, and ``amp_C``, ``apex_C`` and ``apex``, which the script
for BERT imports and does not use in float32. Packages that answer: ``torchvision`` (MNIST and three transforms) and
``torchnet`` (the dataset of a share), ``datasets`` (lines of text from a folder) and ``smart_open``, ``boto3`` and the
command ``aws``, for which every bucket is there and every copy done.
"""

import gzip
import json
import pydoc_data.topics
import random
from pathlib import Path

import numpy as np

HUB, COMMIT = "tiiuae/falcon-7b", "0" * 40
"""The model of Hugging Face's hub whose configuration the script for Falcon loads, and a commit of it."""
_RAISING = """
def __getattr__(name):
    raise AttributeError(name) if name.startswith("__") else RuntimeError(f"{__name__}.{name} needs a GPU")
"""
_PACKAGES = {
    "flash_attn/__init__.py": "",
    "flash_attn/flash_attention.py": (
        "class FlashAttention:\n    def __init__(self, *_, **__):\n        raise RuntimeError('it needs a GPU')\n"
    ),
    "amp_C.py": _RAISING,
    "apex_C.py": _RAISING,
    "apex/__init__.py": "",
    "apex/amp.py": f"class _amp_state:\n    pass\n\n{_RAISING}",
    "apex/parallel/__init__.py": "class DistributedDataParallel:\n    pass\n",
    "apex/parallel/distributed.py": "def flat_dist_call(*_):\n    raise RuntimeError('it needs a GPU')\n",
    "torchnet/__init__.py": "",
    "torchnet/dataset.py": """
from torch.utils.data import Dataset


class SplitDataset(Dataset):
    def __init__(self, dataset, partitions):
        self.dataset, self.partitions, self.chosen = dataset, partitions, range(len(dataset))

    def select(self, name):
        names = list(self.partitions)
        ends = [sum(self.partitions[one] for one in names[: at + 1]) for at in range(len(names))]
        ends = [0, *(round(end * len(self.dataset)) for end in ends)]
        self.chosen = range(*ends[names.index(name) :][:2])

    def __len__(self):
        return len(self.chosen)

    def __getitem__(self, at):
        return self.dataset[self.chosen[at]]
""",
    "torchvision/__init__.py": "",
    "torchvision/datasets.py": """
import numpy as np
import torch
from pathlib import Path


class MNIST(torch.utils.data.Dataset):
    def __init__(self, root, train=True, transform=None, download=False):
        with np.load(Path(root) / ("train.npz" if train else "test.npz")) as file:
            self.images, self.labels, self.transform = file["images"], file["labels"], transform

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, at):
        return self.transform(self.images[at]), int(self.labels[at])
""",
    "torchvision/transforms.py": """
import torch


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, item):
        for one in self.transforms:
            item = one(item)
        return item


class ToTensor:
    def __call__(self, item):
        return torch.from_numpy(item).float().div(255)[None]


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = torch.tensor(mean)[:, None, None], torch.tensor(std)[:, None, None]

    def __call__(self, item):
        return (item - self.mean) / self.std
""",
    "smart_open.py": "from builtins import open\n",
    "datasets.py": """
from pathlib import Path


class Dataset:
    def __init__(self, columns):
        self.columns, self.column_names = columns, list(columns)

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, at):
        return {name: held[at] for name, held in self.columns.items()}

    def map(self, function, **_):
        return Dataset(dict(function(self.columns)))

    def select(self, rows):
        return Dataset({name: [held[row] for row in rows] for name, held in self.columns.items()})


class Datasets(dict):
    def map(self, function, **_):
        return Datasets({kind: one.map(function) for kind, one in self.items()})


def load_dataset(name, *_, **__):
    files = {kind: Path(name) / f"{kind}.txt" for kind in ("train", "validation")}
    return Datasets({kind: Dataset({"text": file.read_text().splitlines()}) for kind, file in files.items()})


def load_from_disk(*_, **__):
    raise RuntimeError("there is nothing on the disk")


load_metric = load_from_disk
""",
    "boto3.py": """
from types import SimpleNamespace


def resource(name):
    return SimpleNamespace(meta=SimpleNamespace(client=SimpleNamespace(head_bucket=lambda Bucket: {})))
""",
    "botocore/__init__.py": "from botocore import exceptions\n",
    "botocore/exceptions.py": "class ClientError(Exception):\n    pass\n",
}


def packages(where: Path) -> tuple[Path, Path]:
    """The folder of packages and that of commands, written once."""
    there, commands = where / "packages", where / "commands"
    if not there.exists():
        for name, text in _PACKAGES.items():
            (there / name).parent.mkdir(parents=True, exist_ok=True)
            (there / name).write_text(text, encoding="utf-8")
        commands.mkdir()
        (commands / "aws").write_text("#!/bin/sh\n", encoding="utf-8")
        (commands / "aws").chmod(0o755)
    return there, commands


def tokens(folder: Path) -> None:
    """Files of tokens of a few hundred lines of Python's own documentation, as the scripts for GPT and T5 read them."""
    text = " ".join(pydoc_data.topics.topics.values()).encode()
    for name in ("train", "test"):
        (folder / name).mkdir()
        for part in range(2):
            with gzip.open(folder / name / f"part{part}.json.gz", "wt") as out:
                for line in range(64):
                    at = random.Random(f"{name}{part}{line}").randrange(len(text) - 40)
                    tokens = [byte % 97 for byte in text[at : at + 32]]
                    out.write(json.dumps({"input_ids": tokens, "attention_mask": [1] * 32}) + "\n")


def hub(folder: Path, script: Path) -> None:
    """A cache of Hugging Face's hub with a small configuration of Falcon, of the class beside the script."""
    cached = folder / "hub" / "hub" / f"models--{HUB.replace('/', '--')}"
    source = script.parent / "configuration_RW.py"
    if cached.exists() or not source.exists():
        return
    snapshot = cached / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(COMMIT)
    (snapshot / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    (snapshot / "config.json").write_text(json.dumps({
        "model_type": "RefinedWeb", "auto_map": {"AutoConfig": "configuration_RW.RWConfig"}, "vocab_size": 100,
        "parallel_attn": True, "bias": False, "new_decoder_architecture": True,
    }))  # fmt: skip


def images(folder: Path, copies: int) -> None:
    """Images with labels as the script for MNIST finds them in ``../data``; each of ``copies`` shares of those for
    training is the same, so that replicas see what one process sees."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for name, count in (("train", 64 * 21), ("test", 128)):
        labels = draw.integers(0, 10, count)
        drawn = draw.integers(0, 64, (count, 28, 28), dtype=np.uint8)
        for at, label in enumerate(labels):  # a brighter row, at the height of the label
            drawn[at, 2 * label + 4] += 48
        repeats = copies if name == "train" else 1
        np.savez(folder / f"{name}.npz", images=np.tile(drawn, (repeats, 1, 1)), labels=np.tile(labels, repeats))


def pretraining(folder: Path) -> None:
    """A folder ``bert`` with files as the script for BERT reads them, and the configuration of a small model."""
    import h5py

    draw = np.random.default_rng(0)
    (folder / "bert").mkdir()
    for part in range(4):
        with h5py.File(folder / "bert" / f"training{part}.hdf5", "w") as file:
            masked = np.sort(draw.permuted(np.tile(np.arange(1, 16), (64, 1)), axis=1)[:, :5], axis=1)
            file["input_ids"] = draw.integers(0, 96, (64, 16))
            file["input_mask"] = np.ones((64, 16), dtype=np.int64)
            file["segment_ids"] = np.repeat([[0] * 8 + [1] * 8], 64, axis=0)
            file["masked_lm_positions"] = masked
            file["masked_lm_ids"] = draw.integers(0, 96, (64, 5))
            file["next_sentence_labels"] = draw.integers(0, 2, 64)
    (folder / "bert" / "config.json").write_text(json.dumps({
        "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
        "hidden_act": "gelu", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
        "max_position_embeddings": 32, "type_vocab_size": 2, "initializer_range": 0.02,
    }))  # fmt: skip


def language_model(folder: Path) -> None:
    """A small GPT-J in ``gptj``, with a tokenizer of words, and lines of these words in ``text``."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPTJConfig, GPTJForCausalLM, PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["<unk>", "<eos>", *(f"w{n}" for n in range(96))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", eos_token="<eos>", model_max_length=32
    )
    tokenizer.save_pretrained(folder / "gptj")
    torch.manual_seed(0)
    config = GPTJConfig(
        vocab_size=100, n_positions=32, n_embd=32, n_layer=4, n_head=4, rotary_dim=4, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    GPTJForCausalLM(config).save_pretrained(folder / "gptj")
    (folder / "text").mkdir()
    for kind in ("train", "validation"):
        draw = random.Random(kind)
        lines = [" ".join(f"w{draw.randrange(96)}" for _ in range(64)) for _ in range(64)]
        (folder / "text" / f"{kind}.txt").write_text("\n".join(lines))
