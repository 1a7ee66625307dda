"""transformers' own server for images without torchvision.

    python -m tools.bench.serving.transformers_serve FOLDER --host 127.0.0.1 --port 8000 --device cpu

`transformers serve` (extra `serving`) takes its processor from AutoProcessor, which needs torchvision for video, and
torchvision needs a build for the installed torch.  Here stills go through the family's own processor with transformers'
Pillow image processor; the rest is the unchanged server, with its command line.
"""

from __future__ import annotations

import sys

from transformers import AutoImageProcessor, AutoTokenizer, Qwen3VLProcessor
from transformers.cli.serving.model_manager import ModelManager
from transformers.cli.transformers import main


class StillsProcessor(Qwen3VLProcessor):
    """Without the video processor."""

    def check_argument_for_proper_class(self, argument_name, argument):
        """Raises TypeError."""
        if argument_name != "video_processor":
            return super().check_argument_for_proper_class(argument_name, argument)


def load_processor(self, folder, gguf_file=None):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return StillsProcessor(images, tokenizer, None, chat_template=tokenizer.chat_template)


if __name__ == "__main__":
    ModelManager._load_processor = load_processor
    sys.argv[1:1] = ["serve"]
    main()
