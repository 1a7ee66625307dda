"""Messages with pictures, for tests that ask."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image as Pillow


def picture(colour: str = "red", size: tuple[int, int] = (56, 56)) -> dict[str, Any]:
    file = io.BytesIO()
    Pillow.new("RGB", size, colour).save(file, "PNG")
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64,"
                                               + base64.b64encode(file.getvalue()).decode()}}


def asking(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": part} if isinstance(part, str) else part
                                         for part in parts]}]
