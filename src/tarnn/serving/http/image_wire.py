"""The bodies of /v1/images/generations: what is drawn, and images as PNG."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from tarnn.serving.http.wire import Wire

REFUSED = {
    "prompt": "These models draw without words: leave prompt empty, and give a class_label where the model knows classes.",
    "response_format": "Images come in the answer itself: response_format is b64_json.",
    "output_format": "Images are PNG: output_format is png.",
    "background": "Images have no transparency: background is opaque.",
    "quality": "A model draws in one quality: leave quality out.",
    "style": "A model draws in one style: leave style out.",
}


class ImageRequest(Wire):
    """prompt: of an official client, which must send one; it is empty. size: the model's own, WIDTHxHEIGHT.

    partial_images: how often a streamed image is sent before it is whole; every row where it is left out.
    """

    refused: ClassVar[dict[str, str]] = REFUSED

    model: str | None = None
    prompt: Literal[""] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    size: str | None = None
    class_label: Annotated[int, Field(ge=0)] | None = None
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    background: Literal["opaque", "auto"] | None = None
    quality: Literal["auto"] | None = None
    stream: bool | None = None
    partial_images: Annotated[int, Field(ge=0)] | None = None
    user: str | None = None


class Image(BaseModel):
    b64_json: str


class ImageInputTokens(BaseModel):
    image_tokens: int
    text_tokens: Literal[0] = 0


class ImageUsage(BaseModel):
    """Tokens are values of a pixel's channel; the start of an image is one too."""

    input_tokens: int
    input_tokens_details: ImageInputTokens
    output_tokens: int
    total_tokens: int


class ImageList(BaseModel):
    created: int
    data: list[Image]
    background: Literal["opaque"] = "opaque"
    output_format: Literal["png"] = "png"
    size: str
    usage: ImageUsage


class PartialImage(BaseModel):
    """An image as far as it is drawn; what is missing is black. rows: how many are whole. image_index: of n images."""

    type: Literal["image_generation.partial_image"] = "image_generation.partial_image"
    b64_json: str
    created_at: int
    size: str
    partial_image_index: int
    image_index: int
    rows: int
    background: Literal["opaque"] = "opaque"
    output_format: Literal["png"] = "png"
    quality: Literal["auto"] = "auto"


class CompletedImage(BaseModel):
    type: Literal["image_generation.completed"] = "image_generation.completed"
    b64_json: str
    created_at: int
    size: str
    image_index: int
    usage: ImageUsage
    background: Literal["opaque"] = "opaque"
    output_format: Literal["png"] = "png"
    quality: Literal["auto"] = "auto"
