"""Images for tests: a template that writes images, small processors, images of noise."""

import io

import numpy as np
import PIL.Image
import pytest
from transformers import Qwen2VLImageProcessorPil

from tests.toys import toy_tokenizer

PAD = "<|image_pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    "{% if tools %}{% endif %}"
)
SPECIAL = ("<|vision_start|>", "<|vision_end|>", PAD)
VIDEO_PAD = "<|video_pad|>"
VIDEO_TEMPLATE = TEMPLATE.replace(
    "{% else %}{{ part.text }}",
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}",
)


def looking_tokenizer(**settings):
    """Return the toy tokenizer of a model that reads images."""
    plain = toy_tokenizer(chat_template=TEMPLATE, special=SPECIAL)
    [pad] = plain.encode(PAD)
    return toy_tokenizer(
        **{"chat_template": TEMPLATE, "special": SPECIAL, "image_id": pad, **settings}
    )


def video_tokenizer():
    """Return the toy tokenizer of a model that also reads videos."""
    settings = {"special": (*SPECIAL, VIDEO_PAD), "chat_template": VIDEO_TEMPLATE}
    [video_id] = looking_tokenizer(**settings).encode(VIDEO_PAD)
    return looking_tokenizer(**settings, video_id=video_id)


def save_processor(folder, **settings):
    """Save a processor with patches of 4 x 4 pixels, four of which are one token."""
    sizes = {"patch_size": 4, "merge_size": 2, "min_pixels": 64, "max_pixels": 1024}
    Qwen2VLImageProcessorPil(**(sizes | settings)).save_pretrained(folder)
    return str(folder)


def drawn(width=16, height=24, seed=0, mode="RGB"):
    """Return an image of noise."""
    shape = (height, width, {"RGB": 3, "RGBA": 4}[mode])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    return PIL.Image.fromarray(pixels, mode)


def encoded(image, kind="PNG", **settings):
    """Return the bytes of a file with this image."""
    file = io.BytesIO()
    image.save(file, kind, **settings)
    return file.getvalue()


def encode_video(pixels, kind="matroska", codec="ffv1", pixel_format="bgr0"):
    """Return a file with these frames, 10 per second; the default is lossless."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=10)
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = pixel_format
        for frame in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "rgb24")))
        container.mux(stream.encode())
    return file.getvalue()
