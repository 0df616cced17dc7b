"""Images: a model of pixels, one after the other: its data, and the images that it draws."""

from tarnn.tasks.images.readers import Images, read_images

__all__ = ["Images", "read_images"]
