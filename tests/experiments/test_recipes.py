"""What the recipes' scripts compute, held against definitions."""

import detector
import pytest
import torch


def test_overlaps_of_boxes():
    a = torch.tensor([0.25, 0.25, 0.5, 0.5])
    others = torch.tensor([[0.25, 0.25, 0.5, 0.5], [0.5, 0.25, 0.5, 0.5], [0.875, 0.875, 0.25, 0.25]])
    shared, apart = detector.overlaps(a, others)
    assert shared.tolist() == pytest.approx([1, 1 / 3, 0])
    assert apart.tolist() == pytest.approx(
        [1, 1 / 3, -(1 - 0.25 - 0.0625)]
    )  # less the share of the hull that is in neither


def test_queries_are_matched_to_objects_whatever_their_order():
    boxes = torch.tensor([[0.2, 0.2, 0.1, 0.1], [0.5, 0.5, 0.3, 0.3], [0.8, 0.8, 0.2, 0.2]])
    image = detector.Image(torch.zeros(3, 4, 4), boxes[[2, 0]], torch.tensor([1, 0]))
    logits = torch.tensor([[9.0, 0, 0], [0, 0, 9], [0, 9, 0]])
    query, which = detector.match(logits, boxes, image)
    assert dict(zip(query.tolist(), which.tolist())) == {0: 1, 2: 0}
    right, swapped = (detector.set_loss(x[None], boxes[None], [image]) for x in (logits, logits.flip(0)))
    assert right < 0.01 < swapped
