"""Images: a model of pixels, one after the other. What it reads, and what it draws."""

from tarnn.tasks.images.sources import Images, read_images

__all__ = ["Images", "read_images"]
