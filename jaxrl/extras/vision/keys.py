"""Config keys for image preprocessing."""

from jaxrl.config.keys import FREE, Key, Rule

# fmt: off
KEYS = {
    "images.min_pixels": Key(0, "Minimum pixels per image; smaller images are enlarged. 0: as in "
        "`preprocessor_config.json`.", at_least=0),
    "images.max_pixels": Key(0, "Maximum pixels per image; larger images are reduced. 0: as in "
        "`preprocessor_config.json`.", at_least=0),
    "images.cache_mib": Key(256.0, "MiB of preprocessed images kept in memory; the least "
        "recently used are evicted.", at_least=0, restart=FREE),
}
# fmt: on

RULES = (
    Rule(
        "images.max_pixels",
        lambda c: 0 < c.images.max_pixels < c.images.min_pixels,
        "at least images.min_pixels, or 0",
    ),
)
"""Invalid combinations of keys."""
