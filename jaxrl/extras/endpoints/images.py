"""Images and video files for chat-completions endpoints, in `data:` URLs."""

from __future__ import annotations

import base64
import io
import mimetypes
from typing import Any

import PIL.Image

from jaxrl.envs.image_decoding import load_upright, open_image, read_orientation, wrap_image_errors
from jaxrl.envs.images import Picture, UnreadableImageError, Video

_FORMATS = ("PNG", "JPEG")
_GRAY = (128, 128, 128)


def prepare_image(encoded_image: Picture, *, is_blank: bool = False) -> Picture:
    """Return the image as an upright PNG, or unchanged if it is an upright PNG or JPEG.

    A video file is returned unchanged.

    Args:
        encoded_image: Image in any format that Pillow can read, or a video file.
        is_blank: True to return a gray image of the same size.

    Raises:
        UnreadableImageError: The image is damaged, the video file cannot be read, or the video is
            a list of frames or must be blank.
    """
    if isinstance(encoded_image, Video):
        if encoded_image.frames or is_blank:
            raise UnreadableImageError(
                f"{encoded_image.name} is a list of frames or must be blank; expected a video "
                "file, without the suite blank_images."
            )
        with wrap_image_errors(encoded_image):
            encoded_image.read()
        return encoded_image
    with wrap_image_errors(encoded_image), open_image(encoded_image) as image:
        if not is_blank and image.format in _FORMATS and read_orientation(image) in (None, 1):
            return Picture(data=encoded_image.read())
        rotated = load_upright(image)
    file = io.BytesIO()
    (PIL.Image.new("RGB", rotated.size, _GRAY) if is_blank else rotated).save(file, "PNG")
    return Picture(data=file.getvalue())


def format_part(encoded_image: Picture, url: str) -> dict[str, Any]:
    """Return an image or a video as a content part of a message.

    OpenAI's API does not accept videos; vLLM and SGLang accept `video_url`
    (https://docs.vllm.ai/en/stable/features/multimodal_inputs.html).
    """
    part_type = "video_url" if isinstance(encoded_image, Video) else "image_url"
    return {"type": part_type, part_type: {"url": url}}


def make_data_url(encoded_image: Picture) -> str:
    """Encode a PNG or JPEG image, or a video file, as a `data:` URL."""
    data = encoded_image.read()
    if isinstance(encoded_image, Video):
        media_type = mimetypes.guess_type(encoded_image.path)[0] or "video/mp4"
    else:
        media_type = "image/jpeg" if data.startswith(b"\xff\xd8") else "image/png"
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"
