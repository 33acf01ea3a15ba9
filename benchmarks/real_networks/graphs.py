"""Graph networks of `torch_geometric`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.real_networks.registry import BUILDERS, SAMPLES, Made, built_by, normal

NODES, EDGES, FEATURES = 9, 20, 8


def graphs(model: torch.nn.Module, **more: torch.Tensor) -> Made:
    """A batch of graphs of 9 nodes and 20 edges; the loss is over nodes, as those of all graphs in one."""
    batch = {"nodes": normal(NODES, FEATURES), "edges": torch.randint(0, NODES, (SAMPLES, 2, EDGES)),
             "target": normal(NODES, FEATURES), **more}  # fmt: skip

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        count = len(batch["nodes"])
        first = torch.arange(count)[:, None, None] * NODES
        edges = (batch["edges"] + first).transpose(0, 1).flatten(1)
        return F.mse_loss(model(batch["nodes"].flatten(0, 1), edges), batch["target"].flatten(0, 1))

    return model, batch, loss


GRAPH_NETWORKS: dict[str, dict[str, Any]] = {
    "GCN": {}, "GraphSAGE": {}, "GIN": {}, "GAT": {"heads": 2}, "EdgeCNN": {}, "GCN_jumping": {"jk": "cat"},
    "GCN_normed": {"norm": "LayerNorm"},
}  # fmt: skip


def graph_network(name: str, options: dict[str, Any]) -> Made:
    import torch_geometric.nn as nets

    return graphs(getattr(nets, name.split("_")[0])(FEATURES, 16, 3, FEATURES, **options))


for _name, _options in GRAPH_NETWORKS.items():
    BUILDERS[f"torch_geometric:{_name}"] = lambda name=_name, options=_options: graph_network(name, options)


@built_by("torch_geometric")
def graph_transformer() -> Made:
    import torch_geometric.nn as nets

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(nets.TransformerConv(FEATURES, 4, heads=2) for _ in range(3))

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x, edges).relu()
            return x

    return graphs(Network())


@built_by("torch_geometric")
def pooled_graphs() -> Made:
    """One number of each graph, by mean pooling."""
    import torch_geometric.nn as nets

    class Network(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nets.GIN(FEATURES, 16, 3)
            self.head = torch.nn.Linear(16, 1)

        def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor, count: int) -> torch.Tensor:
            found: torch.Tensor = self.head(nets.global_mean_pool(self.layers(x, edges), graph, count))
            return found

    model, batch, _ = graphs(Network())
    batch["target"] = normal(1)

    def loss(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
        count = len(batch["nodes"])
        first = torch.arange(count)[:, None, None] * NODES
        edges = (batch["edges"] + first).transpose(0, 1).flatten(1)
        graph = torch.arange(count).repeat_interleave(NODES)
        return F.mse_loss(model(batch["nodes"].flatten(0, 1), edges, graph, count), batch["target"])

    return model, batch, loss
