"""The training loop that experiments share."""

import pytest
import torch

from scripts.common.loop import train


def test_a_logged_loss_is_the_mean_since_the_line_before(tmp_path):
    """Also where a run ends, or goes on, between two lines of its log."""
    model = torch.nn.Linear(1, 1)
    losses = [3.0, 5.0, 1.0, 2.0, 7.0, 4.0]

    def trained(steps):
        return train(
            tmp_path,
            model,
            lambda model, step: model.weight.sum() * 0 + losses[step],
            steps,
            every=2,
            learning_rate=0.1,
            measure=lambda model: {},
        )

    assert [x["loss"] for x in trained(3).curve] == pytest.approx([4.0, 1.0])
    assert [(x["step"], x["loss"]) for x in trained(6).curve] == [(2, 4.0), (3, 1.0), (4, 2.0), (6, 5.5)]
