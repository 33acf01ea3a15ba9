"""Models that do what libraries do, and loops that users write, each split and held against the plain model: see
`workers/accepted_models.py` and `workers/accepted_scripts.py`."""

import pytest
from torch import nn

from shardwright.backends.torch.program.early_checks import require_whole_gradients
from shardwright.core.errors import CaptureError
from tests.torch.launch import on_ranks
from tests.torch.workers.accepted_models import CASES
from tests.torch.workers.accepted_scripts import SCRIPTS


@pytest.mark.parametrize("how", ["pp:2", pytest.param("tp:2", marks=pytest.mark.slow), "dp:2"])
def test_models_train_split_as_they_train_whole(how: str) -> None:
    outcome = on_ranks("accepted.py", 2, how, timeout_s=200)
    assert outcome.code == 0, outcome.text[-6000:]
    assert [line[3:] for line in outcome.text.splitlines() if line.startswith("ok ")] == [
        name for name, case in {**CASES, **SCRIPTS}.items() if how[:2] in case.axes
    ]


def test_hooks_that_are_given_something_else_than_a_gradient_are_refused() -> None:
    waiting, changing = nn.Linear(2, 2), nn.Linear(2, 2)
    waiting.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    changing.bias.register_hook(lambda gradient: gradient.clamp(-1, 1))
    with pytest.raises(CaptureError, match=r"hook on weight by register_post.*after all 4 microbatches"):
        require_whole_gradients(waiting, microbatches=4, ranks=1, tensor_ranks=1)
    with pytest.raises(CaptureError, match=r"hook on bias by register_hook.*axis of 2 ranks"):
        require_whole_gradients(changing, microbatches=1, ranks=2, tensor_ranks=2)
    with pytest.raises(CaptureError, match=r"hook on bias by register_hook: several pipeline stages use"):
        require_whole_gradients(changing, microbatches=1, ranks=2, tensor_ranks=1, shared={"weight", "bias"})
    require_whole_gradients(changing, microbatches=1, ranks=2, tensor_ranks=1, shared={"weight"})
    require_whole_gradients(waiting, microbatches=1, ranks=1, tensor_ranks=1)
    require_whole_gradients(changing, microbatches=4, ranks=4, tensor_ranks=1)
