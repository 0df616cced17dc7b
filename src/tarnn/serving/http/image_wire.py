"""The bodies of /v1/images/generations: what is drawn, and images as PNG."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, RootModel

from tarnn.serving.http.wire import Drawn

REFUSED = {
    "prompt": "These models draw without words: leave prompt empty, and give a class_label where the model knows classes.",
    "response_format": "Images come in the answer itself: response_format is b64_json.",
    "output_format": "Images are PNG: output_format is png.",
    "background": "Images have no transparency: background is opaque.",
    "quality": "A model draws in one quality: leave quality out.",
    "style": "A model draws in one style: leave style out.",
}


class ImageRequest(Drawn):
    """prompt: of an official client, which must send one; it is empty. size: the model's own, WIDTHxHEIGHT.

    partial_images: how often a streamed image is sent before it is whole; every row where it is left out.
    """

    refused: ClassVar[dict[str, str]] = REFUSED

    prompt: Literal[""] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    size: str | None = None
    class_label: Annotated[int, Field(ge=0)] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    background: Literal["opaque", "auto"] | None = None
    quality: Literal["auto"] | None = None
    partial_images: Annotated[int, Field(ge=0)] | None = None


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


class StreamedImage(BaseModel):
    """image_index: of n images."""

    b64_json: str
    created_at: int
    size: str
    image_index: int
    background: Literal["opaque"] = "opaque"
    output_format: Literal["png"] = "png"
    quality: Literal["auto"] = "auto"


class PartialImage(StreamedImage):
    """An image as far as it is drawn; what is missing is black. rows: how many are whole."""

    type: Literal["image_generation.partial_image"] = "image_generation.partial_image"
    partial_image_index: int
    rows: int


class CompletedImage(StreamedImage):
    type: Literal["image_generation.completed"] = "image_generation.completed"
    usage: ImageUsage


class ImageEvent(RootModel[PartialImage | CompletedImage]):
    """The data of an event of images that are streamed."""
