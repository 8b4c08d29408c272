"""The contact sheet: every upload with its picture, its number and how often its job ran."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

from pgqueue.demo.audit import Audit, Story, is_thumbnail

TILE, GAP, CAPTION, MARGIN, HEAD = 168, 22, 50, 52, 132
RADIUS = 18
SMOOTH = 4  # drawn this much larger and then reduced: Pillow draws without anti-aliasing
PAPER, CARD, INK, QUIET = "#11141b", "#1c212c", "#f2f4f8", "#8b94a7"
GREEN, AMBER, RED = "#5fd0a0", "#f5b04c", "#f0646c"


@dataclass(frozen=True, slots=True)
class _Look:
    color: str
    words: str


def contact_sheet(audit: Audit, file: Path) -> None:
    """Draw the sheet of all uploads as a PNG."""
    columns = max(4, math.ceil(math.sqrt(len(audit.stories) * 1.6)))
    rows = math.ceil(len(audit.stories) / columns)
    width = 2 * MARGIN + columns * (TILE + GAP) - GAP
    height = HEAD + rows * (TILE + CAPTION + GAP) - GAP + MARGIN
    sheet = Image.new("RGB", (width, height), PAPER)
    _draw_head(ImageDraw.Draw(sheet), audit, width)
    for place, story in enumerate(audit.stories):
        row, column = divmod(place, columns)
        _draw_tile(sheet, story, MARGIN + column * (TILE + GAP), HEAD + row * (TILE + CAPTION + GAP))
    sheet.save(file, "PNG")


def _draw_head(draw: ImageDraw.ImageDraw, audit: Audit, width: int) -> None:
    draw.text((MARGIN, 38), "pgqueue demo", INK, _font(34))
    sums = f"{audit.enqueued} jobs = {len(audit.completed)} completed + {len(audit.dead)} dead"
    rest = f"in {audit.total('attempts')} attempts; upload {audit.rolled_back} was rolled back"
    draw.text((MARGIN, 84), f"{sums}, {rest}", QUIET, _font(17))
    right = float(width - MARGIN)
    for color, words in ((RED, "dead letter"), (AMBER, "rescued"), (GREEN, "completed")):
        right -= draw.textlength(words, _font(17))
        draw.text((right, 84), words, QUIET, _font(17))
        right -= 18
        draw.ellipse((right, 90, right + 10, 100), fill=color)
        right -= 24


def _draw_tile(sheet: Image.Image, story: Story, left: int, top: int) -> None:
    look = _look(story)
    draw = ImageDraw.Draw(sheet)
    sheet.paste(_picture(story), (left, top), _rounded())
    if story.state != "completed":
        _draw_broken(draw, left, top)
    if look.color != GREEN:
        sheet.paste(look.color, (left - 5, top - 5), _frame())
    draw.text((left + 2, top + TILE + 8), f"{story.upload_id}", INK, _font(18))
    draw.ellipse((left + 2, top + TILE + 36, left + 9, top + TILE + 43), fill=look.color)
    draw.text((left + 15, top + TILE + 31), look.words, QUIET, _font(14))


def _look(story: Story) -> _Look:
    runs = f"{story.attempts} attempt{'' if story.attempts == 1 else 's'}"
    if story.state != "completed":
        return _Look(RED, f"{runs}, {'dead letter' if story.state == 'dead' else story.state}")
    return _Look(AMBER, f"{runs}, rescued") if story.lost else _Look(GREEN, runs)


def _picture(story: Story) -> Image.Image:
    if not story.file or not is_thumbnail(Path(story.file)):
        return Image.new("RGB", (TILE, TILE), CARD)
    with Image.open(story.file) as image:
        return ImageOps.fit(image.convert("RGB"), (TILE, TILE), Image.Resampling.LANCZOS)


def _draw_broken(draw: ImageDraw.ImageDraw, left: int, top: int) -> None:
    """A torn photograph: a frame with a zigzag where the rest of it should be."""
    right, bottom, middle, step = left + TILE - 48, top + TILE - 52, top + TILE // 2 + 4, (TILE - 96) // 6
    tear = [(left + 48 + step * place, middle + (8 if place % 2 else -4)) for place in range(7)]
    outline = [(left + 48, middle - 4), (left + 48, top + 44), (right, top + 44), (right, middle - 4), *reversed(tear)]
    draw.line(outline, RED, 3, joint="curve")
    draw.ellipse((right - 24, top + 54, right - 14, top + 64), fill=RED)
    draw.text((left + TILE // 2, bottom), "cannot be read", QUIET, _font(13), anchor="ma")


@functools.cache
def _rounded(size: int = TILE, radius: int = RADIUS) -> Image.Image:
    mask = Image.new("L", (size * SMOOTH, size * SMOOTH), 0)
    ImageDraw.Draw(mask).rounded_rectangle((0, 0, size * SMOOTH - 1, size * SMOOTH - 1), radius * SMOOTH, fill=255)
    return mask.resize((size, size), Image.Resampling.LANCZOS)


def _frame() -> Image.Image:
    """The mask of a thin line around a tile, two pixels away from it."""
    outer = _rounded(TILE + 10, RADIUS + 5).copy()
    outer.paste(0, (3, 3), _rounded(TILE + 4, RADIUS + 2))
    return outer


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
