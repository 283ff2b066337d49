"""Videos by the processors of transformers, which require torchvision.

    python -m tests.extras.vision.video_reference IN.pickle OUT.pickle

The input is a list of `(family, settings, pixels, metadata)`, and the output has the ids of a
prompt, patches, grid, positions and interval of each. If torchvision is missing, its functions are
replaced by those of torch that it calls. `main` is for a separate process, which loads
transformers afterwards.
"""

import importlib.machinery
import importlib.util
import pickle
import sys
import types
from enum import Enum

PROMPT = "<|im_start|>user\n<|vision_start|><|video_pad|><|vision_end|>What?<|im_end|>\n"


class InterpolationMode(Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def install_torchvision():
    import torch

    def resize(image, size, interpolation, antialias):
        frames = image.reshape(-1, *image.shape[-3:])
        out = torch.nn.functional.interpolate(
            frames, size, mode=interpolation.value, antialias=antialias, align_corners=False
        )
        return out.reshape(*image.shape[:-2], *size)

    def normalize(image, mean, std, inplace):
        mean, std = (torch.as_tensor(x)[:, None, None] for x in (mean, std))
        return (image - mean) / std

    functional = {
        "resize": resize,
        "normalize": normalize,
        "grayscale_to_rgb": lambda image: image,
        "InterpolationMode": InterpolationMode,
    }
    contents = {
        "torchvision": {"__version__": "0.28.0"},
        "torchvision.io": {},
        "torchvision.transforms": {"InterpolationMode": InterpolationMode},
        "torchvision.transforms.functional": {"pil_to_tensor": None},
        "torchvision.transforms.v2": {},
        "torchvision.transforms.v2.functional": functional,
    }
    for name, fields in contents.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__path__ = []
        vars(module).update(fields)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def build_processor(family, settings):
    import transformers

    from tests.images import VIDEO_TEMPLATE, video_tokenizer

    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=video_tokenizer()._tokenizer, chat_template=VIDEO_TEMPLATE
    )
    if family == "qwen3_vl":
        from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor as Processor
        from transformers.models.qwen3_vl.video_processing_qwen3_vl import (
            Qwen3VLVideoProcessor as VideoProcessor,
        )
    else:
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import (
            Qwen2_5_VLProcessor as Processor,
        )
        from transformers.models.qwen2_vl.video_processing_qwen2_vl import (
            Qwen2VLVideoProcessor as VideoProcessor,
        )
    return Processor(
        transformers.Qwen2VLImageProcessorPil(),
        tokenizer,
        VideoProcessor(**settings),
        chat_template=VIDEO_TEMPLATE,
    )


def process(family, settings, pixels, metadata):
    """Return the ids of the prompt, the patches, the grid and the interval of a video."""
    fields = build_processor(family, settings)(
        text=[PROMPT],
        videos=[pixels],
        video_metadata=[metadata],
        do_sample_frames="frames_indices" not in metadata,
        return_tensors="pt",
    )
    interval = fields.get("second_per_grid_ts")
    return {
        "ids": fields["input_ids"][0].numpy(),
        "patches": fields["pixel_values_videos"].numpy(),
        "grid": fields["video_grid_thw"][0].tolist(),
        "interval": None if interval is None else float(interval[0]),
    }


def main(source, target):
    if importlib.util.find_spec("torchvision") is None:
        install_torchvision()
    with open(source, "rb") as file:
        requests = pickle.load(file)
    results = [process(*request) for request in requests]
    with open(target, "wb") as file:
        pickle.dump(results, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
