"""Pictures as arrays: reading their bytes within limits, and making them ready for a network.

Owns which formats are read, and the usual preparations of image networks. Imports Pillow when a
picture is read, not before. Does not own documents (`documents`) or networks.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shoal.errors import InvalidRequest
from shoal.wire.media import MAX_PIXELS, size_fault

if TYPE_CHECKING:
    from PIL.Image import Image

Floats = npt.NDArray[np.float32]

# Neither of those that Pillow hands to other programs (EPS) nor of those that nobody sends.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
# What Pillow's readers raise at bytes that are no picture after all; it has no base for them.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    LookupError,
    TypeError,
    OverflowError,
    EOFError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True, slots=True)
class Preparation:
    """How a picture becomes a network's input.

    resize_px: the shorter side is scaled to it, or both where `squash`; then the middle is cut out.
    mean, scale: a colour value `v` of 0 to 255 becomes `(v - mean) / scale`, by channel in the
    order of the network: red, green, blue, or the reverse where `bgr`.
    """

    resize_px: int = 256
    squash: bool = False
    bgr: bool = False
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    scale: tuple[float, float, float] = (255.0, 255.0, 255.0)


# `imagenet`: statistics of the ImageNet training set, as torchvision's networks use them.
# `tensorflow`: colours from about -1 to 1, as EfficientNet-lite was trained.
# `caffe`: the means of the same set that networks of Caffe subtract, rounded.
PREPARATIONS = {
    "imagenet": Preparation(
        mean=(123.675, 116.28, 103.53),
        scale=(58.395, 57.12, 57.375),
    ),
    "caffe": Preparation(squash=True, bgr=True, mean=(104.0, 117.0, 123.0), scale=(1.0, 1.0, 1.0)),
    "tensorflow": Preparation(mean=(127.0, 127.0, 127.0), scale=(128.0, 128.0, 128.0)),
    "unit": Preparation(),
}


def read_image(blob: bytes) -> Image:
    """The picture as RGB, upright (its camera's orientation applied), what is clear on white.

    Raises `InvalidRequest` for bytes that are no whole picture of `FORMATS`, and for more than
    `MAX_PIXELS` pixels or a side longer than `MAX_SIDE_PX`, before they are decompressed.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not blob:
        raise InvalidRequest("the image is empty: zero bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its size, which is checked here
            image = Image.open(io.BytesIO(blob), formats=FORMATS)
            fault = size_fault(image.width, image.height)
            if fault is not None:
                raise InvalidRequest(f"the image has {fault}")
            image.load()
            return _on_white(ImageOps.exif_transpose(image))
    except Image.DecompressionBombError as error:
        raise InvalidRequest(f"the image has more than {MAX_PIXELS} pixels") from error
    except UnidentifiedImageError as error:
        known = ", ".join(FORMATS)
        raise InvalidRequest(f"the bytes are no image of a known format ({known})") from error
    except _BROKEN as error:
        raise InvalidRequest(f"the image is broken: {error}") from error


def _on_white(image: Image) -> Image:
    from PIL import Image as Pillow

    if image.mode.startswith("I"):  # 16 bits of grey, which a plain conversion would cut off
        grey = np.asarray(image).astype(np.float32) / 257
        return Pillow.fromarray(grey.clip(0, 255).astype(np.uint8)).convert("RGB")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    paper = Pillow.new("RGBA", image.size, "white")
    paper.alpha_composite(image)
    return paper.convert("RGB")


def prepared(image: Image, size_px: int, how: Preparation) -> Floats:
    """The middle of a picture as a network wants it: float32 [size_px, size_px, 3]."""
    from PIL.Image import Resampling

    ratio = how.resize_px / min(image.size)
    width, height = (
        (how.resize_px, how.resize_px)
        if how.squash
        else (max(size_px, round(image.width * ratio)), max(size_px, round(image.height * ratio)))
    )
    left, top = (width - size_px) // 2, (height - size_px) // 2
    # Only the middle is resized: the ends of a very long picture never become pixels.
    across, down = image.width / width, image.height / height
    middle = (left * across, top * down, (left + size_px) * across, (top + size_px) * down)
    small = image.resize((size_px, size_px), Resampling.BILINEAR, box=middle)
    pixels: Floats = np.asarray(small, np.float32)
    if how.bgr:
        pixels = pixels[:, :, ::-1]
    mean: Floats = np.array(how.mean, np.float32)
    scale: Floats = np.array(how.scale, np.float32)
    return np.asarray((pixels - mean) / scale, np.float32)
