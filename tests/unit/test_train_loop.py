"""When a training counts as a success."""

import pytest

from shoal.train.loop import Measured, Run, Step
from shoal.train.measures import Measures


def measures(mrr: float, recall_at_1: float, cosine: float) -> Measures:
    return Measures(
        pairs=40, candidates=40, recall_at_1=recall_at_1, mrr=mrr, cosine=cosine, cosine_others=0.1
    )


@pytest.mark.parametrize(
    ("after", "better"),
    [
        ((0.775, 0.6, 0.9), False),
        ((0.775, 0.625, 0.2), True),
        ((0.78, 0.6, 0.2), True),
        ((0.77, 0.6, 0.9), False),
    ],
)
def test_training_is_better_by_ranks_alone(after, better):
    """Pairs that are only nearer are found no better, so nothing was gained."""
    run = Run(measures(0.775, 0.6, 0.5), best=Measured(Step(1, 1, 1, 0.1), measures(*after)))
    assert run.better is better
