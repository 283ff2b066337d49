"""Images as endpoints for chat completions take them: PNG or JPEG, upright, in `data:` URLs."""

from __future__ import annotations

import base64
import io

import PIL.Image

from jaxrl.envs.image_decoding import opened, orientation, reading, upright
from jaxrl.envs.images import Picture

_TAKEN = ("PNG", "JPEG")
_GREY = (128, 128, 128)


def sent_image(picture: Picture, *, is_blank: bool = False) -> Picture:
    """The image to send: its file or a PNG, upright; a grey one of its size if `is_blank`.

    Args:
        picture: as it is given.
        is_blank: a grey image of its size is sent in its place.

    Raises:
        UnreadableError: it is no image, or damaged.
    """
    with reading(picture), opened(picture) as image:
        if not is_blank and image.format in _TAKEN and orientation(image) in (None, 1):
            return Picture(data=picture.read())
        whole = upright(image)
    file = io.BytesIO()
    (PIL.Image.new("RGB", whole.size, _GREY) if is_blank else whole).save(file, "PNG")
    return Picture(data=file.getvalue())


def url_of(picture: Picture) -> str:
    """The `data:` URL of an image that is sent."""
    data = picture.read()
    kind = "jpeg" if data.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
