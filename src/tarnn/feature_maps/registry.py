"""The names of feature maps: each is declared by the class that it names (see `by_name` for maps from names)."""

from tarnn.registry import Registry

MAPS = Registry("feature map", "tarnn.feature_maps", {"performer": "favor"})
register, names = MAPS.register, MAPS.names
