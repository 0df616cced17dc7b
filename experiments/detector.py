"""A small detector of objects with a linear encoder, trained on 128 images: that it learns, and no more.

    python experiments/detector.py                    # data from ../shared/data/coco128; killed, it goes on
    python experiments/detector.py --data FOLDER      # that holds coco128_96px.npz

DETR (Carion et al. 2020, arXiv 2005.12872) in small: convolutions make 24 × 24 places of an image of 96 × 96, an encoder of
linear attention lets each see all others, and a decoder of softmax attention turns learned queries into boxes and classes. A
loss between sets: the best match of predictions and objects (the Hungarian method), then classes, distances and overlaps.

128 images are far too few to detect anything in others; what is reported is what the model knows of the images it has seen,
and the loss on a few that it has not.
"""

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, l1_loss

sys.path.insert(0, str(Path(__file__).parents[1]))
from scripts.common.loop import train
from scripts.common.options import parse
from scripts.common.results import Unmeasured, run
from scripts.common.tables import markdown, page
from tarnn.models import TarnnConfig, TarnnModel

FULL = {
    "steps": 1500,
    "batch_size": 16,
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "queries": 24,
    "held_out": 16,
    "learning_rate": 1e-3,
    "data": Path(__file__).parents[2] / "shared" / "data" / "coco128",
    "runs": Path("runs/detector"),
}
QUICK = {"steps": 2, "batch_size": 2, "hidden": 16, "layers": 1, "heads": 2, "queries": 4}
CLASS, DISTANCE, OVERLAP, NOTHING = 1.0, 5.0, 2.0, 0.1  # weights of the paper; the last: of the class "no object"


class Image(NamedTuple):
    pixels: Tensor  # (3, side, side), 0 to 1
    boxes: Tensor  # (n, 4): centre x and y, width, height, as shares of the image
    classes: Tensor  # (n,)


class Detector(nn.Module):
    def __init__(self, options, num_classes: int):
        super().__init__()
        width = options.hidden
        self.pixels = nn.Sequential(
            nn.Conv2d(3, width // 2, 5, stride=2, padding=2),
            nn.GELU(),
            nn.Conv2d(width // 2, width, 3, stride=2, padding=1),
            nn.GroupNorm(4, width),
        )
        sizes = {"hidden_size": width, "num_hidden_layers": options.layers, "num_attention_heads": options.heads}
        self.encoder = TarnnModel(TarnnConfig(vocab_size=1, causal=False, position="none", attention="linear", **sizes))
        self.rows, self.columns = (nn.Parameter(torch.randn(64, width) / 10) for _ in range(2))
        self.queries = nn.Parameter(torch.randn(options.queries, width))
        layer = nn.TransformerDecoderLayer(width, options.heads, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerDecoder(layer, options.layers, norm=nn.LayerNorm(width))
        self.to_classes, self.to_boxes = nn.Linear(width, num_classes + 1), nn.Linear(width, 4)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (b, queries, classes + 1), the last for no object, and boxes (b, queries, 4)."""
        x = self.pixels(pixels)  # (b, hidden, rows, columns)
        x = x + self.rows[: x.shape[2]].T[:, :, None] + self.columns[: x.shape[3]].T[:, None]
        x = self.encoder(inputs_embeds=x.flatten(2).mT.contiguous(), use_cache=False).last_hidden_state
        y = self.decoder(self.queries.expand(len(x), -1, -1), x)
        return self.to_classes(y), self.to_boxes(y).sigmoid()


def main() -> int:
    return run(parse(__file__, __doc__, FULL, QUICK), measure, report=report)


def read(folder: Path) -> tuple[list[Image], int]:
    """Images, and the number of classes."""
    path = folder / "coco128_96px.npz"
    if not path.exists():
        raise Unmeasured(f"there is no {path.name} in {folder}; --data FOLDER says where it is")
    with np.load(path) as z:
        pixels = torch.from_numpy(z["images"]).permute(0, 3, 1, 2) / 255
        boxes, classes = torch.from_numpy(z["boxes"]), torch.from_numpy(z["classes"].astype(np.int64))
        cuts, names = z["offsets"].tolist(), z["class_names"]
    return [Image(x, boxes[a:b], classes[a:b]) for x, a, b in zip(pixels, cuts, cuts[1:])], len(names)


def corners(boxes: Tensor) -> Tensor:
    """Left, top, right, bottom."""
    centre, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([centre - size / 2, centre + size / 2], -1)


def overlaps(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Intersection over union, and its generalisation that also says how far apart boxes are (arXiv 1902.09630), (…)."""
    a, b = corners(a), corners(b)
    area = lambda x: (x[..., 2:] - x[..., :2]).clamp(min=0).prod(-1)  # noqa: E731
    both = area(torch.cat([torch.maximum(a[..., :2], b[..., :2]), torch.minimum(a[..., 2:], b[..., 2:])], -1))
    either = area(a) + area(b) - both
    around = area(torch.cat([torch.minimum(a[..., :2], b[..., :2]), torch.maximum(a[..., 2:], b[..., 2:])], -1))
    return both / either.clamp(min=1e-9), both / either.clamp(min=1e-9) - (around - either) / around.clamp(min=1e-9)


@torch.no_grad()
def match(logits: Tensor, boxes: Tensor, image: Image) -> tuple[Tensor, Tensor]:
    """Which query stands for which object of an image: the assignment of least cost."""
    share = logits.softmax(-1)[:, image.classes]
    distance = torch.cdist(boxes, image.boxes, p=1)
    cost = -CLASS * share + DISTANCE * distance - OVERLAP * overlaps(boxes[:, None], image.boxes)[1]
    return tuple(torch.as_tensor(x) for x in linear_sum_assignment(cost.numpy()))


def set_loss(logits: Tensor, boxes: Tensor, images: list[Image]) -> Tensor:
    labels = torch.full(logits.shape[:2], logits.shape[-1] - 1)
    near, far = [], []
    for i, image in enumerate(images):
        query, which = match(logits[i], boxes[i], image)
        labels[i, query] = image.classes[which]
        near.append(boxes[i, query])
        far.append(image.boxes[which])
    weights = torch.ones(logits.shape[-1])
    weights[-1] = NOTHING
    loss = CLASS * cross_entropy(logits.flatten(0, 1), labels.flatten(), weights)
    near, far = torch.cat(near), torch.cat(far)
    if not len(near):
        return loss
    distance = l1_loss(near, far) * 4  # the sum over the four numbers of a box
    return loss + DISTANCE * distance + OVERLAP * (1 - overlaps(near, far)[1]).mean()


@torch.no_grad()
def found_in(model: nn.Module, images: list[Image]) -> dict[str, float]:
    """Objects that were found: the likeliest class is theirs, and the boxes overlap by half. And how many were claimed."""
    right = claimed = there = 0
    for image in images:
        logits, boxes = (x[0] for x in model(image.pixels[None]))
        query, which = match(logits, boxes, image)
        there += len(image.classes)
        claimed += int((logits.argmax(-1) != logits.shape[-1] - 1).sum())
        hit = (logits[query].argmax(-1) == image.classes[which]) & (
            overlaps(boxes[query], image.boxes[which])[0] >= 0.5
        )
        right += int(hit.sum())
    return {"found, %": 100 * right / there, "claims that are right, %": 100 * right / max(claimed, 1)}


def measure(options, found: dict[str, Any], keep) -> None:
    torch.manual_seed(0)
    images, num_classes = read(options.data)
    seen, unseen = images[options.held_out :], images[: options.held_out]
    model = Detector(options, num_classes)

    def loss(model: nn.Module, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(step)
        batch = [seen[i] for i in torch.randint(len(seen), (options.batch_size,), generator=draw).tolist()]
        return set_loss(*model(torch.stack([x.pixels for x in batch])), batch)

    def look(model: nn.Module) -> dict[str, float]:
        pixels = torch.stack([x.pixels for x in unseen])
        return {**found_in(model, seen), "loss on unseen images": set_loss(*model(pixels), unseen).item()}

    every, rate = max(1, options.steps // 5), options.learning_rate
    done = train(options.runs, model, loss, options.steps, every=every, learning_rate=rate, measure=look)
    found.update(curve=done.curve, seconds=round(done.seconds), parameters=sum(x.numel() for x in model.parameters()))


def report(options, facts, found: dict[str, Any]) -> str:
    names = list(found["curve"][0])
    rows = [[x["step"], *(f"{x[name]:.2f}" for name in names[1:])] for x in found["curve"]]
    return page(
        "A detector with a linear encoder",
        f"{options.held_out} of the images are not trained on. {found['parameters']:,} parameters, "
        f"{found['seconds']} seconds of training.",
        markdown(names, rows, left=0),
    )


if __name__ == "__main__":
    raise SystemExit(main())
