"""Images for chat-completions endpoints: upright PNG or JPEG in `data:` URLs."""

from __future__ import annotations

import base64
import io

import PIL.Image

from jaxrl.envs.image_decoding import load_upright, open_image, read_orientation, wrap_image_errors
from jaxrl.envs.images import Picture, UnreadableImageError, Video

_FORMATS = ("PNG", "JPEG")
_GRAY = (128, 128, 128)


def prepare_image(picture: Picture, *, is_blank: bool = False) -> Picture:
    """Return the image as an upright PNG, or unchanged if it is an upright PNG or JPEG.

    Args:
        picture: Image in any format that Pillow can read.
        is_blank: True to return a gray image of the same size.

    Raises:
        UnreadableError: The file is damaged or not an image.
    """
    if isinstance(picture, Video):
        raise UnreadableImageError(
            f"{picture.name} is a video; expected images, which endpoints accept."
        )
    with wrap_image_errors(picture), open_image(picture) as image:
        if not is_blank and image.format in _FORMATS and read_orientation(image) in (None, 1):
            return Picture(data=picture.read())
        rotated = load_upright(image)
    file = io.BytesIO()
    (PIL.Image.new("RGB", rotated.size, _GRAY) if is_blank else rotated).save(file, "PNG")
    return Picture(data=file.getvalue())


def make_data_url(picture: Picture) -> str:
    """Encode a PNG or JPEG image as a `data:` URL."""
    data = picture.read()
    kind = "jpeg" if data.startswith(b"\xff\xd8") else "png"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
